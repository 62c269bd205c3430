"""Random-weight Whisper checkpoints of every published shape, in both formats, for tests.

The Hugging Face folder is laid out by transformers itself; the OpenAI file gets its names from a
list of substitutions of its own, so that `build.names` is not tested against itself.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperForConditionalGeneration

from build.builders import build_engine
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, Config
from serve.engine import Dims
from serve.errors import CheckpointError
from serve.speech.languages import LANGUAGE_NAMES

POOL_SIZE = 1_000_003  # prime: rows of a large matrix made from the pool differ


@dataclasses.dataclass(frozen=True)
class Shape:
    """What tells one published Whisper from another."""

    width: int
    encoder_layers: int
    decoder_layers: int
    languages: int = 99
    n_mels: int = 80
    multilingual: bool = True
    pieces: int = 50_257  # text tokens, <|endoftext|> not counted

    @property
    def n_vocab(self):
        return self.pieces + 2 + self.languages + 6 + 1501

    def shallow(self):
        """The same with one encoder layer more than decoder layers, and no more than two."""
        return dataclasses.replace(self, encoder_layers=2, decoder_layers=1)


def english(width, encoder_layers, decoder_layers):
    return Shape(width, encoder_layers, decoder_layers, multilingual=False, pieces=50_256)


PUBLISHED = {
    "tiny": Shape(384, 4, 4),
    "tiny.en": english(384, 4, 4),
    "base": Shape(512, 6, 6),
    "base.en": english(512, 6, 6),
    "small": Shape(768, 12, 12),
    "small.en": english(768, 12, 12),
    "medium": Shape(1024, 24, 24),
    "medium.en": english(1024, 24, 24),
    "large-v2": Shape(1280, 32, 32),
    "large-v3": Shape(1280, 32, 32, languages=100, n_mels=128),
    "large-v3-turbo": Shape(1280, 32, 4, languages=100, n_mels=128),
    "distil-small.en": english(768, 12, 4),
    "distil-medium.en": english(1024, 24, 2),
    "distil-large-v2": Shape(1280, 32, 2),
    "distil-large-v3": Shape(1280, 32, 2, languages=100, n_mels=128),
}
NANO = Shape(64, 2, 1, languages=100, pieces=300)  # no published size: everything runs at once


def special_tokens(shape):
    """Content of each special token, in order of id from `shape.pieces` on."""
    languages = [f"<|{code}|>" for code in list(LANGUAGE_NAMES)[: shape.languages]]
    no_speech = "<|nospeech|>" if shape.languages == 100 else "<|nocaptions|>"
    tasks = ["translate", "transcribe", "startoflm", "startofprev"]
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *languages,
        *(f"<|{task}|>" for task in tasks),
        no_speech,
        "<|notimestamps|>",
        *(f"<|{i * 0.02:.2f}|>" for i in range(1501)),
    ]


def special_ids(shape):
    return {content: shape.pieces + i for i, content in enumerate(special_tokens(shape))}


def write_tokenizer(folder, shape):
    """Write tokenizer.json and generation_config.json as published folders have them."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = special_ids(shape)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = alphabet + [f"filler{i}" for i in range(shape.pieces - len(alphabet))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(vocab)}, "merges": []}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": c, "special": True, **flags} for c, i in ids.items()],
        "pre_tokenizer": byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": model,
    }
    write_json(folder / "tokenizer.json", content)
    generation = {
        "alignment_heads": [[0, 0]],
        "begin_suppress_tokens": [220, ids["<|endoftext|>"]],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "is_multilingual": shape.multilingual,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [1, 2, 7, ids["<|startoftranscript|>"], ids["<|startoflm|>"]],
    }
    if shape.multilingual:
        codes = [f"<|{code}|>" for code in list(LANGUAGE_NAMES)[: shape.languages]]
        generation["lang_to_id"] = {content: ids[content] for content in sorted(codes)}
        generation["task_to_id"] = {t: ids[f"<|{t}|>"] for t in ("transcribe", "translate")}
    write_json(folder / "generation_config.json", generation)


def dims_of(shape):
    """The network's sizes as an engine states them."""
    state = {"state": shape.width, "head": shape.width // 64, "ffn": shape.width * 4}
    audio = state | {"layer": shape.encoder_layers, "ctx": 1500}
    text = state | {"layer": shape.decoder_layers, "ctx": 448}
    fields = {f"n_audio_{key}": value for key, value in audio.items()}
    fields |= {f"n_text_{key}": value for key, value in text.items()}
    return Dims(n_mels=shape.n_mels, n_vocab=shape.n_vocab, **fields)


def hf_config(shape):
    return WhisperConfig(
        vocab_size=shape.n_vocab,
        num_mel_bins=shape.n_mels,
        d_model=shape.width,
        encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers,
        encoder_attention_heads=shape.width // 64,
        decoder_attention_heads=shape.width // 64,
        encoder_ffn_dim=shape.width * 4,
        decoder_ffn_dim=shape.width * 4,
        pad_token_id=shape.pieces,
        bos_token_id=shape.pieces,
        eos_token_id=shape.pieces,
        decoder_start_token_id=shape.pieces + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )


def hf_tensors(shape):
    """Tensors without data by Hugging Face's names, the tied projection left out."""
    with torch.device("meta"):
        tensors = WhisperForConditionalGeneration(hf_config(shape)).state_dict()
    del tensors["proj_out.weight"]
    return tensors


def random_weights(shape, seed=0):
    """Float16 tensors for `hf_tensors`, scaled so that the network computes finite logits."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(POOL_SIZE, generator=generator) * 0.05
    weights = {}
    for i, (name, tensor) in enumerate(hf_tensors(shape).items()):
        values = pool.roll(-7919 * i).repeat(tensor.numel() // POOL_SIZE + 1)[: tensor.numel()]
        values = values.reshape(tensor.shape)
        weights[name] = (values + 1.0 if name.endswith("norm.weight") else values).half()
    return weights


def openai_name(name):
    """OpenAI's name of a Hugging Face tensor."""
    for old, new in (
        ("model.", ""),
        (".layers.", ".blocks."),
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("self_attn_layer_norm", "attn_ln"),
        ("final_layer_norm", "mlp_ln"),
        ("encoder.layer_norm", "encoder.ln_post"),
        ("decoder.layer_norm", "decoder.ln"),
        ("encoder_attn", "cross_attn"),
        ("self_attn", "attn"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
        ("embed_positions.weight", "positional_embedding"),
        ("embed_tokens", "token_embedding"),
    ):
        name = name.replace(old, new)
    return name


def write_hf(folder, shape, weights):
    """Write a Hugging Face folder."""
    write_tokenizer(folder, shape)
    hf_config(shape).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_openai(path, shape, weights):
    """Write an OpenAI `.pt`, which has no tokenizer."""
    heads = shape.width // 64
    dims = {
        "n_mels": shape.n_mels,
        "n_vocab": shape.n_vocab,
        "n_audio_ctx": 1500,
        "n_audio_state": shape.width,
        "n_audio_head": heads,
        "n_audio_layer": shape.encoder_layers,
        "n_text_ctx": 448,
        "n_text_state": shape.width,
        "n_text_head": heads,
        "n_text_layer": shape.decoder_layers,
    }
    state = {openai_name(name): tensor for name, tensor in weights.items()}
    torch.save({"dims": dims, "model_state_dict": state}, path)
    return path


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(path, **changes):
    """Change keys of a JSON file; None removes one."""
    content = json.loads(Path(path).read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in content.items() if value is not None})


def write_engine(checkpoint, target, precision="int8"):
    """Build a native engine, unverified."""
    config = Config(engine=str(target), build=BuildConfig(precision=precision))
    return build_engine(checkpoint, config, log=lambda _: None)


def refusal(checkpoint, tokenizer=""):
    """What `open_checkpoint` says about a checkpoint that it must refuse."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(checkpoint), str(tokenizer))
    return str(caught.value)
