"""A sign of life from a model's process, for those who cannot ask it."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 1.0
STALE_S = 3.0  # older than that, and the process does not run as it should

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
        path.touch()
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
        while not (found := events.poll(1000 * INTERVAL_S)):
            self._path.touch()
            signal.setitimer(signal.ITIMER_REAL, LAST_S)
        if any(fd == parent for fd, _ in found):
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(parent)


class Pulse:
    """How long ago a file was last touched, by this process's own clock.

    Clocks that are set, as after a machine slept, must not look like silence.

    Args:
        path: of the file.
        clock: seconds that nobody sets.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: int | None = None
        self._since = clock()

    def silent_s(self) -> float:
        """Seconds since a look at the file found it touched anew; before that, since the first."""
        try:
            touched = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            touched = None
        if touched != self._seen:
            self._seen, self._since = touched, self._clock()
        return self._clock() - self._since
