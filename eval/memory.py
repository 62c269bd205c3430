"""Memory of processes, sampled while they work."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Sequence

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


class Watch:
    """Samples memory during a `with` block.

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


def shared_memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum the memory of processes; a page that n processes share counts as 1/n for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


_Z95 = 1.96
_MIN_VALUES = 10
_MIN_INDEPENDENT = 4.0  # fewer leave no error to speak of


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
        """Write the value and its interval."""
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit least squares; the error allows for values that resemble earlier ones, as memory's do.

    Source: Santer et al., Statistical significance of trends, J. Geophys. Res. 105 (2000): values
    with lag-1 autocorrelation r of the residuals count as n (1 - r) / (1 + r) independent ones.

    Args:
        x: at least 10 values in equal steps.
        y: the measured values.
    """
    count = len(x)
    assert len(y) == count >= _MIN_VALUES
    away = np.asarray(x, float) - np.mean(x)
    value = float(away @ np.asarray(y, float) / (away @ away))
    residual = np.asarray(y, float) - np.mean(y) - value * away
    squares = float(residual @ residual)
    alike = max(0.0, float(residual[1:] @ residual[:-1]) / squares) if squares > 0 else 0.0
    independent = max(_MIN_INDEPENDENT, count * (1 - alike) / (1 + alike))
    error = _Z95 * math.sqrt(squares / (independent - 2) / float(away @ away))
    return Slope(value, value - error, value + error)
