"""What whisper.cpp is given, read back as its loader reads it."""

import struct

import numpy as np
import pytest

from build.checkpoint import open_checkpoint
from build.names import foreign_name
from eval.accuracy import ggml
from eval.config import EvalConfig
from serve.contract.errors import UnavailableError

CHECKPOINT = "tests/fixture/checkpoint"
DTYPES = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(CHECKPOINT)


def read_back(path):
    """Sizes, tokens, and (type, values) of every tensor by name."""
    data, at = path.read_bytes(), 0

    def take(form):
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found

    def some(count):
        nonlocal at
        at += count
        return data[at - count : at]

    header = take("12i")
    n_mels, n_freqs = take("2i")
    some(4 * n_mels * n_freqs)
    tokens = [some(*take("i")) for _ in range(*take("i"))]
    tensors = {}
    while at < len(data):
        dims, length, kind = take("3i")
        shape = tuple(reversed(take(f"{dims}i")))
        name, count = some(length).decode(), int(np.prod(shape))
        if kind == 8:
            blocks = np.frombuffer(
                some(count // 32 * 34), np.dtype([("d", "<f2"), ("q", "i1", 32)])
            )
            values = blocks["d"].astype(np.float32)[:, None] * blocks["q"]
        else:
            values = np.frombuffer(some(count * DTYPES[kind].itemsize), DTYPES[kind])
        tensors[name] = kind, values.reshape(shape).astype(np.float32)
    return header, tokens, tensors


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_every_tensor_is_there_in_its_shape_and_near_its_value(
    checkpoint, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(ggml, "OPENAI_VOCABULARIES", (checkpoint.dims.n_vocab,))
    ggml.write_ggml(checkpoint, tmp_path / "a.bin", kind)
    header, tokens, tensors = read_back(tmp_path / "a.bin")
    assert header[:2] == (0x67676D6C, checkpoint.dims.n_vocab)
    assert header[-2:] == (checkpoint.dims.n_mels, {"f16": 1, "q8_0": 2007}[kind])
    assert len(tokens) == checkpoint.facts.eot and b" the" in tokens
    expected = {foreign_name(name, "openai"): t for name, t in checkpoint.tensors.items()}
    assert tensors.keys() == expected.keys()
    for name, (stored, values) in tensors.items():
        tensor = expected[name].float().numpy()
        if name in ggml._CONV_BIASES:
            assert values.shape == (len(tensor), 1)
        values = values.reshape(tensor.shape)
        step = np.abs(tensor).max() / 127 if stored == 8 else 1e-3 * np.abs(tensor).max()
        assert np.abs(values - tensor).max() <= step, name
    matrix, vector = tensors["encoder.blocks.0.mlp.0.weight"], tensors["encoder.ln_post.bias"]
    assert (matrix[0], vector[0]) == ({"f16": 1, "q8_0": 8}[kind], 0)


def test_a_row_of_zeros_stays_zero():
    packed = ggml.q8_0(np.array([[0.0] * 32, [0.0] * 31 + [-2.54]], np.float32))
    assert packed[:34] == bytes(34)
    assert np.frombuffer(packed[34:36], "<f2")[0] == pytest.approx(0.02, rel=1e-3)
    assert np.frombuffer(packed[36:], "i1").tolist() == [0] * 31 + [-127]


def test_a_vocabulary_that_whisper_cpp_cannot_read_is_refused(checkpoint, tmp_path, capsys):
    with pytest.raises(UnavailableError, match=r"reads vocabularies of 51864, .* --without"):
        ggml.write_ggml(checkpoint, tmp_path / "a.bin", "f16")
    assert ggml.main([CHECKPOINT, "", str(tmp_path / "a.bin"), "f16"]) == 1
    assert "error: whisper.cpp reads vocabularies" in capsys.readouterr().err
    assert not [name for name in EvalConfig.systems if name.startswith("whisper.cpp")]
