"""Convert engine tensors to a TensorRT-LLM 1.2 checkpoint, without TensorRT-LLM and without a GPU.

    <folder>/encoder/{config.json, rank0.safetensors}
    <folder>/decoder/{config.json, rank0.safetensors}

Names, shapes and configuration keys are those of the library's own Whisper converter for release
1.2 (examples/models/core/whisper/convert_checkpoint.py). Every tensor is float16. For INT8 the
config only sets `quant_algo` to W8A16, and the library's loader quantises the matrices for the GPU
that it builds on. Its INT8 byte layout differs between GPU generations, so matrices packed here
would be silently wrong on another generation.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from build.writer import finite
from serve.contract.config import Precision
from serve.contract.errors import CheckpointError
from serve.contract.manifest import HEAD_DIM, Dims

Tensors = dict[str, torch.Tensor]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "rank0.safetensors"  # the loader opens exactly rank{rank}.safetensors

_QUANT_ALGO: dict[Precision, str | None] = {"fp16": None, "int8": "W8A16"}
_MULTILINGUAL_VOCAB = 51865
_TOKENS_BESIDE_LANGUAGES = 51765  # tokens of a published vocabulary that are no languages


def encoder_tensors(dims: Dims, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Convert the encoder's tensors from the names of `tensor_kinds` to the library's.

    Linear weights stay (out, in). Convolutions get a trailing dimension of 1. Query, key and value
    of an attention are stacked on dimension 0, without scaling or interleaving by head.
    """
    out: Tensors = {"transformer.position_embedding.weight": _half(tensors["encoder.positions"])}
    for conv in ("conv1", "conv2"):
        weight = tensors[f"encoder.{conv}.weight"]
        out[f"transformer.{conv}.weight"] = _half(weight.unsqueeze(-1))
        out[f"transformer.{conv}.bias"] = _half(tensors[f"encoder.{conv}.bias"])
    for i in range(dims.n_audio_layer):
        source, target = f"encoder.layers.{i}", f"transformer.layers.{i}"
        _attention(out, tensors, f"{source}.attn", f"{target}.attention")
        _mlp(out, tensors, source, target)
    _copy(out, tensors, "encoder.norm", "transformer.ln_f")
    return out


def decoder_tensors(dims: Dims, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Convert the decoder's tensors as `encoder_tensors` does; write the tied projection twice."""
    tokens = tensors["decoder.tokens"]
    out: Tensors = {
        "transformer.vocab_embedding.weight": _half(tokens),
        "transformer.position_embedding.weight": _half(tensors["decoder.positions"]),
        # NOTE: a clone, since safetensors rejects two names for one storage.
        "lm_head.weight": _half(tokens).clone(),
    }
    for i in range(dims.n_text_layer):
        source, target = f"decoder.layers.{i}", f"transformer.layers.{i}"
        _attention(out, tensors, f"{source}.attn", f"{target}.self_attention")
        _attention(out, tensors, f"{source}.cross", f"{target}.cross_attention")
        _mlp(out, tensors, source, target)
    _copy(out, tensors, "decoder.norm", "transformer.ln_f")
    return out


def _half(tensor: torch.Tensor) -> torch.Tensor:
    # NOTE: one dtype throughout; the library's network is strongly typed, layer norms included.
    return tensor.to(torch.float16).contiguous()


def _copy(out: Tensors, tensors: Mapping[str, torch.Tensor], source: str, target: str) -> None:
    for part in ("weight", "bias"):
        out[f"{target}.{part}"] = _half(tensors[f"{source}.{part}"])


def _attention(out: Tensors, tensors: Mapping[str, torch.Tensor], source: str, target: str) -> None:
    weights = [tensors[f"{source}.{part}.weight"] for part in ("q", "k", "v")]
    query_bias, value_bias = (tensors[f"{source}.{part}.bias"] for part in ("q", "v"))
    biases = [query_bias, torch.zeros_like(query_bias), value_bias]  # keys have no bias
    out[f"{target}.qkv.weight"] = _half(torch.cat(weights))
    out[f"{target}.qkv.bias"] = _half(torch.cat(biases))
    _copy(out, tensors, f"{source}.out", f"{target}.dense")
    _copy(out, tensors, f"{source}_norm", f"{target}_layernorm")


def _mlp(out: Tensors, tensors: Mapping[str, torch.Tensor], source: str, target: str) -> None:
    _copy(out, tensors, f"{source}.mlp.fc1", f"{target}.mlp.fc")
    _copy(out, tensors, f"{source}.mlp.fc2", f"{target}.mlp.proj")
    _copy(out, tensors, f"{source}.mlp_norm", f"{target}.mlp_layernorm")


def encoder_config(dims: Dims, precision: Precision) -> dict[str, Any]:
    """Make the encoder's config.json; the C++ runtime looks for this name of the architecture.

    Raises:
        CheckpointError: the feed-forward blocks have another width than 4 * n_audio_state, which
            the library does not support.
    """
    if dims.n_audio_ffn != 4 * dims.n_audio_state:
        raise CheckpointError(
            f"the encoder's feed-forward blocks have a width of {dims.n_audio_ffn}; TensorRT-LLM "
            f"expects 4 x n_audio_state = {4 * dims.n_audio_state}; build with build.runtime = "
            "'native'"
        )
    multilingual = dims.n_vocab >= _MULTILINGUAL_VOCAB
    return {
        "architecture": "WhisperEncoder",
        "dtype": "float16",
        "num_hidden_layers": dims.n_audio_layer,
        "num_attention_heads": dims.n_audio_head,
        "hidden_size": dims.n_audio_state,
        "max_position_embeddings": dims.n_audio_ctx,
        "has_position_embedding": True,
        "n_mels": dims.n_mels,
        "vocab_size": dims.n_vocab,
        "hidden_act": "gelu",
        # Only the library's own example reads it; for unpublished vocabularies it has no meaning.
        "num_languages": max(0, dims.n_vocab - _TOKENS_BESIDE_LANGUAGES - multilingual),
        "quantization": {"quant_algo": _QUANT_ALGO[precision]},
    }


def decoder_config(dims: Dims, precision: Precision) -> dict[str, Any]:
    """Make the decoder's config.json."""
    config: dict[str, Any] = {
        "architecture": "DecoderModel",
        "dtype": "float16",
        "logits_dtype": "float16",
        "num_hidden_layers": dims.n_text_layer,
        "num_attention_heads": dims.n_text_head,
        "hidden_size": dims.n_text_state,
        "norm_epsilon": 1e-5,
        "vocab_size": dims.n_vocab,
        "hidden_act": "gelu",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "max_position_embeddings": dims.n_text_ctx,
        "use_prompt_tuning": False,
        "head_size": HEAD_DIM,
        "has_position_embedding": True,
        "layernorm_type": 0,  # LayerNorm
        "has_attention_qkvo_bias": True,
        "has_mlp_bias": True,
        "has_model_final_layernorm": True,
        "has_embedding_layernorm": False,
        "has_embedding_scale": False,
        "ffn_hidden_size": dims.n_text_ffn,
        "q_scaling": 1.0,
        "layernorm_position": 0,  # before each block
        "relative_attention": False,
        "max_distance": 0,
        "num_buckets": 0,
        "model_type": "whisper",
        "rescale_before_lm_head": False,
        "encoder_hidden_size": dims.n_audio_state,
        "encoder_num_heads": dims.n_audio_head,
        "encoder_head_size": None,
        "skip_cross_kv": False,
        "quantization": {"quant_algo": _QUANT_ALGO[precision]},
    }
    if dims.n_text_ffn != 4 * dims.n_text_state:  # the library's default
        config["intermediate_size"] = dims.n_text_ffn
    return config


def write_checkpoint(
    dims: Dims,
    tensors: Mapping[str, torch.Tensor],
    precision: Precision,
    folder: Path,
) -> None:
    """Write both halves below `folder`, which must exist.

    Args:
        dims, tensors: a checkpoint's sizes and tensors, by the names of `tensor_kinds`.
        precision: "int8" selects the library's W8A16.
        folder: the parent of the new folders `encoder/` and `decoder/`.

    Raises:
        CheckpointError: a tensor is not finite in float16, or the library has no such encoder.
    """
    for half, config, convert in (
        ("encoder", encoder_config(dims, precision), encoder_tensors),
        ("decoder", decoder_config(dims, precision), decoder_tensors),
    ):
        target = folder / half
        target.mkdir()
        text = json.dumps(config, indent=2) + "\n"
        (target / CONFIG_FILE).write_text(text, encoding="utf-8")
        stored = convert(dims, tensors).items()
        converted = {name: finite(tensor, f"{half} {name}") for name, tensor in stored}
        save_file(converted, target / WEIGHTS_FILE)
