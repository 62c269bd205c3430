"""Check that a new engine understands speech: it transcribes three clips before it serves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from serve.contract.codec import from_json
from serve.contract.errors import ConfigError, EngineError
from serve.contract.files import read_bytes, read_text
from serve.contract.messages import Request, RequestFinished
from serve.wire.client import TritonClient
from serve.wire.folder import grpc_target
from serve.wire.tensors import MODEL

CLIPS = 3
_SHOWN = 60  # characters of a text
_COMPARED = 2000  # characters of each clip; the work grows with their square


@dataclasses.dataclass(frozen=True)
class _ReloadClipLine:
    file: str  # relative to the manifest
    text: str | None = None  # None: the text of the present engine is right
    language: str | None = None


@dataclasses.dataclass(frozen=True)
class ReloadClip:
    """A recording and its text."""

    name: str
    audio: bytes
    language: str | None
    text: str | None  # None: unknown


def read_clips(manifest: str) -> list[ReloadClip]:
    """Read the first clips of a manifest: JSONL with `file` and optionally `text` and `language`.

    Raises:
        FileError: the manifest or one of its files cannot be read.
        ConfigError: a line is malformed, or there are too few clips.
    """
    lines = [line for line in read_text(manifest).splitlines() if line.strip()]
    if len(lines) < CLIPS:
        raise ConfigError(f"{manifest} lists {len(lines)} clips; expected {CLIPS} or more")
    clips = []
    for number, text in enumerate(lines[:CLIPS], 1):
        line = from_json(_ReloadClipLine, text, f"{manifest}:{number}", extra="ignore")
        audio = read_bytes(Path(manifest).parent / line.file)
        clips.append(ReloadClip(line.file, audio, line.language, line.text))
    return clips


def hear(triton: Path, clips: Sequence[ReloadClip], timeout_s: float) -> list[str]:
    """Transcribe clips with the engine of the Triton in this folder.

    Raises:
        EarshotError: a clip failed, or was not answered in time.
    """
    with TritonClient(grpc_target(triton), timeout_s) as client:
        return [_text(client, clip) for clip in clips]


def _text(client: TritonClient, clip: ReloadClip) -> str:
    request = Request(audio=clip.audio, language=clip.language)
    (answer,) = client.stream(request, MODEL)
    assert isinstance(answer, RequestFinished), "this model answers once"
    return answer.transcript.text


def require_right(clips: Sequence[ReloadClip], heard: Sequence[str], max_cer: float) -> float:
    """Return an engine's character error rate on the clips.

    Only letters and digits count, in any case.

    Raises:
        EngineError: the rate is above `max_cer`.
    """
    pairs = [
        (_letters(clip.text or ""), _letters(text)) for clip, text in zip(clips, heard, strict=True)
    ]
    wrong = [_distance(*pair) for pair in pairs]
    cer = sum(wrong) / max(1, sum(len(right) for right, _ in pairs))
    if cer > max_cer:
        worst = max(range(len(clips)), key=wrong.__getitem__)
        raise EngineError(
            f"it has {100 * cer:.1f} % of the characters of {len(clips)} clips wrong, expected at "
            f"most {100 * max_cer:g} (--max-cer): of {clips[worst].name} it makes "
            f"{heard[worst][:_SHOWN]!r}, not {(clips[worst].text or '')[:_SHOWN]!r}"
        )
    return cer


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))[:_COMPARED]


def _distance(right: str, other: str) -> int:
    """Return the Levenshtein distance of two texts."""
    row = list(range(len(other) + 1))
    for i, wanted in enumerate(right, 1):
        before, row = row, [i]
        for j, char in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (wanted != char)))
    return row[-1]
