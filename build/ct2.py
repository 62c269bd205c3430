"""Read CTranslate2's `model.bin`, the weights of faster-whisper's folders: floating point or INT8.

The format is little endian (ctranslate2, specs/model_spec.py):

- uint32 version, name of the specification, uint32 revision;
- uint32 number of variables; each has a name, uint8 rank, uint32 sizes, uint8 type, uint32 bytes,
  and data;
- uint32 number of aliases; each is two names.

A name is a uint16 length and that many bytes; the last byte is zero. The file is mapped, and all
sizes are checked before a tensor is made.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from serve.contract.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

_VERSION = 6
_SPEC = "WhisperSpec"
_DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
# The settings of every CTranslate2 Whisper; with other values the same tensors compute other texts.
_SETTINGS = {
    "decoder/activation": 3,  # GELU
    "decoder/alibi": 0,
    "decoder/alibi_use_positive_positions": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_alibi": 0,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
_IGNORED_SETTINGS = ("decoder/alignment_heads", "decoder/alignment_layer")  # from config.json
_STACKED = {"/self_attention/linear_0": "qkv", "/attention/linear_1": "kv"}
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCALE = "_scale"
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/")


def read_ct2(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Read a Whisper `model.bin`.

    Args:
        path: the file.

    Returns:
        The network's sizes by the names of `serve.contract.manifest.Dims`, None if the tensors do
        not show one; and the tensors by the names of `build.tensor_names`, with stacked matrices
        split and INT8 expanded to float16.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not Whisper.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
        ):
            stored, aliases = _read_variables(mapped)
    except (OSError, ValueError, IndexError, struct.error) as error:  # an empty file has no map
        raise CheckpointError(
            f"cannot read {path} as a CTranslate2 Whisper: {error}; it may be damaged or "
            "truncated; fetch it again"
        ) from error
    tensors = _expanded(stored, path)
    for alias, name in aliases.items():
        if name in tensors:  # `_expanded` has removed the scales
            tensors[alias] = tensors[name]
    tensors = dict(_split(tensors, path))
    settings = {name: tensors.pop(name).item() for name in list(tensors) if not tensors[name].dim()}
    heads = {side: settings.pop(f"{side}/num_heads", None) for side in ("encoder", "decoder")}
    for name in settings.keys() - set(_IGNORED_SETTINGS):
        expected = _SETTINGS.get(name, "no such setting")
        if settings[name] != expected:
            raise CheckpointError(f"{path}: {name} = {settings[name]}; expected {expected}")
    return _sizes(tensors, heads), tensors


def _read_variables(mapped: mmap.mmap) -> tuple[Tensors, dict[str, str]]:
    """Read all variables by name, in the stored dtype, and the targets of all aliases.

    Raises:
        ValueError, IndexError, struct.error: the file is damaged, truncated or not Whisper.
    """
    offset = 0

    def unpack(layout: str) -> tuple[Any, ...]:
        nonlocal offset
        values = struct.unpack_from(f"<{layout}", mapped, offset)
        offset += struct.calcsize(f"<{layout}")
        return values

    def unpack_name() -> str:
        (size,) = unpack("H")
        (name,) = unpack(f"{size}s")
        if name[-1:] != b"\0":
            raise ValueError(f"there is no valid name before byte {offset:,}")
        return str(name[:-1], "ascii")

    def unpack_tensor(name: str) -> torch.Tensor:
        nonlocal offset
        (rank,) = unpack("B")
        shape = unpack(f"{rank}I")
        kind, size = unpack("BI")
        dtype = _DTYPES[kind]
        expected = math.prod(shape) * dtype.itemsize
        if size != expected or not size:
            raise ValueError(f"{name} of shape {shape} has {size:,} bytes; expected {expected:,}")
        # A copy, since the file does not align tensors.
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset).clone()
        offset += size
        return data.view(dtype).reshape(shape)

    (version,), spec = unpack("I"), unpack_name()
    if (version, spec) != (_VERSION, _SPEC):
        raise ValueError(f"it holds a {spec} of format {version}; expected a {_SPEC} of {_VERSION}")
    _, count = unpack("II")  # the specification's revision; names and sizes are checked instead
    stored = {name: unpack_tensor(name) for name in (unpack_name() for _ in range(count))}
    (count,) = unpack("I")
    aliases = {alias: unpack_name() for alias in (unpack_name() for _ in range(count))}
    if offset != len(mapped):
        raise ValueError(f"{len(mapped) - offset:,} bytes follow after the last alias")
    return stored, aliases


def _expanded(stored: Tensors, path: Path) -> Tensors:
    """Expand INT8 matrices to float16, divided by the scale of each row; keep all others."""
    tensors = dict(stored)
    for name, tensor in stored.items():
        if not tensor.dim() or tensor.dtype in _FLOAT_DTYPES:
            continue
        scale = stored.get(name + _SCALE)
        if tensor.dtype != torch.int8 or scale is None or scale.shape != tensor.shape[:1]:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}; expected float32, float16, bfloat16, or int8 "
                f"with {name}{_SCALE} for each of its rows"
            )
        tensors.pop(name + _SCALE)
        tensors[name] = (tensor / scale.float().view(-1, *[1] * (tensor.dim() - 1))).half()
    return tensors


def _split(tensors: Tensors, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Split stacked queries, keys and values; drop the bias of keys, which must be 0."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition("/")
        parts = next((p for stack, p in _STACKED.items() if module.endswith(stack)), "")
        if not parts or not tensor.dim():
            yield name, tensor
            continue
        if tensor.shape[0] % len(parts):
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}; expected {len(parts)} equal parts"
            )
        for part, chunk in zip(parts, tensor.chunk(len(parts)), strict=True):
            if part == "k" and leaf == "bias":
                if bool(chunk.any()):
                    raise CheckpointError(f"{path}: {name} has a bias of keys; Whisper has none")
                continue
            yield f"{module}.{part}/{leaf}", chunk


def _sizes(tensors: Tensors, heads: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that the tensors show; their shapes are checked later."""

    def size(name: str, dimension: int) -> int | None:
        tensor = tensors.get(name)
        if tensor is None or tensor.dim() <= dimension:
            return None
        return tensor.shape[dimension]

    layers = {match.groups() for match in map(_LAYER.match, tensors) if match}
    counts = {side: sum(name_side == side for name_side, _ in layers) for side in heads}
    return {
        "n_mels": size("encoder/conv1/weight", 1),
        "n_audio_ctx": size("encoder/position_encodings/encodings", 0),
        "n_audio_state": size("encoder/position_encodings/encodings", 1),
        "n_audio_head": heads["encoder"],
        "n_audio_layer": counts["encoder"],
        "n_audio_ffn": size("encoder/layer_0/ffn/linear_0/weight", 0),
        "n_vocab": size("decoder/embeddings/weight", 0),
        "n_text_ctx": size("decoder/position_encodings/encodings", 0),
        "n_text_state": size("decoder/embeddings/weight", 1),
        "n_text_head": heads["decoder"],
        "n_text_layer": counts["decoder"],
        "n_text_ffn": size("decoder/layer_0/ffn/linear_0/weight", 0),
    }
