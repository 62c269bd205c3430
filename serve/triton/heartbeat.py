"""The thread by which a model's process shows that it lives, and dies with Triton."""

import os
import select
import signal
import threading
from pathlib import Path

from serve.wire.alive import INTERVAL_S, beat

LAST_S = 60.0
"""After so long without Python the kernel ends the process."""

_JOIN_S = 5.0


class Heartbeat:
    """Touches a file every second, on a thread of its own, from now until closed.

    Ends this process as soon as the one that started it has ended. Triton's own stub looks for that
    too, three times a second, but its way out can stop for good while Python's threads run, and it
    takes a process for alive that has ended and that nobody has asked about. That way out may even
    keep the interpreter's lock for good; then SIGALRM ends the process.

    Args:
        path: of the file.
        parent: the process that started this one.
    """

    def __init__(self, path: Path, parent: int) -> None:
        self._path = path
        self._parent = parent
        self._stop = os.eventfd(0)
        beat(path)
        self._thread = threading.Thread(target=self._run, name="earshot-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, for the process is about to end; SIGALRM sees to it. May be called again."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join(timeout=_JOIN_S)
            os.close(self._stop)

    def _run(self) -> None:
        try:
            parent = os.pidfd_open(self._parent)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
        events = select.poll()
        events.register(self._stop, select.POLLIN)
        events.register(parent, select.POLLIN)
        signal.setitimer(signal.ITIMER_REAL, LAST_S)
        while not (ready := events.poll(1000 * INTERVAL_S)):
            beat(self._path)
            signal.setitimer(signal.ITIMER_REAL, LAST_S)
        if any(fd == parent for fd, _ in ready):
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(parent)
