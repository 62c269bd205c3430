"""An estimate of how long a run will take, from what a few clips took every system."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from build.clips import Clip
from eval.accuracy.data import ClipSet, TimedCall
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


def start_line(clips: Mapping[ClipSet, Sequence[Clip]], probed: int) -> str:
    """Write what is to be heard, before anything runs.

    Args:
        clips: of both sets.
        probed: how many of them each system hears first.
    """
    every = [clip for of_set in clips.values() for clip in of_set]
    audio_s = sum(clip.duration_s for clip in every)
    return (
        f"{len(every)} clips, {audio_s / 60:.1f} minutes of audio in "
        f"{sum(windows(clip.duration_s) for clip in every)} windows; each system hears "
        f"{min(probed, len(every))} of them first, which tells about how long all of them take; "
        "--limit N takes fewer clips, --without A,B fewer systems"
    )


def estimate_line(name: str, cost: Cost, left: int) -> str:
    """Write how long a system will take for the windows that it has left."""
    return (
        f"{name:31} about {_minutes(cost, left)} minutes: {left} windows of {cost.window_s:.2f} s"
    )


def total_line(systems: Mapping[str, tuple[Cost, int]]) -> str:
    """Write how long all systems will take; each has a cost and the windows it has left."""
    if not systems:
        return "nothing is left to be heard"
    seconds = sum(cost.start_s + cost.window_s * left for cost, left in systems.values())
    return f"all that is left{'':15} about {seconds / 60:5.1f} minutes, if nothing else runs here"


def _minutes(cost: Cost, left: int) -> str:
    return f"{(cost.start_s + cost.window_s * left) / 60:5.1f}"
