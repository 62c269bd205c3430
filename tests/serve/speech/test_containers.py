"""What headers declare, on files of a few bytes."""

import struct

import pytest

from serve.speech.containers import STREAM_BYTES, Pcm16Header, last_ogg_page_is_whole, pcm16_header

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
