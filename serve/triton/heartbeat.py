"""A thread that touches the heartbeat file of the model's process, and ends it with Triton."""

import os
import select
import signal
import threading
from pathlib import Path

from serve.wire.liveness import INTERVAL_S, touch_heartbeat

WATCHDOG_S = 60.0
"""The kernel ends the process after this time without a running Python thread."""

_JOIN_S = 5.0


class Heartbeat:
    """A thread that ends this process with its parent and, once started, touches a file.

    Triton's stub checks the parent as well, three times a second. But the stub takes a zombie for a
    running process, it does not check while a model starts, and its shutdown can hang while Python
    threads run. The shutdown may even hold the GIL for ever; SIGALRM then ends the process.

    Args:
        path: the file to touch.
        parent: the id of the parent process.
    """

    def __init__(self, path: Path, parent: int) -> None:
        self._path = path
        self._parent = parent
        self._stop = os.eventfd(0)
        self._beats = False
        self._thread = threading.Thread(target=self._run, name="earshot-heartbeat", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Touch the file now, and every second until this is closed."""
        touch_heartbeat(self._path)
        signal.setitimer(signal.ITIMER_REAL, WATCHDOG_S)
        self._beats = True

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
        while not (ready := events.poll(1000 * INTERVAL_S)):
            if self._beats:
                touch_heartbeat(self._path)
                signal.setitimer(signal.ITIMER_REAL, WATCHDOG_S)
        if any(fd == parent for fd, _ in ready):
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(parent)
