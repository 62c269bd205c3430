"""Read manifests of audio clips with reference texts.

A manifest is JSONL, one clip per line: `file` (relative to the manifest), `text` (empty without
speech), `language` (a code, or null if the text is empty) and `duration` (s). Optional keys are
`group` (such as a corpus; reports have figures per group), `speaker` (unique in the group) and
`half`. A manifest's speakers may be split into two halves: settings are chosen on one, and reported
figures come from the other. Other keys are ignored.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import Field

from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_text


@dataclasses.dataclass(frozen=True)
class Clip:
    """An audio file and its reference text."""

    file: str  # the path in the manifest
    path: Path
    text: str  # empty without speech
    language: str | None
    duration_s: float
    group: str = ""  # "" = none
    speaker: str = ""  # "" = unknown
    half: str = ""  # "" = in no half


def load_clips(manifest: str | Path) -> list[Clip]:
    """Read a manifest.

    Raises:
        FileError: the manifest cannot be read.
        ConfigError: a file is missing, a line is malformed, a file is listed twice, or there is no
            clip; the message names the line.
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


@dataclasses.dataclass(frozen=True)
class _ClipLine:
    file: str
    text: str
    language: str | None
    duration: Annotated[float, Field(gt=0)]  # s
    group: str | None = None
    speaker: str | None = None
    half: str | None = None


def _clip(text: str, folder: Path, where: str) -> Clip:
    line = from_json(_ClipLine, text, where, extra="ignore")
    if line.text.strip() and not line.language:
        raise ConfigError(f"{where}: a clip with text needs a language")
    path = folder / line.file
    if not path.is_file():
        raise ConfigError(f"{where}: {path} does not exist")
    return Clip(
        file=line.file,
        path=path,
        text=line.text,
        language=line.language or None,
        duration_s=line.duration,
        group=line.group or "",
        speaker=line.speaker or "",
        half=line.half or "",
    )
