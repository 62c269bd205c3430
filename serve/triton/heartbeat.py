"""A sign of life from a model's process, for those who cannot ask it."""

import os
import signal
import threading
import time
from pathlib import Path

INTERVAL_S = 1.0
STALE_S = 3.0  # older than that, and the process does not run as it should

_JOIN_S = 5.0


class Heartbeat:
    """Touches a file every second, on a thread of its own, from now until closed.

    Ends this process once the one that started it has gone. Triton's own check for that takes a
    process for alive that has ended and that nobody has asked about.

    Args:
        path: of the file.
        parent: the process that started this one.
    """

    def __init__(self, path: Path, parent: int) -> None:
        self._path = path
        self._parent = parent
        self._stopped = threading.Event()
        path.touch()
        self._thread = threading.Thread(target=self._run, name="earshot-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            if os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGKILL)
            self._path.touch()


class Pulse:
    """How long ago a file was last touched, by this process's own clock.

    Clocks that are set, as after a machine slept, must not look like silence.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: int | None = None
        self._since = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since a look at the file found it touched anew; before that, since the first."""
        try:
            touched = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            touched = None
        if touched != self._seen:
            self._seen, self._since = touched, time.monotonic()
        return time.monotonic() - self._since
