"""Answers of systems to clips, and the files that hold them.

Predictions are JSONL, one call a line, raw: normalising happens when they are scored.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from build.clips import Clip
from eval.record import read_jsonl

ClipSet = Literal["timed", "heldout"]
"""The clips of `eval.manifest`, which speed is measured on as well; those of `eval.heldout`."""

Phase = Literal["accuracy", "alone", "one_clip", "loaded"]
"""Parts of a run. Scored: every clip once, many calls at a time. Then, for speed: one call at a
time over the timed clips; the same on the one of them that is nearest to 10 s; many at a time."""


@dataclasses.dataclass(frozen=True)
class TimedText:
    """A stretch of a system's text."""

    start_s: float
    end_s: float
    text: str
    window: int | None = None  # of those that the system cut the audio into; None: not known


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A system's answer to one clip."""

    text: str
    language: str | None
    segments: tuple[TimedText, ...] = ()


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """One timed call, with all that scoring it again needs."""

    file: str
    reference: str
    language: str | None  # the reference's
    duration_s: float
    clip_set: ClipSet
    phase: Phase
    concurrency: int
    repeat: int
    started_s: float  # since the phase began
    latency_s: float  # audio bytes handed over -> whole answer
    prediction: Prediction | None  # None where the call failed
    error: str | None = None
    path: str | None = None  # of the audio
    group: str = ""  # of the clip
    key: str = ""  # of its audio and reference; see eval/accuracy/kept.py

    @property
    def text(self) -> str:
        """Return the hypothesis; a call that failed said nothing."""
        return self.prediction.text if self.prediction else ""


@dataclasses.dataclass(frozen=True)
class SystemFacts:
    """Figures of a system beside its calls."""

    run: str  # id of the run that it belongs to
    name: str
    settings: dict[str, str]  # versions included
    start_s: float  # opening it until it is ready
    peak_memory_bytes: int  # resident set, the child and all its descendants together
    rows: int  # calls that it answered in the process which these facts are of


def clip_nearest_10_s(clips: Iterable[Clip]) -> Clip | None:
    """Find the clip with speech whose length is nearest to 10 s; None where no clip has speech."""
    spoken = [clip for clip in clips if clip.text.strip()]
    return min(spoken, key=lambda clip: abs(clip.duration_s - 10.0), default=None)


def read_calls(path: Path) -> list[TimedCall]:
    """Read a predictions file.

    Raises:
        FileError: it cannot be read.
        ConfigError: a line is not a prediction; the message names the line.
    """
    expected = "expected the predictions of a run"
    return read_jsonl(path, TimedCall, expected, "expected a prediction")
