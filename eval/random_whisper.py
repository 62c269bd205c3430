"""Whispers of any published shape with random weights, as checkpoints and as engines.

A checkpoint's tokenizer has every special token at its published id and fillers for the rest:
readers of the folder look the special tokens up, and the text of such a model means nothing.

An engine measures speed without a download: it says nonsense at the speed of the real ones. Its own
suppress list holds end-of-text, so every window goes on to its `max_tokens` under all rules, and
the runtime does not know beforehand: lengths are forced honestly. The list holds the other special
tokens as well, and timestamps beyond those that may come first, so that an answer always has text.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save, save_file

from build.writer import disk_errors, file_facts, write_manifest
from serve.contract.config import Precision
from serve.contract.engine import MEL_FILTERS_FILE, N_FREQUENCIES, Engine, tensor_specs
from serve.contract.errors import ConfigError
from serve.contract.manifest import (
    FORMAT_VERSION,
    HEAD_DIM,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    CheckpointSource,
    Dims,
    Draft,
    Manifest,
    TokenizerFacts,
)
from serve.speech.languages import LANGUAGE_NAMES

TIMESTAMPS = 1501
END = "<|endoftext|>"
START = "<|startoftranscript|>"
PROMPT = (START, "<|en|>", "<|transcribe|>", "<|notimestamps|>")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one Whisper; `dims` adds the sizes that all of them share."""

    width: int
    encoder_layers: int
    decoder_layers: int
    languages: int = 99
    n_mels: int = 80
    multilingual: bool = True
    pieces: int = 50_257  # text tokens, <|endoftext|> not counted

    @property
    def n_vocab(self) -> int:
        """Count text tokens and special tokens together."""
        return self.pieces + len(special_tokens(self))

    @property
    def dims(self) -> Dims:
        """Return the network's sizes as an engine states them."""
        width, heads, ffn = self.width, self.width // HEAD_DIM, 4 * self.width
        encoder = (self.n_mels, 1500, width, heads, self.encoder_layers, ffn)
        return Dims(*encoder, self.n_vocab, 448, width, heads, self.decoder_layers, ffn)


PUBLISHED = {
    "tiny": Shape(384, 4, 4),
    "tiny.en": Shape(384, 4, 4, multilingual=False, pieces=50_256),
    "base": Shape(512, 6, 6),
    "small": Shape(768, 12, 12),
    "medium": Shape(1024, 24, 24),
    "large-v2": Shape(1280, 32, 32),
    "large-v3": Shape(1280, 32, 32, languages=100, n_mels=128),
    "large-v3-turbo": Shape(1280, 32, 4, languages=100, n_mels=128),
    "distil-large-v2": Shape(1280, 32, 2),
    "distil-large-v3": Shape(1280, 32, 2, languages=100, n_mels=128),
}


def published_shape(checkpoint: str) -> Shape:
    """Find the multilingual shape that a hub id such as openai/whisper-large-v3-turbo names.

    Raises:
        ConfigError: it names none; the message lists those that exist.
    """
    known = {name: shape for name, shape in PUBLISHED.items() if shape.multilingual}
    name = checkpoint.rpartition("/")[2].removeprefix("whisper-")
    if name not in known:
        raise ConfigError(
            f"bench knows the shapes {', '.join(known)}, not build.checkpoint = {checkpoint!r}"
        )
    return known[name]


def special_tokens(shape: Shape) -> list[str]:
    """List the content of each special token, in order of id from `shape.pieces` on."""
    return [
        END,
        START,
        *language_tokens(shape),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>" if shape.languages == 100 else "<|nocaptions|>",
        "<|notimestamps|>",
        *(f"<|{i * 0.02:.2f}|>" for i in range(TIMESTAMPS)),
    ]


def language_tokens(shape: Shape) -> list[str]:
    """List the languages' tokens, English first."""
    return [f"<|{code}|>" for code in list(LANGUAGE_NAMES)[: shape.languages]]


def special_ids(shape: Shape) -> dict[str, int]:
    """Return the id of each special token."""
    return {token: shape.pieces + i for i, token in enumerate(special_tokens(shape))}


def prompt_ids(shape: Shape) -> list[int]:
    """Return a multilingual decoder's prompt: English, transcribe, no timestamps."""
    ids = special_ids(shape)
    return [ids[token] for token in PROMPT]


# ---------------------------------------------------------------- checkpoint


_POOL = 1_000_003  # prime: rows of a large matrix made from the pool differ


def hugging_face_config(shape: Shape) -> Any:
    """Return the shape as a transformers.WhisperConfig, with nothing suppressed."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    dims, ids = shape.dims, special_ids(shape)
    return transformers.WhisperConfig(
        vocab_size=dims.n_vocab,
        num_mel_bins=dims.n_mels,
        d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer,
        decoder_layers=dims.n_text_layer,
        encoder_attention_heads=dims.n_audio_head,
        decoder_attention_heads=dims.n_text_head,
        encoder_ffn_dim=dims.n_audio_ffn,
        decoder_ffn_dim=dims.n_text_ffn,
        pad_token_id=ids[END],
        bos_token_id=ids[END],
        eos_token_id=ids[END],
        decoder_start_token_id=ids[START],
        suppress_tokens=None,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
    )


def hugging_face_tensors(shape: Shape) -> dict[str, torch.Tensor]:
    """Return tensors without data by Hugging Face's names, the tied projection left out."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    with torch.device("meta"):
        network = transformers.WhisperForConditionalGeneration(hugging_face_config(shape))
    tensors: dict[str, torch.Tensor] = network.state_dict()
    del tensors["proj_out.weight"]
    return tensors


def random_weights(shape: Shape, seed: int = 0, spread: float = 0.05) -> dict[str, torch.Tensor]:
    """Make FP16 tensors for `hugging_face_tensors`, spread so that activations stay finite."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_POOL, generator=generator) * spread
    pools = {False: noise.half(), True: (noise + 1.0).half()}
    weights = {}
    for i, (name, tensor) in enumerate(hugging_face_tensors(shape).items()):
        pool = pools[name.endswith("norm.weight")].roll(-7919 * i)
        values = pool.repeat(tensor.numel() // _POOL + 1)[: tensor.numel()]
        weights[name] = values.reshape(tensor.shape)
    return weights


def write_checkpoint(folder: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> Path:
    """Write config, tokenizer and weights, as published folders have them; returns the folder."""
    write_tokenizer(folder, shape)
    hugging_face_config(shape).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_tokenizer(shape: Shape, word: str) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer without merges: bytes, made-up words, the special tokens.

    Args:
        shape: says how many words and which special tokens there are.
        word: the format of a word with a number.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [word.format(id) for id in range(len(alphabet), shape.pieces)]
    vocabulary = {piece: id for id, piece in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [tokenizers.AddedToken(token, special=True) for token in special_tokens(shape)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """Write tokenizer.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(shape, "filler{}").save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", generation_config(shape))


def generation_config(shape: Shape) -> dict[str, Any]:
    """Return the content of generation_config.json; the suppress lists are short ones."""
    ids = special_ids(shape)
    fields = {
        "alignment_heads": [[0, 0]],
        "begin_suppress_tokens": [220, ids[END]],
        "decoder_start_token_id": ids[START],
        "eos_token_id": ids[END],
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [1, 2, 7, ids[START], ids["<|startoflm|>"]],
    }
    if shape.multilingual:
        fields["lang_to_id"] = {token: ids[token] for token in sorted(language_tokens(shape))}
        fields["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return fields


def write_processor(folder: Path, shape: Shape) -> None:
    """Write the other files that transformers' WhisperProcessor reads."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    known = {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    write_json(folder / "tokenizer_config.json", {**names, **known, "model_max_length": 448})
    extractor: Any = transformers.WhisperFeatureExtractor
    extractor(feature_size=shape.n_mels).save_pretrained(folder)


def write_peer_checkpoint(folder: Path, shape: Shape) -> None:
    """Write all that vLLM, CTranslate2's converter and transformers read; nothing is suppressed."""
    write_checkpoint(folder, shape, random_weights(shape, spread=0.02))
    write_processor(folder, shape)
    free: dict[str, list[int]] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    pad = {"pad_token_id": special_ids(shape)[END]}
    write_json(folder / "generation_config.json", {**generation_config(shape), **free, **pad})


def write_json(path: Path, content: object) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")


# ---------------------------------------------------------------- engine


MAX_INITIAL_TIMESTAMP_INDEX = 50
_BAND_WEIGHT = 0.02  # near a Slaney filter's


@dataclasses.dataclass(frozen=True)
class RandomEngine(Engine):
    """An engine of a shape; its weights are made up on the device that asks for them."""

    shape: Shape

    def load_weights(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Make random tensors as `Engine.load_weights` gives them."""
        generator, manifest = torch.Generator(device).manual_seed(0), self.manifest
        weights = {}
        specs = tensor_specs(manifest.dims, manifest.precision, manifest.draft)
        for name, spec in specs.items():
            if spec.dtype == torch.int8:
                value = torch.randint(-127, 128, spec.shape, generator=generator, device=device)
            elif name.endswith("scale"):
                scale = manifest.dims.n_audio_state**-0.5 / 64
                value = torch.full(spec.shape, scale, device=device)
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

    def load_tokenizer(self) -> str:
        """Make a tokenizer with words of a blank and up to four characters, much as Whisper's."""
        return str(make_tokenizer(self.shape, "Ġ{:x}").to_str())


def random_engine(shape: Shape, precision: Precision, draft_layers: int = 0) -> RandomEngine:
    """Make the engine of a multilingual shape; `draft_layers` 0 leaves the draft decoder out."""
    ids, dims = special_ids(shape), shape.dims
    first_timestamp = ids["<|0.00|>"]
    late_timestamps = range(first_timestamp + MAX_INITIAL_TIMESTAMP_INDEX + 1, dims.n_vocab)
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
        suppress_tokens=(*range(ids[END], first_timestamp), *late_timestamps),
        begin_suppress_tokens=(220,),
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP_INDEX,
        alignment_heads=_alignment_heads(dims),
    )
    source = CheckpointSource("random", "0" * 64)
    draft = Draft(source, draft_layers, dims.n_text_ffn) if draft_layers else None
    manifest = Manifest(
        FORMAT_VERSION, "native", precision, dims, facts, source, {}, {}, {}, 0, None, {}, draft
    )
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
        engine: the engine.
        folder: empty.
        device: where to make the weights.

    Raises:
        EngineError: the disk is full or fails.
    """
    weights = engine.load_weights(device)
    contents = {
        WEIGHTS_FILE: save({name: tensor.cpu() for name, tensor in weights.items()}),
        TOKENIZER_FILE: engine.load_tokenizer().encode(),
        MEL_FILTERS_FILE: save({"mel_filters": engine.load_mel_filters()}),
    }
    with disk_errors(folder):
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        manifest = dataclasses.replace(engine.manifest, files=file_facts(folder))
    write_manifest(folder, manifest)
    return Engine(folder, manifest)


@contextlib.contextmanager
def temporary_folder(engine: RandomEngine, device: str) -> Iterator[Path]:
    """Write an engine to a temporary folder, as `write_engine` does; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="earshot-random-") as name:
        write_engine(engine, Path(name), device)
        yield Path(name)
