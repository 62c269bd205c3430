"""Which processes live, and how much memory they took at most."""

import subprocess
import sys

import pytest

from serve.contract.errors import UnavailableError
from serve.supervisor.processes import ManagedProcess, is_alive, live_children, peak_memory_bytes
from tests.waits import WAIT_S, wait_until


@pytest.fixture
def parent():
    """A process that starts a child in a thread for each line it reads, and says its pid."""
    code = (
        "import subprocess, sys, threading\n"
        "def start():\n"
        "    print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "    threading.Event().wait()\n"
        "for line in sys.stdin:\n"
        "    threading.Thread(target=start, daemon=True).start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        for child in live_children(process.pid):
            subprocess.run(["kill", str(child)], check=True)
        process.kill()


def new_child(parent):
    parent.stdin.write("\n")
    parent.stdin.flush()
    return int(parent.stdout.readline())


def ended(pid):
    """Wait for a process to become a zombie: its parent never asks about it."""
    wait_until(lambda: not is_alive(pid), "it lives")


def test_children_are_those_that_live_whichever_thread_made_them(parent):
    assert live_children(parent.pid) == []
    first, second = new_child(parent), new_child(parent)
    assert set(live_children(parent.pid)) == {first, second}
    assert is_alive(first)
    subprocess.run(["kill", "-KILL", str(first)], check=True)
    ended(first)
    assert live_children(parent.pid) == [second]


def test_a_process_that_is_gone_has_nothing():
    with subprocess.Popen(["true"]) as process:
        ended(process.pid)
        assert peak_memory_bytes(process.pid) == 0, "a zombie"
    assert is_alive(process.pid) is False
    assert live_children(process.pid) == []
    assert peak_memory_bytes(process.pid) == 0


@pytest.fixture
def child(tmp_path):
    """Starts a shell command that logs in tmp_path."""
    started = []

    def start(script):
        started.append(ManagedProcess(["/bin/sh", "-c", script], tmp_path / "log"))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_a_child_says_what_it_wrote_since_its_start(child, tmp_path):
    (tmp_path / "log").write_text("from one that ran before\n")
    one = child("echo out; echo err >&2; exit 3")
    wait_until(lambda: one.status() is not None, "it runs")
    assert (one.status(), one.log()) == (3, ["out", "err"])
    assert (tmp_path / "log").read_text().startswith("from one that ran before\n")


def test_what_a_child_makes_is_its_users_alone(child, tmp_path):
    one = child(f"touch {tmp_path}/made")
    wait_until(lambda: one.status() is not None, "it runs")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_child_asked_to_end_has_its_time_for_it(child):
    willing = child("trap 'exit 5' TERM; echo ready; while :; do sleep 0.02; done")
    wait_until(willing.log, "it does not start")
    assert willing.terminate(WAIT_S) == 5
    deaf = child("trap '' TERM; echo ready; while :; do sleep 0.02; done")
    wait_until(lambda: "ready" in deaf.log(), "it does not start")
    assert deaf.terminate(0.1) is None and deaf.status() is None


def test_a_child_is_killed_with_all_that_it_started(child):
    one = child("sleep 600 & echo $!; exit")
    wait_until(lambda: one.status() is not None, "it runs")
    (left,) = map(int, one.log())
    assert is_alive(left)
    one.kill()
    assert not is_alive(left)


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnavailableError, match="cannot start"):
        ManagedProcess(["/bin/true"], tmp_path / "log", folder=tmp_path / "none")
