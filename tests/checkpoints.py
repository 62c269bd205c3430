"""Random-weight Whisper checkpoints of every published shape, in both formats, for tests.

The Hugging Face folder is eval's, laid out by transformers itself; the OpenAI file gets its names
from its own list of substitutions, so that `build.tensor_names` is not tested against itself.
"""

import json
from pathlib import Path

import pytest
import torch

from build.builders import build_engine
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, BuildProduct
from eval.random_whisper import Shape, random_weights, write_checkpoint, write_json
from serve.contract.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "generation_config.json")
NANO = Shape(64, 2, 1, languages=100, pieces=300)  # no published size: everything runs at once


def write_nano(path, seed=0):
    """Write the small one as a Hugging Face folder with random weights."""
    return write_checkpoint(path, NANO, random_weights(NANO, seed=seed))


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


def write_ct2(source, target, precision="float16", copied=TOKENIZER_FILES):
    """Have CTranslate2's own converter write a Hugging Face folder as faster-whisper's."""
    from ctranslate2.converters import TransformersConverter

    converter = TransformersConverter(str(source), copy_files=list(copied))
    converter.convert(str(target), quantization=precision)
    return target


def edit_json(path, **changes):
    """Change keys of a JSON file; None removes one."""
    content = json.loads(Path(path).read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in content.items() if value is not None})


def write_engine(checkpoint, target, precision="int8"):
    """Build a native engine, unverified."""
    config = BuildProduct(engine=str(target), build=BuildConfig(precision=precision))
    return build_engine(checkpoint, config, log=lambda _: None)


def refused(call, *arguments):
    """What a call says about a checkpoint that it must refuse."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    return str(caught.value)


def refusal(checkpoint, tokenizer=""):
    """What `open_checkpoint` says about a checkpoint that it must refuse."""
    return refused(open_checkpoint, str(checkpoint), str(tokenizer))
