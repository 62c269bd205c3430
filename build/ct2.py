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
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch

from serve.contract.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

_VERSION = 6
_SPEC = "WhisperSpec"
_DTYPES = (
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
)
_MAX_DIMENSIONS = 3
_INT32 = struct.Struct("<I")
# The only supported values of settings.
_SETTINGS = {
    "decoder/activation": 3,  # GELU
    "decoder/alibi": 0,
    "decoder/alibi_use_positive_positions": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_alibi": 0,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
_ANY_SETTING = ("decoder/alignment_heads", "decoder/alignment_layer")  # read from config.json
_STACKED = {"/self_attention/linear_0": "qkv", "/attention/linear_1": "kv"}
_READ = (torch.float32, torch.float16, torch.bfloat16)
_SCALE = "_scale"
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/")


def read_ct2(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Read a Whisper `model.bin`.

    Args:
        path: the file.

    Returns:
        The network's sizes by the names of `serve.contract.engine.Dims`, None if the tensors do not
        show one; and the tensors by the names of `build.tensor_names`, with stacked matrices split
        and INT8 expanded to float16.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not Whisper.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as whole:
            stored, aliases = _Ct2Reader(path, whole).variables()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"cannot read {path}: {error}; fetch it again") from error
    tensors = _expanded(stored, path)
    for alias, name in aliases.items():
        if name in tensors:  # `_expanded` has removed the scales
            tensors[alias] = tensors[name]
    tensors = dict(_split(tensors, path))
    settings = {name: tensors.pop(name).item() for name in list(tensors) if not tensors[name].dim()}
    return _sizes(tensors, _heads(settings, path)), tensors


class _Ct2Reader:
    """Reads a mapped file from its start to its end."""

    def __init__(self, path: Path, whole: mmap.mmap) -> None:
        self._path = path
        self._whole = whole
        self._at = 0

    def variables(self) -> tuple[Tensors, dict[str, str]]:
        """Read all variables by name, in the stored dtype, and the targets of all aliases."""
        version = self._number()
        if version != _VERSION:
            raise self._error(f"its format is {version}; expected {_VERSION}")
        spec = self._name()
        if spec != _SPEC:
            raise self._error(f"it holds a {spec}; expected a {_SPEC}")
        self._number()  # the specification's revision; names and sizes are checked instead
        stored: Tensors = {}
        for _ in range(self._number()):
            name = self._new_name(stored)
            stored[name] = self._tensor(name)
        aliases: dict[str, str] = {}
        for _ in range(self._number()):
            alias, name = self._new_name(stored, aliases), self._name()
            if name not in stored:
                raise self._error(f"{alias} is an alias of {name}, which does not exist")
            aliases[alias] = name
        if self._at != len(self._whole):
            raise self._error(f"{len(self._whole) - self._at:,} bytes follow after the last alias")
        return stored, aliases

    def _tensor(self, name: str) -> torch.Tensor:
        rank = self._byte()
        if rank > _MAX_DIMENSIONS:
            raise self._error(f"{name} has {rank} dimensions; expected at most {_MAX_DIMENSIONS}")
        shape = [self._number() for _ in range(rank)]
        kind = self._byte()
        if kind >= len(_DTYPES):
            raise self._error(f"{name} has the type {kind}; expected one below {len(_DTYPES)}")
        dtype = _DTYPES[kind]
        size, expected = self._number(), math.prod(shape) * dtype.itemsize
        if size != expected or not size:
            raise self._error(f"{name} of shape {shape} has {size:,} bytes; expected {expected:,}")
        start = self._take(size)
        # A copy, since the file does not align tensors.
        data = torch.frombuffer(self._whole, dtype=torch.uint8, count=size, offset=start).clone()
        return data.view(dtype).reshape(shape)

    def _take(self, size: int) -> int:
        """Skip some bytes, and return their offset."""
        start = self._at
        if size > len(self._whole) - start:
            raise self._error(
                f"it has {len(self._whole):,} bytes; expected at least {start + size:,}; it may be "
                "truncated"
            )
        self._at += size
        return start

    def _byte(self) -> int:
        return self._whole[self._take(1)]

    def _number(self) -> int:
        number: int = _INT32.unpack_from(self._whole, self._take(_INT32.size))[0]
        return number

    def _name(self) -> str:
        start = self._take(2)
        size = int.from_bytes(self._whole[start : start + 2], "little")
        start = self._take(size)
        name, end = self._whole[start : start + size - 1], self._whole[start + size - 1]
        if not size or end or not name.isascii():
            raise self._error(f"there is no valid name at byte {start:,}")
        return name.decode("ascii")

    def _new_name(self, *known: Container[str]) -> str:
        name = self._name()
        if any(name in names for names in known):
            raise self._error(f"{name} occurs twice")
        return name

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"cannot read {self._path} as a CTranslate2 Whisper: {problem}; fetch it again"
        )


def _expanded(stored: Tensors, path: Path) -> Tensors:
    """Expand INT8 matrices to float16, divided by the scale of each row; keep all others."""
    tensors = dict(stored)
    for name, tensor in stored.items():
        if not tensor.dim() or tensor.dtype in _READ:
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


def _heads(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the number of heads by side.

    Raises:
        CheckpointError: a setting has an unsupported value.
    """
    heads = {side: settings.pop(f"{side}/num_heads", None) for side in ("encoder", "decoder")}
    for name in settings.keys() - set(_ANY_SETTING):
        expected = _SETTINGS.get(name, "no such setting")
        if settings[name] != expected:
            raise CheckpointError(f"{path}: {name} = {settings[name]}; expected {expected}")
    return heads


def _sizes(tensors: Tensors, heads: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that the tensors show; their shapes are checked later."""

    def size(name: str, dimension: int) -> int | None:
        tensor = tensors.get(name)
        if tensor is None or tensor.dim() <= dimension:
            return None
        return tensor.shape[dimension]

    layers = {match.groups() for match in map(_LAYER.match, tensors) if match}
    counts = {side: sum(of == side for of, _ in layers) for side in heads}
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
