"""An estimate of how long a run will take, from what a few clips took every system."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from eval.accuracy.data import TimedCall
from serve.speech.features import WINDOW_S


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time that a system takes."""

    start_s: float
    window_s: float  # one window, one call at a time

    @classmethod
    def of(cls, start_s: float, calls: Sequence[TimedCall]) -> "Cost":
        """Compute it of some calls, of which the first may have warmed the system up."""
        warm = calls[1:] or calls
        return cls(start_s, statistics.fmean(c.latency_s / windows(c.duration_s) for c in warm))


def windows(duration_s: float) -> int:
    """Return how many windows hold so much audio: what a system's work goes by, not the seconds."""
    return max(1, math.ceil(duration_s / WINDOW_S))


def estimate_lines(systems: Mapping[str, tuple[Cost, int]]) -> list[str]:
    """Write a line for each system, with its cost and the windows it has left, and one for all."""
    took = {name: cost.start_s + cost.window_s * left for name, (cost, left) in systems.items()}
    lines = [
        f"{name:31} about {took[name] / 60:5.1f} minutes: {left} windows of {cost.window_s:.2f} s"
        for name, (cost, left) in systems.items()
    ]
    total = f"all that is left{'':15} about {sum(took.values()) / 60:5.1f} minutes, if nothing else"
    return [*lines, f"{total} runs here"] if lines else ["nothing is left to be heard"]
