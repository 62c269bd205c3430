"""Memory of processes: looked at in turns, and judged by its slope."""

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

_SAMPLE_S = 0.1
_Z95 = 1.96
_GROUPS = 10  # least parts of a series for an interval


@dataclasses.dataclass(frozen=True)
class Slope:
    """Growth with a 95 % interval."""

    value: float
    low: float
    high: float

    def within(self, limit: float) -> bool | None:
        """Whether it is at most the limit; None where the interval holds the limit."""
        if self.high <= limit:
            return True
        return False if self.low > limit else None

    def __str__(self) -> str:
        """The figures."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares, with Newey and West's error: memory at one moment resembles that before.

    Source: Newey, West: A simple, positive semi-definite, heteroskedasticity and autocorrelation
    consistent covariance matrix, Econometrica 55 (1987), with their usual number of lags.

    Args:
        x: where it was looked at, at least 10 values.
        y: what was found there.
    """
    assert len(x) == len(y) >= _GROUPS
    away = np.asarray(x, float) - np.mean(x)
    value = float(away @ np.asarray(y, float) / (away @ away))
    residual = np.asarray(y, float) - np.mean(y) - value * away
    moments = away * residual
    lags = int(4 * (len(x) / 100) ** (2 / 9))
    variance = float(moments @ moments)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(moments[lag:] @ moments[:-lag])
    error = _Z95 * float(np.sqrt(max(variance, 0.0))) / float(away @ away)
    return Slope(value, value - error, value + error)


def resident_kb(process: psutil.Process) -> float:
    """Resident memory; 0 once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(process.memory_info().rss / 1024)
    return 0.0


def shared_fairly_bytes(pid: int) -> int:
    """Memory of a process in which a page that n processes share counts as 1/n; 0 if it ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


class Watch:
    """Samples the memory of all of a server's processes together, ten times a second."""

    def __init__(self, processes: Callable[[], dict[str, psutil.Process]]) -> None:
        self.peak_bytes = 0
        self.first_bytes = 0
        self._processes = processes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-memory", daemon=True)

    def _run(self) -> None:
        known, looked_s = self._processes(), time.monotonic()
        while True:
            if time.monotonic() - looked_s > 1:  # one may have been started anew
                known, looked_s = self._processes(), time.monotonic()
            total = sum(shared_fairly_bytes(process.pid) for process in known.values())
            self.first_bytes = self.first_bytes or total
            self.peak_bytes = max(self.peak_bytes, total)
            if self._stopped.wait(_SAMPLE_S):
                return

    @contextlib.contextmanager
    def running(self) -> Iterator["Watch"]:
        """Sample for the length of a `with` block."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join()
