"""Writes a checkpoint as the file of weights that whisper.cpp reads, as its own converter does:

python -m eval.accuracy.ggml CHECKPOINT TOKENIZER FILE f16|q8_0    an empty TOKENIZER: its own

All little endian: a magic number, eleven sizes, the mel filters, the vocabulary's bytes, then each
tensor with its shape (innermost dimension first), type, name and data. In q8_0 each matrix is
blocks of 32 values: a float16 scale, then 32 int8. The names of tensors are OpenAI's. whisper.cpp
computes the ids of special tokens from the vocabulary's size, so that has to be one of OpenAI's.
"""

import json
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from build.checkpoint import Checkpoint, open_checkpoint
from build.names import foreign_name
from eval.accuracy.prepare import OPENAI_VOCABULARIES, GgmlKind
from serve.contract.engine import Dims, mel_filters
from serve.contract.errors import UnavailableError
from serve.contract.exits import exit_status

_MAGIC = 0x67676D6C
_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type
_FILE_TYPES: dict[GgmlKind, int] = {"f16": 1, "q8_0": 2007}  # ggml_ftype + 1000 * its version, 2
_BLOCK = 32
# They stay in float32, and a bias of a convolution has a dimension more.
_CONV_BIASES = ("encoder.conv1.bias", "encoder.conv2.bias")
_POSITIONS = ("encoder.positions", "decoder.positions")


def write_ggml(checkpoint: Checkpoint, path: Path, kind: GgmlKind) -> None:
    """Write the file.

    Args:
        checkpoint: what to write.
        path: of the file.
        kind: of the matrices; the rest is float16 or float32, as whisper.cpp wants it.

    Raises:
        UnavailableError: its vocabulary is not one of OpenAI's.
    """
    if checkpoint.dims.n_vocab not in OPENAI_VOCABULARIES:
        sizes = ", ".join(map(str, OPENAI_VOCABULARIES))
        raise UnavailableError(
            f"whisper.cpp reads vocabularies of {sizes} tokens, this checkpoint's has "
            f"{checkpoint.dims.n_vocab}; leave whisper.cpp out with --without"
        )
    with path.open("wb") as file:
        file.write(struct.pack("<12i", _MAGIC, *_sizes(checkpoint.dims), _FILE_TYPES[kind]))
        filters = mel_filters(checkpoint.dims.n_mels).numpy().astype("<f4")
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        tokens = _text_tokens(checkpoint)
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in checkpoint.tensors.items():
            _write_tensor(file, name, tensor, kind)


def _sizes(dims: Dims) -> Iterator[int]:
    names = "n_vocab n_audio_ctx n_audio_state n_audio_head n_audio_layer n_text_ctx n_text_state"
    names += " n_text_head n_text_layer n_mels"
    return (int(getattr(dims, name)) for name in names.split())


def _text_tokens(checkpoint: Checkpoint) -> list[bytes]:
    """Return the bytes of every token that is text, by id; those are all before end of text."""
    vocabulary: dict[str, int] = json.loads(checkpoint.tokenizer_json)["model"]["vocab"]
    by_id = {id: text for text, id in vocabulary.items()}
    alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    letters = {letter: byte for byte, letter in alphabet.items()}
    return [bytes(letters[c] for c in by_id[id]) for id in range(checkpoint.facts.eot)]


def _write_tensor(file: BinaryIO, name: str, tensor: torch.Tensor, kind: GgmlKind) -> None:
    values = tensor.float().numpy()
    if name in _CONV_BIASES:
        values = values[:, None]
    type_, data = _encoded(name, values, kind)
    title = foreign_name(name, "openai").encode()
    file.write(struct.pack("<3i", values.ndim, len(title), _TYPES[type_]))
    file.write(struct.pack(f"<{values.ndim}i", *reversed(values.shape)))
    file.write(title + data)


def _encoded(name: str, values: npt.NDArray[np.float32], kind: GgmlKind) -> tuple[str, bytes]:
    if values.ndim < 2 or name in (*_CONV_BIASES, *_POSITIONS):
        return "f32", values.astype("<f4").tobytes()
    if kind == "q8_0" and values.ndim == 2:
        return "q8_0", q8_0(values)
    return "f16", values.astype("<f2").tobytes()


def q8_0(values: npt.NDArray[np.float32]) -> bytes:
    """Pack rows, whose length is a multiple of 32, into blocks of 32 values."""
    blocks = values.reshape(-1, _BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127.0
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    packed = np.empty(len(blocks), np.dtype([("scale", "<f2"), ("values", "i1", (_BLOCK,))]))
    packed["scale"] = scales[:, 0]
    packed["values"] = np.round(blocks * inverse)
    return packed.tobytes()


def main(arguments: Sequence[str]) -> int:
    """Write one file; returns the exit code."""
    checkpoint, tokenizer, target, kind = arguments

    def run() -> int:
        opened = open_checkpoint(checkpoint, tokenizer)
        write_ggml(opened, Path(target), "q8_0" if kind == "q8_0" else "f16")
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
