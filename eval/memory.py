"""Memory of processes, sampled while they work."""

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from eval.processes import descendants

SAMPLE_S = 0.1


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory; 0 once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


def tree_memory_bytes(pid: int) -> int:
    """Measure the resident memory of a process and all its descendants; 0 once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(map(resident_bytes, [psutil.Process(pid), *descendants(pid)]))
    return 0


def shared_fairly_bytes(pid: int) -> int:
    """Measure a process's memory, a page that n processes share as 1/n; 0 once it has ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0


class Watch:
    """Samples memory for the length of a `with` block.

    Args:
        measure: returns bytes.
    """

    def __init__(self, measure: Callable[[], int]) -> None:
        self.peak_bytes = 0
        self.first_bytes = 0
        self._measure = measure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "Watch":
        """Begin, and return itself."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            size = self._measure()
            self.first_bytes = self.first_bytes or size
            self.peak_bytes = max(self.peak_bytes, size)
            if self._stopped.wait(SAMPLE_S):
                return


def memory_of(find: Callable[[], dict[str, psutil.Process]]) -> Callable[[], int]:
    """Return a function that sums the memory of processes, which are found anew every second."""
    known, looked_s = find(), time.monotonic()

    def measure() -> int:
        nonlocal known, looked_s
        if time.monotonic() - looked_s > 1:  # one may have been started anew
            known, looked_s = find(), time.monotonic()
        return sum(shared_fairly_bytes(process.pid) for process in known.values())

    return measure


_Z95 = 1.96
_LEAST_VALUES = 10
_LEAST_INDEPENDENT = 4.0  # fewer leave no error to speak of


@dataclasses.dataclass(frozen=True)
class Slope:
    """Growth with a 95 % interval."""

    value: float
    low: float
    high: float

    def within(self, limit: float) -> bool | None:
        """Return whether it is at most the limit; None where the interval holds the limit."""
        if self.high <= limit:
            return True
        return False if self.low > limit else None

    def __str__(self) -> str:
        """Write the figures."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit least squares, with an error for values that resemble those before them, as memory's do.

    Source: Santer et al., Statistical significance of trends, J. Geophys. Res. 105 (2000): values
    with lag-1 autocorrelation r of the residuals count as n (1 - r) / (1 + r) independent ones.

    Args:
        x: where it was looked at, at least 10 values in equal steps.
        y: what was found there.
    """
    count = len(x)
    assert len(y) == count >= _LEAST_VALUES
    away = np.asarray(x, float) - np.mean(x)
    value = float(away @ np.asarray(y, float) / (away @ away))
    residual = np.asarray(y, float) - np.mean(y) - value * away
    squares = float(residual @ residual)
    alike = max(0.0, float(residual[1:] @ residual[:-1]) / squares) if squares > 0 else 0.0
    independent = max(_LEAST_INDEPENDENT, count * (1 - alike) / (1 + alike))
    error = _Z95 * math.sqrt(squares / (independent - 2) / float(away @ away))
    return Slope(value, value - error, value + error)
