"""The socket of orders at its end; tests/serve/supervisor/test_reload.py gives it some."""

import subprocess
import sys

# Ctrl-C comes when `close` has the lock by which the other thread tells that it has ended.
INTERRUPTED = """
import sys
from pathlib import Path
from serve.supervisor.control import Control

control = Control(Path(sys.argv[1]), None)

def wait():
    ended._cond.acquire()
    raise KeyboardInterrupt

ended = control._server._BaseServer__is_shut_down
ended.wait = wait
control.close()
"""


def test_an_end_that_is_interrupted_is_one(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"KeyboardInterrupt" in ended.stderr
