"""Whether files end before their last part does, on files of a few bytes."""

import struct

import pytest

from serve.speech.containers import is_cut_off

CLUSTER, SEGMENT = b"\x1f\x43\xb6\x75", b"\x18\x53\x80\x67"
OPEN = b"\x01" + b"\xff" * 7  # a size that is not known yet
EBML = b"\x1a\x45\xdf\xa3\x84\x42\x86\x81\x01"


def element(name: bytes, content: bytes, size: bytes | None = None) -> bytes:
    return name + (size or struct.pack(">Q", 1 << 56 | len(content))) + content


def block(content: bytes) -> bytes:
    """A piece of sound of at most 126 bytes, as recorders write them."""
    return b"\xa3" + bytes([0x80 | len(content)]) + content


TIME = element(b"\xe7", b"\0")
BLOCKS = TIME + block(b"\x81\0\0\x80" + b"sound" * 20) * 30
RECORDERS = {
    "chrome": EBML + element(SEGMENT, element(CLUSTER, BLOCKS, OPEN) * 3, OPEN),
    "sized clusters": EBML + element(SEGMENT, element(CLUSTER, BLOCKS) * 3, OPEN),
    "with cues behind": EBML
    + element(SEGMENT, element(CLUSTER, BLOCKS) + element(b"\x1c\x53\xbb\x6b", b"x" * 50)),
    "its mark in its sound": EBML
    + element(SEGMENT, element(CLUSTER, BLOCKS + block(b"\x81\0\0\x80" + CLUSTER + b"\x8f")), OPEN),
    "slices of it": EBML + element(SEGMENT, element(CLUSTER, BLOCKS, OPEN), OPEN) + b"\xa3",
    "filled up": EBML + element(SEGMENT, element(CLUSTER, BLOCKS, OPEN), OPEN) + bytes(99),
}


@pytest.mark.parametrize("data", RECORDERS.values(), ids=RECORDERS)
def test_what_browsers_record_is_whole_without_a_duration(data):
    assert not is_cut_off(data)


@pytest.mark.parametrize("name", ["chrome", "sized clusters", "with cues behind"])
def test_a_cut_recording_is_known_by_its_last_block(name):
    data = RECORDERS[name]
    for end in range(len(data) - 60, len(data) - 1):
        assert is_cut_off(data[:end])
    last = data.rfind(b"\xa3\xe8")
    assert is_cut_off(data[:last]) == (name != "chrome"), "between two blocks nothing is missing"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\x08ftyp" + bytes(8),  # a box of size 0: to the end
        b"caff\0\1\0\0data" + b"\xff" * 8,  # a size that is not known
        b"RIFF\0\0\0\0AVI ",
        EBML + b"\0" * 100,
        b"ID3" + bytes(100),
    ],
)
def test_what_tells_nothing_is_not_cut(data):
    assert not is_cut_off(data)
