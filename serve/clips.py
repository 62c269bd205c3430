"""Audio files with what is said in them, as a manifest lists them.

A manifest is JSONL, one clip a line: `file` (relative to the manifest), `text` (empty where nobody
speaks), `language` (code, or null with an empty text) and `duration` (s); other keys are ignored.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from serve.errors import ConfigError
from serve.files import read_text


@dataclasses.dataclass(frozen=True)
class Clip:
    """One audio file and what is said in it."""

    file: str  # as the manifest names it
    path: Path
    text: str  # the reference; empty where nobody speaks
    language: str | None
    duration_s: float


def load_clips(manifest: str | Path) -> list[Clip]:
    """Read a manifest.

    Raises:
        FileError: the manifest cannot be read.
        ConfigError: one of its files is missing, a line is malformed, a file is listed twice, or
            there is no clip; the message names the line.
    """
    manifest = Path(manifest)
    lines = read_text(manifest, "expected a manifest of clips").split("\n")
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
