"""A thread that reports that the model's process is alive, and ends the process with Triton."""

import os
import select
import signal
import threading
from pathlib import Path

from serve.wire.liveness import INTERVAL_S, touch_heartbeat

LAST_S = 60.0
"""The kernel ends the process after this time without a running Python thread."""

_JOIN_S = 5.0


class Heartbeat:
    """A thread that touches a file every second until it is closed.

    It also ends this process as soon as the parent has ended. Triton's stub checks for that, too,
    three times a second. But its shutdown can hang while Python threads run, and it takes a zombie
    for a running process. The shutdown may even hold the GIL for ever; SIGALRM then ends the
    process.

    Args:
        path: the file to touch.
        parent: the id of the parent process.
    """

    def __init__(self, path: Path, parent: int) -> None:
        self._path = path
        self._parent = parent
        self._stop = os.eventfd(0)
        touch_heartbeat(path)
        self._thread = threading.Thread(target=self._run, name="earshot-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; may be called again. SIGALRM still ends a process that hangs."""
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
            touch_heartbeat(self._path)
            signal.setitimer(signal.ITIMER_REAL, LAST_S)
        if any(fd == parent for fd, _ in ready):
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(parent)
