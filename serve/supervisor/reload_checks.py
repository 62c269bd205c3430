"""Check whether a new engine may replace the one of a running server.

Before it is opened, its manifest and the free memory are checked; then it transcribes some clips.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from serve.contract.codec import from_json
from serve.contract.config import Config
from serve.contract.edits import char_edits
from serve.contract.errors import ConfigError, EngineError, UnavailableError, shown
from serve.contract.files import read_bytes, read_text
from serve.contract.manifest import Manifest, read_manifest
from serve.contract.messages import Request, RequestFinished
from serve.supervisor.control import ReloadRequest
from serve.supervisor.processes import free_memory_bytes
from serve.supervisor.server import TritonServer
from serve.wire.client import TritonClient
from serve.wire.folder import grpc_target
from serve.wire.tensors import MODEL

_MIB = 2**20
_EXCHANGED = ("engine", "server.open")  # the latter is what --open sets
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
        FileError: the manifest or a file that it lists cannot be read.
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


def require_right(clips: Sequence[ReloadClip], texts: Sequence[str], max_cer: float) -> float:
    """Return an engine's character error rate on the clips.

    Only letters and digits count, in any case.

    Raises:
        EngineError: the rate is above `max_cer`.
    """
    pairs = [
        (_letters(clip.text or ""), _letters(text)) for clip, text in zip(clips, texts, strict=True)
    ]
    wrong = [char_edits(*pair) for pair in pairs]
    cer = sum(wrong) / max(1, sum(len(right) for right, _ in pairs))
    if cer > max_cer:
        worst = max(range(len(clips)), key=wrong.__getitem__)
        raise EngineError(
            f"its character error rate is {100 * cer:.1f} % on {len(clips)} clips; expected at "
            f"most {100 * max_cer:g} % (--max-cer): for {clips[worst].name} it returned "
            f"{texts[worst][:_SHOWN]!r}, expected {(clips[worst].text or '')[:_SHOWN]!r}"
        )
    return cer


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))[:_COMPARED]


def check_reload(asked: Config, order: ReloadRequest, engine: Path) -> None:
    """Check that a reload changes only the network.

    Args:
        asked: the config that the server was started with.
        order: the reload request.
        engine: the folder of the present engine.

    Raises:
        ConfigError: the config has changed; the message names the first key.
        EngineError: the new engine's manifest cannot be read, or has other tokens.
    """
    for key, old, new in _differences(asked, order.config):
        raise ConfigError(
            f"{key} is {shown(new)} in the config and {shown(old)} in the running server; a reload "
            "replaces only the engine: restart the server"
        )
    old_facts, new_facts = (_tokens(read_manifest(path)) for path in (engine, Path(order.engine)))
    for key, old in old_facts.items():
        if new_facts[key] != old:
            raise EngineError(
                f"its {key} is {shown(new_facts[key])}, and {shown(old)} in the present engine; a "
                "reload cannot change the tokens: restart the server"
            )


def require_memory(running: Iterable[object]) -> None:
    """Check that memory has room for new engines beside the running ones.

    Raises:
        UnavailableError: there is too little memory.
    """
    taken = sum(it.memory_bytes() for it in running if isinstance(it, TritonServer)) // _MIB
    free = free_memory_bytes() // _MIB
    if free < taken:
        raise UnavailableError(
            f"{free} MiB of memory are free, and the present engine uses {taken}; free some, or "
            "reload with --in-place, which stops the old engine first while requests wait"
        )


def _differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that differ between two configs, with both values."""
    for field in dataclasses.fields(Config if not at else old):
        key = f"{at}{field.name}"
        if key in _EXCHANGED:
            continue
        values = getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(values[0]):
            yield from _differences(*values, f"{key}.")
        elif values[0] != values[1]:
            yield key, *values


def _tokens(manifest: Manifest) -> dict[str, Any]:
    """Return the facts of an engine's tokens that clients and live drafts rely on."""
    facts = dataclasses.asdict(manifest.tokenizer)
    del facts["alignment_heads"]
    return {"dims.n_vocab": manifest.dims.n_vocab} | {
        f"tokenizer.{name}": value for name, value in facts.items()
    }
