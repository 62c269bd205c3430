"""Check whether a new engine may replace the one of a running server.

Before it is opened, its manifest and the free memory are checked; then it transcribes some clips.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from serve.contract.codec import flat, from_json
from serve.contract.config import Config, table_of
from serve.contract.edits import char_edits
from serve.contract.errors import ConfigError, EngineError, UnavailableError, shown
from serve.contract.files import read_bytes, read_text
from serve.contract.manifest import read_manifest
from serve.contract.messages import Request, RequestFinished
from serve.supervisor.control import ReloadRequest
from serve.supervisor.processes import free_memory_bytes, memory_bytes
from serve.wire.client import TritonClient
from serve.wire.folder import grpc_target
from serve.wire.tensors import MODEL

_MIB = 2**20
_EXCHANGED = ("engine", "server.open")  # the latter is what --open sets
CLIPS = 3
_SHOWN = 60  # characters of a text
_COMPARED = 2000  # characters of each clip; the work grows with their square


@dataclasses.dataclass(frozen=True)
class ReloadClip:
    """A recording and its text: a line of a manifest."""

    file: str  # relative to the manifest
    text: str
    language: str | None = None
    audio: bytes = b""  # the file's content


def read_clips(manifest: str) -> list[ReloadClip]:
    """Read the first clips of a manifest: JSONL with `file`, `text` and optionally `language`.

    Raises:
        FileError: the manifest or a file that it lists cannot be read.
        ConfigError: a line is malformed, or there are too few clips.
    """
    lines = [line for line in read_text(manifest).splitlines() if line.strip()]
    if len(lines) < CLIPS:
        raise ConfigError(f"{manifest} lists {len(lines)} clips; expected {CLIPS} or more")
    clips = []
    for number, text in enumerate(lines[:CLIPS], 1):
        clip = from_json(ReloadClip, text, f"{manifest}:{number}", extra="ignore")
        audio = read_bytes(Path(manifest).parent / clip.file)
        clips.append(dataclasses.replace(clip, audio=audio))
    return clips


def transcribe_clips(triton: Path, clips: Sequence[ReloadClip], timeout_s: float) -> list[str]:
    """Transcribe clips with the engine of the Triton in this folder.

    Raises:
        EarshotError: a clip failed, or was not answered in time.
    """
    texts = []
    with TritonClient(grpc_target(triton), timeout_s) as client:
        for clip in clips:
            (event,) = client.stream(Request(audio=clip.audio, language=clip.language), MODEL)
            assert isinstance(event, RequestFinished), "this model answers once"
            texts.append(event.transcript.text)
    return texts


def error_rate(clips: Sequence[ReloadClip], texts: Sequence[str], max_cer: float) -> float:
    """Return an engine's character error rate on the clips.

    Only letters and digits count, in any case.

    Raises:
        EngineError: the rate is above `max_cer`.
    """
    references = [_letters(clip.text) for clip in clips]
    edits = [
        char_edits(reference, _letters(text))
        for reference, text in zip(references, texts, strict=True)
    ]
    cer = sum(edits) / max(1, sum(map(len, references)))
    if cer > max_cer:
        worst = max(range(len(clips)), key=edits.__getitem__)
        raise EngineError(
            f"its character error rate is {100 * cer:.1f} % on {len(clips)} clips; expected at "
            f"most {100 * max_cer:g} % (--max-cer): for {clips[worst].file} it returned "
            f"{texts[worst][:_SHOWN]!r}, expected {clips[worst].text[:_SHOWN]!r}"
        )
    return cer


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))[:_COMPARED]


def check_reload(original: Config, request: ReloadRequest, engine: Path) -> None:
    """Check that a reload changes only the network.

    Args:
        original: the config that the server was started with.
        request: the reload request.
        engine: the folder of the present engine.

    Raises:
        ConfigError: the config has changed; the message names the first key.
        EngineError: the new engine's manifest cannot be read, or has other tokens.
    """
    old_keys, new_keys = flat(table_of(original)), flat(table_of(request.config))
    for key, old in old_keys.items():
        new = new_keys[key]
        if old != new and key not in _EXCHANGED:
            raise ConfigError(
                f"{key} is {shown(new)} in the config and {shown(old)} in the running server; a "
                "reload replaces only the engine: restart the server"
            )
    manifests = [read_manifest(path) for path in (engine, Path(request.engine))]
    old_tokens, new_tokens = (
        (manifest.dims.n_vocab, dataclasses.replace(manifest.tokenizer, alignment_heads=()))
        for manifest in manifests
    )
    if new_tokens != old_tokens:  # clients and live drafts rely on them
        raise EngineError(
            "its tokens are not those of the present engine; a reload cannot change them: restart "
            "the server"
        )


def require_memory(pids: Iterable[int]) -> None:
    """Check that memory has room for new engines beside the running ones of these processes.

    Raises:
        UnavailableError: there is too little memory.
    """
    needed_mib = sum(map(memory_bytes, pids)) // _MIB
    free_mib = free_memory_bytes() // _MIB
    if free_mib < needed_mib:
        raise UnavailableError(
            f"{free_mib} MiB of memory are free, and the present engine uses {needed_mib}; free "
            "some, or reload with --in-place, which stops the old engine first while requests wait"
        )
