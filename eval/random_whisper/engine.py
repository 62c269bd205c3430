"""An engine of a Whisper shape with random weights, for measuring speed without a download.

They say nonsense at the speed of the real ones. The engine's own suppress list holds end-of-text,
so every window goes on to its `max_tokens` under all rules, and the runtime does not know
beforehand: lengths are forced honestly. It holds the other special tokens as well, and timestamps
beyond those that may come first, so that an answer always has text.
"""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save

from eval.random_whisper.checkpoint import byte_alphabet, byte_level_tokenizer
from eval.random_whisper.shapes import END, START, Shape, special_ids, special_tokens
from serve.contract.config import Precision
from serve.contract.engine import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    MEL_FILTERS_FILE,
    N_FREQUENCIES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Dims,
    Draft,
    Engine,
    FileFacts,
    Manifest,
    Source,
    TokenizerFacts,
    manifest_to_json,
    sha256_of,
    tensor_specs,
)

MAX_INITIAL_TIMESTAMP_INDEX = 50
_BAND_WEIGHT = 0.02  # near a Slaney filter's


@dataclasses.dataclass(frozen=True)
class RandomEngine(Engine):
    """An engine of a shape whose weights are made up on the device that asks for them."""

    shape: Shape

    def load_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Make random tensors as `Engine.load_weights` gives them."""
        generator = torch.Generator(device).manual_seed(0)
        weights = {}
        manifest = self.manifest
        specs = tensor_specs(manifest.dims, manifest.precision, manifest.draft)
        for name, spec in specs.items():
            if spec.dtype == torch.int8:
                value = torch.randint(-127, 128, spec.shape, generator=generator, device=device)
            elif name.endswith("scale"):
                depth = self.manifest.dims.n_audio_state
                value = torch.full(spec.shape, depth**-0.5 / 64, device=device)
            else:
                value = torch.randn(spec.shape, generator=generator, device=device)
                value = value * 0.02 + ("norm.weight" in name)
            weights[name] = value.to(spec.dtype)
        return weights

    def load_mel_filters(self) -> torch.Tensor:
        """Make bands of equal width: at the cost of the real ones, which need transformers."""
        n_mels = self.manifest.dims.n_mels
        band = torch.arange(N_FREQUENCIES) * n_mels // N_FREQUENCIES
        return (torch.arange(n_mels)[:, None] == band).float() * _BAND_WEIGHT


def random_engine(shape: Shape, precision: Precision, draft_layers: int = 0) -> RandomEngine:
    """Make the engine of a multilingual shape, with a draft of so many layers if there are any."""
    ids, dims = special_ids(shape), shape.dims
    first_timestamp = ids["<|0.00|>"]
    allowed_timestamps = range(first_timestamp, first_timestamp + MAX_INITIAL_TIMESTAMP_INDEX + 1)
    facts = TokenizerFacts(
        eot=ids[END],
        sot=ids[START],
        sot_prev=ids["<|startofprev|>"],
        no_speech=first_timestamp - 2,
        no_timestamps=first_timestamp - 1,
        timestamp_begin=first_timestamp,
        transcribe=ids["<|transcribe|>"],
        translate=ids["<|translate|>"],
        languages={"en": ids["<|en|>"]},
        suppress_tokens=(
            *range(ids[END], allowed_timestamps.start),
            *range(allowed_timestamps.stop, dims.n_vocab),
        ),
        begin_suppress_tokens=(220,),
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP_INDEX,
        alignment_heads=_alignment_heads(dims),
    )
    source = Source("random", "0" * 64)
    manifest = Manifest(
        FORMAT_VERSION, "native", precision, dims, facts, source, {}, {}, {}, 0, None, {}
    )
    if draft_layers:
        draft = Draft(manifest.source, draft_layers, dims.n_text_ffn)
        manifest = dataclasses.replace(manifest, draft=draft)
    return RandomEngine(Path(), manifest, shape)


def _alignment_heads(dims: Dims) -> tuple[tuple[int, int], ...]:
    """Name as many as OpenAI: six in the last two layers of a turbo's four, else one in ten."""
    last = dims.n_text_layer - 1
    if last < 4:
        both = (last, max(0, last - 1))
        return tuple(sorted({(layer, i % dims.n_text_head) for layer in both for i in range(3)}))
    return tuple((last - i, 0) for i in reversed(range(min(10, last))))


def write_engine(engine: RandomEngine, folder: Path, device: torch.device | str) -> Engine:
    """Write made-up weights as a real engine folder, for a server to open.

    Args:
        engine: of which shape.
        folder: empty.
        device: where to make the weights.

    Raises:
        OSError: the disk is full or fails.
    """
    weights, tokenizer = folder / WEIGHTS_FILE, folder / TOKENIZER_FILE
    tensors = engine.load_weights(device)
    weights.write_bytes(save({name: tensor.cpu() for name, tensor in tensors.items()}))
    byte_level_tokenizer(_pieces(engine.shape)).save(str(tokenizer))
    filters = folder / MEL_FILTERS_FILE
    filters.write_bytes(save({"mel_filters": engine.load_mel_filters()}))
    paths = (weights, tokenizer, filters)
    files = {path.name: FileFacts(sha256_of(path), path.stat().st_size) for path in paths}
    manifest = dataclasses.replace(engine.manifest, files=files)
    (folder / MANIFEST_FILE).write_text(manifest_to_json(manifest), encoding="utf-8")
    return Engine(folder, manifest)


def _pieces(shape: Shape) -> list[str]:
    """Make a byte-level vocabulary by id: bytes, made-up words, special tokens.

    Words are a blank and up to four characters, about as long as Whisper's.
    """
    alphabet = byte_alphabet()
    words = [f"Ġ{id:x}" for id in range(len(alphabet), shape.pieces)]
    return [*alphabet, *words, *special_tokens(shape)]
