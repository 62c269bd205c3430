"""The engine folder: its manifest, its tensors, and how to open it.

    engine.json           the manifest
    weights.safetensors   the tensors listed by `tensor_specs`
    tokenizer.json        byte-level BPE for the `tokenizers` library
    mel_filters.safetensors   the filterbank of the log-mel spectrogram

build writes the folder; serve opens it and checks every file.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from serve.contract.config import Precision
from serve.contract.errors import EngineError, UnavailableError
from serve.contract.manifest import (
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Dims,
    Draft,
    Manifest,
    read_manifest,
)

MEL_FILTERS_FILE = "mel_filters.safetensors"
N_FREQUENCIES = 201  # of a Fourier transform over 400 samples
DETECT_LANGUAGE = -1
"""Placeholder in a prompt that the runtime replaces by the most likely language token."""

Kind = Literal["quantized", "plain"]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One tensor of weights.safetensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tensor_kinds(
    dims: Dims, draft: Draft | None = None
) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Yield (name, shape, kind) of every tensor of a full-precision engine.

    `quantized` marks the matrices that INT8 engines store as int8 with one scale per row, among
    them `decoder.tokens`: the embedding, which is also the vocabulary projection. A draft has the
    tensors of a decoder, with `draft` in place of `decoder` in the names.
    """
    d = dims.n_audio_state
    yield "encoder.conv1.weight", (d, dims.n_mels, 3), "plain"
    yield "encoder.conv1.bias", (d,), "plain"
    yield "encoder.conv2.weight", (d, d, 3), "plain"
    yield "encoder.conv2.bias", (d,), "plain"
    yield "encoder.positions", (dims.n_audio_ctx, d), "plain"
    for i in range(dims.n_audio_layer):
        prefix = f"encoder.layers.{i}"
        yield from _attention(prefix, "attn", d)
        yield from _mlp(prefix, d, dims.n_audio_ffn)
    yield from _norm("encoder.norm", d)
    yield from _decoder("decoder", dims)
    if draft is not None:
        yield from _decoder("draft", draft_dims(dims, draft))


def draft_dims(dims: Dims, draft: Draft) -> Dims:
    """Return the sizes of the network with the draft as its decoder."""
    return dataclasses.replace(dims, n_text_layer=draft.n_text_layer, n_text_ffn=draft.n_text_ffn)


def _decoder(side: str, dims: Dims) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    d = dims.n_text_state
    yield f"{side}.tokens", (dims.n_vocab, d), "quantized"
    yield f"{side}.positions", (dims.n_text_ctx, d), "plain"
    for i in range(dims.n_text_layer):
        prefix = f"{side}.layers.{i}"
        yield from _attention(prefix, "attn", d)
        yield from _attention(prefix, "cross", d)
        yield from _mlp(prefix, d, dims.n_text_ffn)
    yield from _norm(f"{side}.norm", d)


def _norm(name: str, d: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield f"{name}.weight", (d,), "plain"
    yield f"{name}.bias", (d,), "plain"


def _attention(prefix: str, name: str, d: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield from _norm(f"{prefix}.{name}_norm", d)
    for part in ("q", "k", "v", "out"):
        yield f"{prefix}.{name}.{part}.weight", (d, d), "quantized"
        if part != "k":  # Whisper's key projection has no bias
            yield f"{prefix}.{name}.{part}.bias", (d,), "plain"


def _mlp(prefix: str, d: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield from _norm(f"{prefix}.mlp_norm", d)
    for part, rows, columns in (("fc1", ffn, d), ("fc2", d, ffn)):
        yield f"{prefix}.mlp.{part}.weight", (rows, columns), "quantized"
        yield f"{prefix}.mlp.{part}.bias", (rows,), "plain"


def scale_name(weight_name: str) -> str:
    """Return the name of an int8 weight's per-row scale."""
    return weight_name.removesuffix(".weight") + ".scale"


def tensor_specs(
    dims: Dims, precision: Precision, draft: Draft | None = None
) -> dict[str, WeightSpec]:
    """Return all tensors of weights.safetensors, by name.

    fp16: all tensors are float16. int8: each quantized matrix is int8 with a float16 `.scale` per
    row.
    """
    specs: dict[str, WeightSpec] = {}
    for name, shape, kind in tensor_kinds(dims, draft):
        if kind == "quantized" and precision == "int8":
            specs[name] = WeightSpec(shape, torch.int8)
            specs[scale_name(name)] = WeightSpec(shape[:1], torch.float16)
        else:
            specs[name] = WeightSpec(shape, torch.float16)
    return specs


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mel_filters(n_mels: int) -> torch.Tensor:
    """Make the filterbank of Whisper's log-mel: Slaney-normalized triangles up to 8 kHz.

    transformers computes it exactly as in its WhisperFeatureExtractor. Only builds need that
    library, because engines store the result.

    Args:
        n_mels: 80, or 128 for large-v3 and turbo.

    Returns:
        float32 (n_mels, N_FREQUENCIES).

    Raises:
        UnavailableError: transformers is not installed.
    """
    try:
        from transformers.audio_utils import mel_filter_bank  # noqa: PLC0415 - only builds need it
    except ImportError as error:
        raise UnavailableError(
            "the mel filterbank needs the package transformers, which is not installed; install it"
        ) from error
    filters = mel_filter_bank(
        num_frequency_bins=N_FREQUENCIES,
        num_mel_filters=n_mels,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=16_000,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.tensor(filters, dtype=torch.float32).T.contiguous()


def write_mel_filters(folder: Path, n_mels: int) -> None:
    """Write the file that `Engine.load_mel_filters` reads; raises the errors of `mel_filters`."""
    (folder / MEL_FILTERS_FILE).write_bytes(save({"mel_filters": mel_filters(n_mels)}))


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine folder; `open_engine` and `checked_meanwhile` check its files."""

    path: Path
    manifest: Manifest

    def load_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Load every tensor onto a device, in its stored dtype.

        Raises:
            EngineError: a tensor is missing or unexpected, or its shape or dtype is wrong.
        """
        path = self.path / WEIGHTS_FILE
        manifest = self.manifest
        specs = tensor_specs(manifest.dims, manifest.precision, manifest.draft)
        with _reading(path), safe_open(path, framework="pt", device=str(device)) as file:
            found, expected = set(file.keys()), set(specs)
            if found != expected:
                missing = ", ".join(sorted(expected - found)) or "none"
                unexpected = ", ".join(sorted(found - expected)) or "none"
                raise EngineError(
                    f"{path}: missing tensors: {missing}; unexpected tensors: {unexpected}"
                )
            tensors = {name: file.get_tensor(name) for name in specs}
        for name, spec in specs.items():
            actual = WeightSpec(tuple(tensors[name].shape), tensors[name].dtype)
            if actual != spec:
                raise EngineError(f"{path}: {name} is {actual}; expected {spec}")
        return tensors

    def load_mel_filters(self) -> torch.Tensor:
        """Load the log-mel filterbank: float32 (n_mels, N_FREQUENCIES), on the CPU.

        Raises:
            EngineError: the file cannot be read.
        """
        path = self.path / MEL_FILTERS_FILE
        with _reading(path):
            return load_file(path)["mel_filters"]

    def load_tokenizer(self) -> str:
        """Read the text of tokenizer.json.

        Raises:
            EngineError: the file cannot be read.
        """
        path = self.path / TOKENIZER_FILE
        with _reading(path):
            return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert an error in reading a file to an EngineError."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, UnicodeDecodeError) as error:
        raise EngineError(f"cannot read {path}: {error}; build the engine again") from error


def open_engine(path: str | Path) -> Engine:
    """Open an engine folder and check its format, files, sizes and hashes.

    Raises:
        EngineError: a file differs from the manifest.
    """
    engine = _open_without_hashes(Path(path))
    _check_hashes(engine)
    return engine


@contextlib.contextmanager
def checked_meanwhile(path: str | Path) -> Iterator[Engine]:
    """Open an engine folder, and check its hashes in the background while the block loads it.

    Hashing takes most of a second per gigabyte. Native engines are safe to read even if a file is
    damaged. Compiled engines are not, so they are checked before the block starts.

    Raises:
        EngineError: see `open_engine`; raised at the block's end, or instead of an error in the
            block, which a damaged file may have caused.
    """
    engine = _open_without_hashes(Path(path))
    hashing = concurrent.futures.ThreadPoolExecutor(1, "earshot-hashes")
    checked = hashing.submit(_check_hashes, engine)
    hashing.shutdown(wait=False)
    if engine.manifest.runtime != "native":
        checked.result()
    try:
        yield engine
    except Exception:
        checked.result()
        raise
    checked.result()


def _open_without_hashes(path: Path) -> Engine:
    """Open an engine; check the manifest, and that its files exist and have its sizes."""
    manifest = read_manifest(path)
    for name, facts in manifest.files.items():
        file = path / name
        with _reading(file):
            if problem := _file_problem(path, file, facts.bytes):
                raise EngineError(f"{file} {problem}; build the engine again")
    return Engine(path, manifest)


def _file_problem(folder: Path, file: Path, expected_bytes: int) -> str:
    """Return what is wrong with a file of an engine, or ""."""
    if not file.is_file():
        return "is missing"
    if not file.resolve().is_relative_to(folder.resolve()):
        return f"links to {file.resolve()}, outside the engine; expected a file in the engine"
    if (size := file.stat().st_size) != expected_bytes:
        return f"has {size} bytes; expected {expected_bytes}, from the manifest"
    return ""


def _check_hashes(engine: Engine) -> None:
    for name, facts in engine.manifest.files.items():
        file = engine.path / name
        with _reading(file):
            if sha256_of(file) != facts.sha256:
                raise EngineError(f"{file} fails its SHA-256; build the engine again")
