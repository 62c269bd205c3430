"""Memory of processes: looked at in turns, and judged by its slope."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil

from eval.memory import shared_fairly_bytes

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


def memory_of(find: Callable[[], dict[str, psutil.Process]]) -> Callable[[], int]:
    """Return a function that sums the memory of processes, which are found anew every second."""
    known, looked_s = find(), time.monotonic()

    def measure() -> int:
        nonlocal known, looked_s
        if time.monotonic() - looked_s > 1:  # one may have been started anew
            known, looked_s = find(), time.monotonic()
        return sum(shared_fairly_bytes(process.pid) for process in known.values())

    return measure
