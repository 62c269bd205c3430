"""Whispers of any published shape with random weights, as checkpoints and as engines.

A checkpoint's tokenizer has every special token at its published id and made-up words for the rest:
readers of the folder look the special tokens up, and the text of such a model means nothing.

An engine measures speed without a download: it writes nonsense at the speed of a real one. Its
suppress list has end-of-text, so every window decodes until its `max_tokens`. All rules still run,
and the runtime does not know the length beforehand. The list also has the other special tokens, and
the timestamps that may not come first, so that an answer always has text.
"""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from build.builders import build_engine
from build.checkpoint import HF_DIMS, open_checkpoint
from build.config import BuildConfig, BuildProduct
from build.writer import disk_errors
from eval.record import Say, missing_packages
from serve.contract.config import Precision
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, UnavailableError
from serve.contract.manifest import HEAD_DIM, Dims
from serve.speech.languages import LANGUAGE_NAMES

TIMESTAMPS = 1501
MAX_INITIAL_TIMESTAMP_INDEX = 50
END = "<|endoftext|>"
START = "<|startoftranscript|>"


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
    return [ids[token] for token in (START, "<|en|>", "<|transcribe|>", "<|notimestamps|>")]


# ---------------------------------------------------------------- checkpoint


_POOL = 1_000_003  # prime: rows of a large matrix made from the pool differ
_SPREAD = 0.02  # of weights whose speed is measured


def hugging_face_config(shape: Shape) -> Any:
    """Return the shape as a transformers.WhisperConfig, with nothing suppressed."""
    import transformers  # noqa: PLC0415 - heavy, and only for checkpoints

    ids = special_ids(shape)
    sizes: dict[str, Any] = {HF_DIMS[name]: size for name, size in vars(shape.dims).items()}
    return transformers.WhisperConfig(
        **sizes,
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


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """Write tokenizer.json and generation_config.json.

    The byte-level tokenizer has no merges: its vocabulary is the bytes, made-up words of a blank
    and up to four characters, much as Whisper's, and the special tokens.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{id:x}" for id in range(len(alphabet), shape.pieces)]
    vocabulary = {piece: id for id, piece in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [tokenizers.AddedToken(token, special=True) for token in special_tokens(shape)]
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", generation_config(shape))


def generation_config(shape: Shape) -> dict[str, Any]:
    """Return the content of generation_config.json, with shorter suppress lists than published."""
    ids = special_ids(shape)
    fields = {
        "alignment_heads": [[0, 0]],
        "begin_suppress_tokens": [220, ids[END]],
        "decoder_start_token_id": ids[START],
        "eos_token_id": ids[END],
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": MAX_INITIAL_TIMESTAMP_INDEX,
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
    write_checkpoint(folder, shape, random_weights(shape, spread=_SPREAD))
    write_processor(folder, shape)
    free: dict[str, list[int]] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    pad = {"pad_token_id": special_ids(shape)[END]}
    write_json(folder / "generation_config.json", {**generation_config(shape), **free, **pad})


def write_json(path: Path, content: object) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")


# ---------------------------------------------------------------- engine


def require_transformers() -> None:
    """Raise an UnavailableError unless the package is installed that lays checkpoints out."""
    if missing_packages(["transformers"]):
        raise UnavailableError("random weights need the package transformers; install it")


@contextlib.contextmanager
def random_engine(shape: Shape, precision: Precision, say: Say) -> Iterator[Engine]:
    """Build an engine of a multilingual shape in a temporary folder, which is removed afterwards.

    Args:
        shape: says the sizes.
        precision: of the matrices.
        say: receives lines of progress.

    Raises:
        UnavailableError: transformers is not installed.
        EngineError: the disk is full or fails.
    """
    require_transformers()
    say(f"building an {precision} engine with random weights")
    ids, layers = special_ids(shape), shape.decoder_layers
    first_timestamp = ids["<|0.00|>"]
    late_timestamps = range(first_timestamp + MAX_INITIAL_TIMESTAMP_INDEX + 1, shape.n_vocab)
    # As many as OpenAI names: six in the last two of turbo's four layers, else one in each of ten.
    aligned, heads = (10, 1) if layers > 4 else (2, min(3, shape.width // HEAD_DIM))
    stated = {
        "alignment_heads": [[n, head] for n in range(layers)[-aligned:] for head in range(heads)],
        "lang_to_id": {"<|en|>": ids["<|en|>"]},
        "suppress_tokens": [*range(ids[END], first_timestamp), *late_timestamps],
    }
    with tempfile.TemporaryDirectory(prefix="earshot-random-") as name:
        folder = Path(name, "checkpoint")
        with disk_errors(folder):
            write_checkpoint(folder, shape, random_weights(shape, spread=_SPREAD))
            write_json(folder / "generation_config.json", generation_config(shape) | stated)
        config = BuildProduct(engine=f"{name}/engine", build=BuildConfig(precision=precision))
        engine = build_engine(open_checkpoint(str(folder)), config, lambda _: None)
        shutil.rmtree(folder)  # large-v3's has 3 GB
        yield engine
