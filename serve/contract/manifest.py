"""The manifest of an engine, `engine.json`.

The types below check each field; `read_manifest` also checks that the fields are consistent.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.contract.codec import from_json, text_that, to_json
from serve.contract.config import Precision
from serve.contract.errors import EngineError, shown
from serve.contract.fields import Finite
from serve.contract.runtimes import RuntimeName

FORMAT_VERSION = 2  # version 1 held the INT8 vocabulary twice, once in float16
MANIFEST_FILE = "engine.json"
WEIGHTS_FILE = "weights.safetensors"
TOKENIZER_FILE = "tokenizer.json"
HEAD_DIM = 64

_MAX_BYTES = 2**24  # maximum size of `engine.json`

Size = Annotated[int, Field(gt=0, le=1_000_000)]
Layers = Annotated[int, Field(gt=0, le=1000)]
Index = Annotated[int, Field(ge=0, le=1000)]
TokenId = Annotated[int, Field(ge=0, le=1_000_000)]
Bytes = Annotated[int, Field(ge=0)]
Deviation = Annotated[Finite, Field(ge=0)]
Weight = Annotated[Finite, Field(ge=0)]
Agreement = Annotated[Finite, Field(ge=0, le=1)]
Sha256 = Annotated[
    str, text_that(re.compile(r"[0-9a-f]{64}").fullmatch, "64 hexadecimal digits, a SHA-256")
]

_FILE_NAME = re.compile(r"[\w.+-]{1,128}", re.ASCII)
_ADVICE = "build the engine again with `make build-engine`"


@dataclasses.dataclass(frozen=True)
class Dims:
    """The network's sizes, under OpenAI's names."""

    n_mels: Size
    n_audio_ctx: Size
    n_audio_state: Size
    n_audio_head: Size
    n_audio_layer: Layers
    n_audio_ffn: Size
    n_vocab: Size
    n_text_ctx: Size
    n_text_state: Size
    n_text_head: Size
    n_text_layer: Layers
    n_text_ffn: Size


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """Special token ids and lists for decoding, from the checkpoint's files."""

    eot: TokenId
    sot: TokenId
    sot_prev: TokenId
    no_speech: TokenId
    no_timestamps: TokenId
    timestamp_begin: TokenId
    transcribe: TokenId | None  # None in English-only checkpoints
    translate: TokenId | None
    languages: dict[str, TokenId]  # code -> token id; empty in English-only checkpoints
    suppress_tokens: tuple[TokenId, ...]
    begin_suppress_tokens: tuple[TokenId, ...]
    max_initial_timestamp_index: TokenId  # counted from timestamp_begin
    alignment_heads: tuple[tuple[Index, Index], ...]  # (decoder layer, head)

    @property
    def multilingual(self) -> bool:
        """Return whether prompts have a language and a task."""
        return bool(self.languages)


@dataclasses.dataclass(frozen=True)
class CheckpointSource:
    """The origin of the weights."""

    id: str
    sha256: Sha256


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft decoder for speculative decoding, on the same encoder.

    Its other sizes and its tokens are those of the main decoder.
    """

    source: CheckpointSource
    n_text_layer: Layers
    n_text_ffn: Size


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The quantization error of a matrix: ||w - q * scale|| / ||w||, and the largest difference."""

    relative: Deviation
    max_abs: Deviation


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The speech that was used to compensate rounding errors."""

    clips: Annotated[int, Field(gt=0)]
    sha256: Sha256  # of the clips' files and languages


@dataclasses.dataclass(frozen=True)
class Confidence:
    """A logistic model of the probability that a word is right, fitted to speech.

    The confidence is 1 / (1 + exp(-z)), with z = `intercept` + `probability` * log-odds of the
    word's probability + `avg_logprob` * mean log-probability of the segment.
    """

    fit: Literal["logistic"]
    intercept: Finite
    probability: Weight
    avg_logprob: Weight
    source: str  # id of the checkpoint that transcribed the speech
    clips: Annotated[int, Field(gt=0)]
    words: Annotated[int, Field(gt=0)]  # number of transcribed words, over all beam sizes
    languages: tuple[str, ...]  # codes


@dataclasses.dataclass(frozen=True)
class Fp8Proof:
    """The effect of an FP8 encoder on the text, compared with that of INT8 weights.

    Agreement is the fraction of greedily decoded tokens that equal those of the encoder in full
    precision.
    """

    agreement: Agreement
    int8_agreement: Agreement  # between engines in FP16 and INT8
    windows: Annotated[int, Field(gt=0)]  # number of windows of speech
    device: str  # the GPU's name

    @property
    def holds(self) -> bool:
        """Return whether FP8 changes no more than INT8 weights."""
        return self.agreement >= self.int8_agreement


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """One file of the engine folder."""

    sha256: Sha256
    bytes: Bytes


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `engine.json`."""

    format_version: int
    runtime: RuntimeName
    precision: Precision
    dims: Dims
    tokenizer: TokenizerFacts
    source: CheckpointSource
    quantization: dict[str, LayerError]  # empty in fp16 engines
    versions: dict[str, str]  # of the software that built it
    files: dict[str, FileFacts]  # by path in the folder; all files except engine.json
    checkpoint_bytes: Bytes  # size of the checkpoint's weights
    verification: dict[str, Finite] | None  # measured deviation; None until verified
    runtime_options: dict[str, Any]  # limits of a compiled engine; {} for native
    draft: Draft | None = None  # older engines lack the key
    calibration: Calibration | None = None  # None: rounded to nearest
    confidence: Confidence | None = None  # None: words have only their probability
    fp8: Fp8Proof | None = None  # None: not built or verified on a GPU with FP8


@dataclasses.dataclass(frozen=True)
class _Versioned:
    """The key that exists in all versions of the format; it is checked before the others."""

    format_version: Literal[2]


def manifest_to_json(manifest: Manifest) -> str:
    """Return the text of `engine.json`."""
    return to_json(manifest, indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check an engine's `engine.json`.

    Raises:
        EngineError: the file is missing, unreadable, too large, or of another format version, or
            its fields are wrong or inconsistent.
    """
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise EngineError(
            f"no engine at {folder} ({path}: {error.strerror}); "
            "build one with `make build-engine CONFIG=…`, or in a container with "
            "`python3 -m build engine --config …`"
        ) from error
    if len(text) > _MAX_BYTES:
        raise EngineError(f"{path} has too many bytes; expected at most {_MAX_BYTES:,}; {_ADVICE}")
    where = str(path)
    from_json(_Versioned, text, where, error=EngineError, advice=_ADVICE, extra="ignore")
    manifest = from_json(Manifest, text, where, error=EngineError, advice=_ADVICE)
    dims, facts = manifest.dims, manifest.tokenizer
    problems = (_file_problems(manifest), dims_problems(dims), token_problems(facts, dims))
    for problem in itertools.chain(*problems):
        raise EngineError(f"{where}: {problem}; {_ADVICE}")
    return manifest


def _file_problems(manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        # Engines of other runtimes have files in subfolders, so a name may contain "/".
        parts = name.split("/")
        if any(part in (".", "..") or not _FILE_NAME.fullmatch(part) for part in parts):
            yield f"files has {shown(name)}; expected names of files in the engine's folder"
    needed = [TOKENIZER_FILE, *([WEIGHTS_FILE] if manifest.runtime == "native" else [])]
    for name in needed:
        if name not in manifest.files:
            yield f"files lacks {name}; expected it in a {manifest.runtime} engine"


def dims_problems(dims: Dims) -> Iterator[str]:
    """Yield contradictions between the sizes of a network."""
    for side in ("audio", "text"):
        state, heads = getattr(dims, f"n_{side}_state"), getattr(dims, f"n_{side}_head")
        if state != heads * HEAD_DIM:
            yield (
                f"n_{side}_head = {heads}; expected n_{side}_state = {state} divided by "
                f"{HEAD_DIM}, the size of a head in every Whisper"
            )
    if dims.n_audio_state != dims.n_text_state:
        yield (
            f"n_text_state = {dims.n_text_state}; expected n_audio_state = "
            f"{dims.n_audio_state}, because the decoder attends to the encoder's output"
        )


def token_problems(facts: TokenizerFacts, dims: Dims) -> Iterator[str]:
    """Yield token ids and alignment heads that the network lacks; they would be read beyond it."""
    n_vocab = dims.n_vocab
    last = facts.timestamp_begin + facts.max_initial_timestamp_index
    ids = {
        **{name: value for name, value in vars(facts).items() if isinstance(value, int)},
        **{f"languages.{code}": id for code, id in facts.languages.items()},
        **{f"suppress_tokens[{i}]": id for i, id in enumerate(facts.suppress_tokens)},
        **{f"begin_suppress_tokens[{i}]": id for i, id in enumerate(facts.begin_suppress_tokens)},
        "max_initial_timestamp_index + timestamp_begin": last,
    }
    for name, id in ids.items():
        if id >= n_vocab:
            yield f"tokenizer.{name} = {id}; expected less than dims.n_vocab = {n_vocab}"
    for i, (layer, head) in enumerate(facts.alignment_heads):
        if layer >= dims.n_text_layer or head >= dims.n_text_head:
            yield (
                f"tokenizer.alignment_heads[{i}] = {[layer, head]}; expected a layer below "
                f"{dims.n_text_layer} and a head below {dims.n_text_head}"
            )
