"""What headers declare, on files of a few bytes.

Whether files end before their last part does, on files of a few bytes and on real ones.
"""

import struct

import pytest

from serve.speech.containers import (
    STREAM_BYTES,
    Pcm16Header,
    is_cut_off,
    last_ogg_page_is_whole,
    pcm16_header,
)

FMT = struct.pack("<HHIIHH", 1, 2, 8000, 32000, 4, 16)
NO_CHANNELS = struct.pack("<HHIIHH", 1, 0, 8000, 0, 0, 16)
SAMPLES = bytes(8)


def chunk(name, content, size=None, layout="<I"):
    return name + struct.pack(layout, len(content) if size is None else size) + content


def riff(*chunks, name=b"RIFF", kind=b"WAVE"):
    return name + bytes(4) + kind + b"".join(chunks)


WAV = riff(chunk(b"fmt ", FMT), chunk(b"data", SAMPLES))


def test_pcm16_tells_where_the_samples_are():
    assert pcm16_header(WAV) == Pcm16Header(begin=44, declared_bytes=8, channels=2, rate=8000)


@pytest.mark.parametrize(
    "wav",
    [
        riff(chunk(b"fmt ", FMT), chunk(b"data", SAMPLES), kind=b"AVI "),
        riff(chunk(b"fmt ", FMT, size=15), chunk(b"data", SAMPLES)),
        riff(chunk(b"fmt ", FMT, size=17)),  # the file ends one byte too early
        riff(chunk(b"fmt ", FMT), chunk(b"data", SAMPLES, size=STREAM_BYTES)),
        riff(chunk(b"fmt ", NO_CHANNELS), chunk(b"data", SAMPLES)),
    ],
    ids=[*("AVI", "short format", "cut format", "endless", "no channels")],
)
def test_what_is_no_plain_wav(wav):
    assert pcm16_header(wav) is None


def test_a_format_chunk_that_ends_with_the_file_is_read_to_its_end():
    """Formats of 16 bytes and more are whole; what follows the first 16 does not matter."""
    assert pcm16_header(riff(chunk(b"fmt ", FMT + b"xy"), chunk(b"data", SAMPLES))).begin == 46
    biggest = chunk(b"data", SAMPLES, size=STREAM_BYTES - 1)
    assert pcm16_header(riff(chunk(b"fmt ", FMT), biggest)).declared_bytes == STREAM_BYTES - 1


def page(*lengths, body=None):
    """An OGG page of segments; its body may be cut."""
    content = bytes(sum(lengths)) if body is None else bytes(body)
    return b"OggS" + bytes(22) + bytes([len(lengths), *lengths]) + content


@pytest.mark.parametrize(
    ("ogg", "whole"),
    [
        (page(255, 3), True),
        (page(255, 3, body=257), False),
        (page(255, 3, body=0)[:-1], False),  # cut inside the table of segments
        (page()[:26], False),  # cut inside the header
        (b"", False),
    ],
)
def test_last_ogg_page(ogg, whole):
    assert last_ogg_page_is_whole(ogg) is whole


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
