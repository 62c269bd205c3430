"""Clips with their references, what systems said about them, and the files that hold both.

A manifest is JSONL, one clip a line: `file` (relative to the manifest), `text` (empty where nobody
speaks), `language` (code, or null with an empty text) and `duration` (s); other keys are ignored.
Predictions are JSONL, one call a line, raw: normalising happens when they are scored.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from serve.errors import ConfigError

Phase = Literal["alone", "one_clip", "loaded"]
"""One call at a time over all clips; the same on the one 10 s clip; many calls at a time."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """One audio file and what is said in it."""

    file: str  # as the manifest names it
    path: Path
    text: str  # the reference; empty where nobody speaks
    language: str | None
    duration_s: float


@dataclasses.dataclass(frozen=True)
class TimedText:
    """A stretch of a system's text."""

    start_s: float
    end_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A system's answer to one clip."""

    text: str
    language: str | None
    segments: tuple[TimedText, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One timed call, with all that scoring it again needs."""

    file: str
    reference: str
    language: str | None  # the reference's
    duration_s: float
    phase: Phase
    concurrency: int
    repeat: int
    started_s: float  # since the phase began
    latency_s: float  # audio bytes handed over -> whole answer
    prediction: Prediction | None  # None where the call failed
    error: str | None = None

    @property
    def text(self) -> str:
        """The hypothesis; a call that failed said nothing."""
        return self.prediction.text if self.prediction else ""


@dataclasses.dataclass(frozen=True)
class SystemFacts:
    """What was measured about a system beside its calls."""

    run: str  # id of the run that it belongs to
    name: str
    settings: dict[str, str]  # versions included
    start_s: float  # opening it until it is ready
    peak_memory_bytes: int
    rows: int  # lines of the predictions file


def load_clips(manifest: str | Path) -> list[Clip]:
    """Read a manifest.

    Raises:
        ConfigError: the manifest or one of its files is missing, a line is malformed, a file is
            listed twice, or there is no clip; the message names the line.
    """
    manifest = Path(manifest)
    try:
        lines = manifest.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read the manifest {manifest}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the manifest {manifest} is not UTF-8: {error.reason}") from error
    clips: list[Clip] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        clip = _clip(line, manifest.parent, f"{manifest}:{number}")
        if any(clip.file == other.file for other in clips):
            raise ConfigError(f"{manifest}:{number}: {clip.file} is listed twice")
        clips.append(clip)
    if not clips:
        raise ConfigError(f"the manifest {manifest} lists no clips")
    return clips


def _clip(line: str, folder: Path, where: str) -> Clip:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} must be a JSON object, got {type(fields).__name__}")
    file = _field(fields, "file", (str,), where)
    text = _field(fields, "text", (str,), where)
    language = _field(fields, "language", (str, type(None)), where)
    duration_s = float(_field(fields, "duration", (int, float), where))
    if text.strip() and not language:
        raise ConfigError(f"{where}: a clip with text needs its language")
    if not duration_s > 0:
        raise ConfigError(f"{where}: duration is {duration_s}; expected seconds above 0")
    path = folder / file
    if not path.is_file():
        raise ConfigError(f"{where}: {path} does not exist")
    return Clip(file, path, text, language or None, duration_s)


def _field(fields: dict[str, Any], key: str, types: tuple[type, ...], where: str) -> Any:
    if key not in fields:
        raise ConfigError(f"{where}: {key!r} is missing; has {', '.join(fields) or 'no fields'}")
    value = fields[key]
    if not isinstance(value, types) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ConfigError(f"{where}: {key} is {value!r}; expected {names}")
    return value


def ten_second_clip(clips: Iterable[Clip]) -> Clip | None:
    """The clip with speech whose length is nearest to 10 s; None where no clip has speech."""
    spoken = [clip for clip in clips if clip.text.strip()]
    return min(spoken, key=lambda clip: abs(clip.duration_s - 10.0), default=None)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def row_to_json(row: Row) -> str:
    """One line of a predictions file, without its line end."""
    return json.dumps(dataclasses.asdict(row), ensure_ascii=False)


def read_rows(path: Path) -> list[Row]:
    """Read a predictions file.

    Raises:
        ConfigError: it is missing, or a line is not a prediction; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read predictions {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            answer = fields["prediction"]
            if answer is not None:
                segments = tuple(TimedText(**segment) for segment in answer["segments"])
                fields["prediction"] = Prediction(answer["text"], answer["language"], segments)
            rows.append(Row(**fields))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} is not a prediction ({error})") from error
    return rows


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        ConfigError: the file is missing or holds something else; `what` says what it should be.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON, expected {what}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a {type(fields).__name__}, expected {what}")
    return fields
