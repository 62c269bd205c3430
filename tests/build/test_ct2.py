"""build.ct2: folders that CTranslate2's own converter writes, and files that are not right."""

import dataclasses
import random
import struct

import pytest
import torch

from build.checkpoint import open_checkpoint
from build.ct2 import read_ct2
from eval.random_whisper import PUBLISHED, random_weights, write_checkpoint
from serve.contract.errors import CheckpointError
from tests.checkpoints import edit_json, refusal, refused, write_ct2, write_nano


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_nano(tmp_path_factory.mktemp("ct2") / "hf")


@pytest.fixture(scope="module")
def ct2(source):
    """Only to be read."""
    return write_ct2(source, source.parent / "ct2")


@pytest.fixture
def file(ct2, tmp_path):
    """A model.bin of the test's own."""
    path = tmp_path / "model.bin"
    path.write_bytes((ct2 / "model.bin").read_bytes())
    return path


@pytest.mark.parametrize(
    ("precision", "dtype", "relative"),
    [
        ("float16", torch.float16, 0.0),
        ("bfloat16", torch.bfloat16, 2**-8),
        ("int8", torch.float16, 0.02),
    ],
)
def test_every_precision_opens_as_what_was_write_ct2(source, tmp_path, precision, dtype, relative):
    ours = open_checkpoint(str(write_ct2(source, tmp_path / precision, precision)))
    theirs = open_checkpoint(str(source))
    assert ours.naming == "ct2"
    assert (ours.dims, ours.facts, ours.notes) == (theirs.dims, theirs.facts, theirs.notes)
    assert list(ours.tensors) == list(theirs.tensors)
    assert ours.tensors["decoder.tokens"].dtype == dtype
    for name, tensor in theirs.tensors.items():
        difference = (ours.tensors[name].float() - tensor.float()).norm()
        assert difference <= relative * tensor.float().norm(), name
    assert ours.weight_bytes == (tmp_path / precision / "model.bin").stat().st_size


@pytest.mark.parametrize("size", ["tiny", "tiny.en"])
def test_as_faster_whisper_has_them(size, tmp_path):
    """Without generation_config.json: CTranslate2's config and the tokenizer say it all."""
    shape = dataclasses.replace(PUBLISHED[size], encoder_layers=1, decoder_layers=1)
    source = write_checkpoint(tmp_path / "hf", shape, random_weights(shape))
    ours = open_checkpoint(str(write_ct2(source, tmp_path / "ct2", copied=["tokenizer.json"])))
    assert ours.facts == open_checkpoint(str(source)).facts


def test_a_tokenizer_of_another_checkpoint_shows(source, tmp_path):
    folder = write_ct2(source, tmp_path / "ct2")
    edit_json(folder / "config.json", lang_ids=[1, 2, 3])
    assert (
        "tokenizer.json has 100 languages, but the checkpoint is multilingual, and lang_ids"
        in refusal(folder)
    )


def test_int16_is_refused(source, tmp_path):
    folder = write_ct2(source, tmp_path / "int16", "int16")
    assert "is torch.int16; expected float32, float16, bfloat16, or int8 with" in refusal(folder)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"WhisperSpec", b"whisperSpec", "it holds a whisperSpec of format 6; expected"),
        (b"decoder/alibi\0", b"decoder/other\0", "decoder/other = 0; expected no such setting"),
        (
            b"/pre_norm\0\0\1\1\0\0\0\1",
            b"/pre_norm\0\0\1\1\0\0\0\0",
            "decoder/pre_norm = 0; expected 1",
        ),
        (b"projection/weight\0", b"projection/weight\1", "there is no valid name before byte"),
    ],
)
def test_what_is_not_ours_is_named(file, old, new, expected):
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))
    assert expected in refused(read_ct2, file)


def variable(name, shape, kind, size):
    stored = name.encode() + b"\0"
    return (
        struct.pack("<H", len(stored))
        + stored
        + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, kind, size)
    )


START = struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + struct.pack("<II", 3, 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cannot read"),
        (START, "a buffer of at least 28 bytes"),
        (START + variable("a", [4], 0, 4), "a of shape (4,) has 4 bytes; expected 16"),
        # Products that wrap around in 32 and in 64 bits.
        (START + variable("a", [2**31, 2], 0, 0), "has 0 bytes; expected 17,179,869,184"),
        (START + variable("a", [2**31, 2**31, 4], 4, 0), "has 0 bytes; expected 36,893,488,147"),
        # Four gigabytes that are stated rightly and are not there.
        (START + variable("a", [2**32 - 1], 1, 2**32 - 1), "no greater than buffer length"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(tmp_path, content, expected):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    assert expected in refused(read_ct2, path)


def test_every_end_is_missed(file):
    content = file.read_bytes()
    for end in (*range(60), *range(60, len(content), 9973), len(content) - 1):
        file.write_bytes(content[:end])
        assert "truncated" in refused(read_ct2, file)
    file.write_bytes(content + b"\0")
    assert "1 bytes follow after the last alias" in refused(read_ct2, file)


def test_damage_is_an_error_of_ours_or_none(ct2, tmp_path):
    """Bytes set at random, most of them near names, sizes and types."""
    (tmp_path / "tokenizer.json").write_bytes((ct2 / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_bytes((ct2 / "config.json").read_bytes())
    content = (ct2 / "model.bin").read_bytes()
    places = [at for at in range(len(content)) if content.startswith(b"coder/", at)]
    chance, file, refused = random.Random(0), tmp_path / "model.bin", 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 3])):
            at = chance.choice(places) + chance.randrange(-8, 60)
            damaged[at % len(content)] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        file.write_bytes(damaged)
        try:
            read_ct2(file)
        except CheckpointError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 100


def test_a_bias_of_keys_and_a_matrix_that_has_no_third(file):
    content = file.read_bytes()
    name = b"encoder/layer_0/self_attention/linear_0/bias\0"
    data = content.index(name) + len(name) + 1 + 4 + 1 + 4
    rows = struct.pack("<I", 192)
    assert content[data - 9 : data - 5] == rows
    keys = data + 64 * 2
    file.write_bytes(content[:keys] + b"\x01" + content[keys + 1 :])
    assert "has a bias of keys; Whisper has none" in refused(read_ct2, file)
    header = content[: data - 9] + struct.pack("<IBI", 191, 4, 382)
    file.write_bytes(header + content[data + 2 :])
    assert "has shape [191]; expected 3 equal parts" in refused(read_ct2, file)
