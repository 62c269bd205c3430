"""Signs of life: given every second, read by a clock that is never set."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from serve.triton import heartbeat
from serve.triton.heartbeat import Heartbeat
from serve.wire import liveness
from serve.wire.liveness import heartbeat_age_s, touch_heartbeat
from tests.waits import WAIT_S, wait_until


def test_a_heartbeat_goes_on_until_it_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    path, others = tmp_path / "alive", set(threading.enumerate())
    beating = Heartbeat(path, os.getppid())
    assert not path.exists(), "the model is not ready yet"
    beating.start()
    for _ in range(2):
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > 0, "it stopped")
    beating.close()
    assert 50 < signal.setitimer(signal.ITIMER_REAL, 0)[0] <= heartbeat.WATCHDOG_S
    os.utime(path, (0, 0))
    assert "earshot-heartbeat" not in {thread.name for thread in {*threading.enumerate()} - others}
    assert path.stat().st_mtime == 0


@pytest.mark.parametrize("early", [True, False], ids=["before", "later"])
def test_it_ends_a_process_whose_parent_ends(tmp_path, early):
    code = (
        "import sys, time; from pathlib import Path; from serve.triton.heartbeat import Heartbeat\n"
        "beating = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "Path(sys.argv[1]).touch(); time.sleep(600)\n"
    )
    parent = subprocess.Popen(["sleep", "600"])
    if early:
        parent.kill()
        parent.wait()
    alive = tmp_path / "alive"
    command = [sys.executable, "-c", code, str(alive), str(parent.pid)]
    with subprocess.Popen(command) as child:
        if not early:
            wait_until(alive.exists, "it does not start")
            assert child.poll() is None
            parent.kill()  # and left a zombie
        assert child.wait(WAIT_S) == -signal.SIGKILL
    parent.wait()


def test_a_process_that_keeps_the_interpreters_lock_for_good_is_ended(tmp_path):
    code = (
        "import ctypes, os, sys; from pathlib import Path; from serve.triton import heartbeat\n"
        "heartbeat.WATCHDOG_S = 1.0\n"
        "beating = heartbeat.Heartbeat(Path(sys.argv[1]), os.getppid()); beating.start()\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "alive")]) as child:
        assert child.wait(WAIT_S) == -signal.SIGALRM


def test_silence_is_counted_by_the_clock_that_nobody_sets(tmp_path, monkeypatch):
    now, path = 1000 * 10**9, tmp_path / "alive"
    monkeypatch.setattr(liveness.time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(liveness.time, "time", lambda: 0.0)  # set back by years
    assert heartbeat_age_s(path) == float("inf"), "no beat yet"
    touch_heartbeat(path)
    assert heartbeat_age_s(path) == 0.0
    now += 7 * 10**9
    assert heartbeat_age_s(path) == 7.0
    touch_heartbeat(path)
    assert heartbeat_age_s(path) == 0.0
