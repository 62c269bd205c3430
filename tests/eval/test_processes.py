"""Child processes: what they send, how they end, and that nothing is left of them."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from eval import processes
from eval.processes import (
    ChildProcess,
    Watch,
    run_tool,
    shared_memory_bytes,
    slope,
    tree_memory_bytes,
)
from serve.contract.errors import AudioError, DeadlineError, EarshotError, UnavailableError
from serve.supervisor.processes import is_alive
from tests.marks import nightly
from tests.waits import wait_until

ROOT = Path(__file__).parents[2]
LIBRARIES = {*"torch transformers jiwer faster_whisper ctranslate2 pytriton tritonclient".split()}
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def echo(send, *words):
    """Send words; "fail" is an error."""
    send((os.getsid(0), os.getpid()))
    for word in words:
        print("about to send", word, flush=True)
        if word == "fail":
            raise AudioError("AUDIO: is empty")
        send(word)


def sleep_with_descendants(send, path):
    """One child stays in our session, one leaves it; both would outlive us. Write at last."""
    ours = subprocess.Popen(SLEEP)
    apart = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        send((ours.pid, apart.pid, tempfile.gettempdir()))
        time.sleep(600)
    finally:
        Path(path).write_text("closed")


def crash_with_a_descendant(send):
    send(subprocess.Popen(SLEEP).pid)
    print("the last words\n\n", flush=True)
    os.abort()


def ignore_sigterm(send):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(os.getpid())
    time.sleep(600)


def child(work, *arguments, log=None):
    return ChildProcess("the child", work, arguments, log)


def await_end(*pids):
    wait_until(lambda: not any(map(is_alive, pids)), "a process is left")


def test_messages_come_in_order_and_then_the_end(tmp_path):
    log = tmp_path / "deeper" / "log"
    with child(echo, "a", "b", log=log) as running:
        session, pid = running.receive(60)
        assert session == pid != os.getsid(0)  # so Ctrl-C in the terminal does not reach it
        assert [running.receive(60) for _ in range(3)] == ["a", "b", None]
        assert running.finished
    assert log.read_text().splitlines() == ["about to send a", "about to send b"]
    await_end(running.pid)


def test_the_childs_own_error_is_raised_here():
    with child(echo, "fail") as running:
        running.receive(60)
        with pytest.raises(AudioError, match="AUDIO: is empty"):
            running.receive(60)


def test_a_death_is_told_with_the_last_line_and_leaves_nothing(tmp_path):
    """The child's own child has no parent left: only the session tells where it belongs."""
    for log, where in ((None, "words"), (tmp_path / "log", f"its log is {tmp_path / 'log'}")):
        with child(crash_with_a_descendant, log=log) as running:
            orphan = running.receive(60)
            with pytest.raises(UnavailableError, match="ended early: the last words") as error:
                running.receive(60)
        assert str(error.value).endswith(where)
        await_end(orphan)


def test_nothing_is_left_of_a_child_that_is_given_up(tmp_path):
    with child(sleep_with_descendants, str(tmp_path / "said")) as running:
        ours, apart, folder = running.receive(60)
        assert Path(folder).is_dir() and folder != tempfile.gettempdir()
        with pytest.raises(DeadlineError, match="the child said nothing for 0 s"):
            running.receive(0.01)
    await_end(running.pid, ours, apart)
    assert not Path(folder).exists()
    assert (tmp_path / "said").read_text() == "closed"  # it may close what it holds


def test_a_child_that_does_not_heed_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "TERMINATE_TIMEOUT_S", 0.5)
    with child(ignore_sigterm) as running:
        pid = running.receive(60)
    await_end(pid)


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path):
    code = (
        "import sys, time; from eval.processes import ChildProcess\n"
        "from tests.eval.test_processes import sleep_with_descendants\n"
        "if __name__ == '__main__':\n"
        "    child = ChildProcess('one', sleep_with_descendants, ('/dev/null',), None)\n"
        "    found = child.receive(60); print(child.pid, *found[:2], flush=True); time.sleep(600)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    _, alive = psutil.wait_procs(family, 60)
    assert len(family) == 3 and alive == []


def test_a_tool_that_fails_is_named_with_its_command():
    run_tool([sys.executable, "-c", "pass"], "doing nothing", 60)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(EarshotError, match=r"failing failed with exit code 3: .*python.* -c raise"):
        run_tool(command, "failing", 60)
    with pytest.raises(DeadlineError, match="waiting took more than 0 s"):
        run_tool(SLEEP, "waiting", 0.01)


@pytest.mark.parametrize(
    ("module", "needed"), [("eval.accuracy.worker", set()), *nightly(("eval.bench.run", {"torch"}))]
)
def test_what_is_measured_shares_its_process_with_none_of_our_tools(module, needed):
    others = LIBRARIES - needed
    code = f"import sys, eval.__main__, {module}; print({others} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_ctrl_c_ends_a_tool_with_what_it_started(tmp_path, monkeypatch):
    path = tmp_path / "pid"

    def interrupt(tool, timeout):
        monkeypatch.undo()  # the next wait is a real one
        wait_until(lambda: path.exists() and path.read_text(), "the tool does not start")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_tool(["sh", "-c", f"sleep 600 & echo $! > {path}; wait"], "waiting", 60)
    await_end(int(path.read_text()))


# ---------------------------------------------------------------- memory


def walk(rng, count):
    """Errors that resemble those before them."""
    errors = np.zeros(count)
    for i in range(1, count):
        errors[i] = 0.7 * errors[i - 1] + rng.normal()
    return errors


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng, x = np.random.default_rng(0), np.arange(60.0)
    found = [slope(x, 2 * x + walk(rng, 60)) for _ in range(400)]
    share = np.mean([abs(value - 2) <= error for value, error in found])
    # A short series tells its own error a little too small. Taken for independent, 60 %.
    assert 0.82 < share < 0.97, share


def test_memory_is_watched_and_that_of_an_ended_process_is_none():
    sizes = itertools.chain([10, 30], itertools.repeat(20))
    with Watch(lambda: next(sizes)) as watch:
        wait_until(lambda: watch.peak_bytes == 30, "the second size was not sampled")
    assert watch.first_bytes == 10
    with psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        wait_until(lambda: shared_memory_bytes([process]) > 2**20, "it has no memory")
        assert tree_memory_bytes(process.pid) > 2**20
        process.stdin.close()
        process.wait(60)
        assert shared_memory_bytes([process]) == tree_memory_bytes(process.pid) == 0
