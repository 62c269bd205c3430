"""What SIGHUP asks of a server in the foreground."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waits import WAIT_S, wait_until

WAIT = f"""
import signal, sys, threading
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)
from serve.cli.start import _Signals
signals = _Signals()
signals.armed = True
Path(sys.argv[1]).write_text("armed")
signals.stop_requested.wait(1.0 if sys.argv[2] == "ignored" else {WAIT_S})
stop, reload = signals.stop_requested.is_set(), signals.reload.is_set()
Path(sys.argv[1]).write_text(f"{{stop=}} {{reload=}}")
"""


def become(path: Path, text: str) -> None:
    """Wait until a file says this."""
    wait_until(lambda: path.exists() and path.read_text() == text, f"it never says {text}")


@pytest.mark.parametrize(
    ("before", "said"),
    [("taken", "stop=True reload=False"), ("ignored", "stop=False reload=False")],
)
def test_a_terminal_that_closes_ends_the_server_unless_hangups_are_ignored(tmp_path, before, said):
    file = tmp_path / "said"
    pid, terminal = pty.fork()
    if pid == 0:  # in its own session, with the pseudo-terminal
        os.execv(sys.executable, [sys.executable, "-c", WAIT, str(file), before])
    try:
        become(file, "armed")
        os.close(terminal)
        become(file, said)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_else_it_asks_for_another_engine(tmp_path):
    file = tmp_path / "said"
    command = [sys.executable, "-c", WAIT, str(file), "taken"]
    with subprocess.Popen(command, start_new_session=True) as process:
        become(file, "armed")
        process.send_signal(signal.SIGHUP)
        process.terminate()  # signals are taken by their numbers, so this is the second
        become(file, "stop=True reload=True")
