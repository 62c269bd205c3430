"""Answers of systems to clips, and the files that hold them in the folder of a run.

predictions/<system>.jsonl        every scored call, raw, each kept as soon as it is there
predictions/<system>.timed.jsonl  the calls of the timed phases, all or none
predictions/<system>.key          a hash of the conditions; answers under others are dropped
predictions/<system>.json         the system's facts, once it has heard everything
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from build.clips import Clip
from eval.config import EvalConfig
from eval.record import read_json, read_jsonl, write_text
from serve.contract.config import Precision
from serve.contract.files import read_bytes, read_text

ClipSet = Literal["timed", "heldout"]
"""The clips of `eval.manifest`, which speed is measured on as well; those of `eval.heldout`."""

Phase = Literal["accuracy", "alone", "one_clip", "loaded"]
"""Parts of a run. Scored: every clip once, many calls at a time. Then, for speed: one call at a
time over the timed clips; the same on the one of them that is nearest to 10 s; many at a time."""


@dataclasses.dataclass(frozen=True)
class LoadPhase:
    """Passes over some clips, with a number of calls at a time."""

    phase: Phase
    clips: Sequence[Clip]
    concurrency: int
    repeats: int = 1
    clip_set: ClipSet = "timed"


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
    """One timed call, complete enough to be scored again."""

    file: str
    reference: str
    language: str | None  # the reference's
    duration_s: float
    clip_set: ClipSet
    phase: Phase
    started_s: float  # since the phase began
    latency_s: float  # audio bytes handed over -> whole answer
    prediction: Prediction | None  # None where the call failed
    error: str | None = None
    path: str | None = None  # of the audio
    group: str = ""  # of the clip
    key: str = ""  # a hash of audio and reference; if timed, of the phases' conditions

    @property
    def text(self) -> str:
        """Return the hypothesis; "" for a failed call."""
        return self.prediction.text if self.prediction else ""


CallsBySystem = Mapping[str, Sequence[TimedCall]]
"""The calls of each system, by its name."""


@dataclasses.dataclass(frozen=True)
class SystemFacts:
    """Figures of a system beside its calls."""

    name: str
    settings: dict[str, str]  # versions included
    start_s: float  # opening it until it is ready
    peak_memory_bytes: int  # resident set, the child and all its descendants together


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a run; `run.json` holds exactly these fields."""

    started: str  # UTC, ISO 8601
    config_name: str
    precision: Precision  # of the configured engine
    settings: EvalConfig
    clips: dict[ClipSet, int]
    one_clip: str | None  # the timed clip nearest to 10 s, sent alone several times
    one_clip_s: float | None  # its length
    machine: dict[str, str]
    sources: dict[ClipSet, str]  # place and content of each set
    unreadable: dict[ClipSet, dict[str, str]]  # reasons by file


def clip_nearest_10_s(clips: Iterable[Clip]) -> Clip | None:
    """Find the clip with speech that is nearest to 10 s in length; None: no clip has speech."""
    spoken = [clip for clip in clips if clip.text.strip()]
    return min(spoken, key=lambda clip: abs(clip.duration_s - 10.0), default=None)


def read_calls(path: Path) -> list[TimedCall]:
    """Read a predictions file; return no calls if the file does not exist.

    Raises:
        FileError: the file cannot be read.
        ConfigError: a line is not a prediction; the message names the line.
    """
    expected = "expected the predictions of a run"
    return read_jsonl(path, TimedCall, expected, "expected a prediction") if path.is_file() else []


# ---------------------------------------------------------------- kept


ClipSets = Mapping[ClipSet, list[Clip]]
Keys = dict[ClipSet, dict[str, str]]
"""A hash of the audio and the reference of each clip, by set and file."""


def keys_of(clips: ClipSets) -> Keys:
    """Hash each clip, so that a changed one is noticed; raises FileError."""
    return {name: {clip.file: _clip_key(clip) for clip in some} for name, some in clips.items()}


def _clip_key(clip: Clip) -> str:
    digest = hashlib.sha256(read_bytes(clip.path))
    digest.update(f"{clip.text}\0{clip.language}\0{clip.group}\0{clip.duration_s}".encode())
    return digest.hexdigest()[:16]


class PredictionStore:
    """The predictions of one system in the folder of a run.

    Args:
        folder: the run's folder.
        name: the system's name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        path = folder / "predictions" / name
        self.scored_path = Path(f"{path}.jsonl")
        self.facts_path = Path(f"{path}.json")
        self.timed_path = Path(f"{path}.timed.jsonl")
        self._key_path = Path(f"{path}.key")

    def resume(self, conditions: str, *, again: bool) -> bool:
        """Get ready for a run under these conditions; drop answers under other conditions.

        Returns:
            Whether answers were dropped because their conditions were others.
        """
        self._key_path.parent.mkdir(parents=True, exist_ok=True)
        former = read_text(self._key_path) if self._key_path.is_file() else ""
        changed = self.scored_path.is_file() and former != conditions
        if changed or again:
            for path in (self.scored_path, self.timed_path, self.facts_path):
                path.unlink(missing_ok=True)
        write_text(self._key_path, conditions)
        # A process that was killed may have left an unfinished line.
        self.scored_path.touch()
        os.truncate(self.scored_path, self.scored_path.read_bytes().rfind(b"\n") + 1)
        return changed

    def scored_calls(self, keys: Keys) -> list[TimedCall]:
        """Return the scored calls of these clips, as far as they were made; as `read_calls`."""
        by_clip = {
            (call.clip_set, call.file): call
            for call in read_calls(self.scored_path)
            if keys.get(call.clip_set, {}).get(call.file) == call.key
        }
        return list(by_clip.values())

    def facts(self) -> SystemFacts | None:
        """Read the facts of a system that has heard all its clips; None for another one."""
        if not self.facts_path.is_file():
            return None
        return read_json(self.facts_path, SystemFacts, "a system's facts")
