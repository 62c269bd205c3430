"""Headers with a wrong size of the sound: all of it is heard, and that is told."""

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest

from serve.contract.errors import AudioError
from tests.serve.speech.sounds import RATE, SECONDS, decode, encode, noisy

NOT_COMPLETED = r"the audio's header is incomplete: .* of audio, but the file has 3\.00 s"


def put(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    changed = bytearray(data)
    for at, layout, value in fields:
        struct.pack_into(layout, changed, at, value)
    return bytes(changed)


def wav(file: int, sound: int, subtype: str = "PCM_16") -> bytes:
    data = encode(noisy(), "WAV", subtype)
    return put(data, (4, "<I", file), (data.index(b"data") + 4, "<I", sound))


def assert_all_is_there(data: bytes, warns: bool = True) -> None:
    samples, warnings = decode(data)
    assert len(samples) == SECONDS * RATE
    assert np.abs(samples[-RATE:]).max() > 0.3
    assert len(warnings) == warns
    if warns:
        assert re.match(NOT_COMPLETED, warnings[0]), warnings[0]


SIZES = [
    (32_036, 32_000),  # written after the first second
    (36, 0),  # never written
    (2_000_000_036, 2_000_000_000),
    (36, 10_000_000),  # the sizes contradict each other
]


@pytest.mark.parametrize(
    ("file", "sound", "subtype"),
    [
        *((*sizes, "PCM_16") for sizes in SIZES),
        *((*SIZES[0], subtype) for subtype in ("PCM_24", "FLOAT", "ULAW")),
        *((36, 0, subtype) for subtype in ("PCM_24", "FLOAT", "ULAW")),
    ],
)
def test_a_wav_whose_size_was_not_completed(file: int, sound: int, subtype: str):
    assert_all_is_there(wav(file, sound, subtype))


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_a_streams_size_means_the_end(size: int, subtype: str):
    assert_all_is_there(wav(size, size, subtype), warns=False)
    assert_all_is_there(wav(0, 0, subtype), warns=False)


def test_the_files_size_proves_that_of_the_sound_wrong():
    whole = wav(0, 0)
    assert_all_is_there(wav(len(whole) - 8, 123_456_789))


@pytest.mark.parametrize(
    ("fmt", "factor"),
    [("WAV", 1.1), ("WAV", 10), ("AIFF", 1.5), ("W64", 2), ("CAF", 1.1), ("AU", 10)],
)
def test_a_plausible_size_is_that_of_a_file_cut_short(fmt: str, factor: float):
    data = encode(np.tile(noisy(), 4), fmt, "PCM_16")
    cut = data[: int(len(data) / factor)]
    with pytest.raises(AudioError, match="cut short"):
        decode(cut)
    samples, warnings = decode(cut, partial=True)
    assert len(samples) / RATE == pytest.approx(4 * SECONDS / factor, abs=0.3)
    assert warnings[0].startswith("audio is cut short")


@pytest.mark.parametrize(
    "behind",
    [
        b"LIST" + struct.pack("<I", 26) + b"INFOISFT\x0e\0\0\0Lavf58.76.100\0",
        b"id3 " + struct.pack("<I", 9999) + b"ID3\x04",  # cut itself
        b"abcd\x04\0\0\0abcdLIST\x04\0\0\0abcd",
        b"TAG" + bytes(125),
        bytes(4096),
        b"\x01\x02\x03",
    ],
    ids=["LIST", "cut", "two", "tag", "zeros", "few"],
)
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
def test_what_follows_the_sound_is_no_sound(behind: bytes, subtype: str):
    samples, warnings = decode(encode(noisy(), "WAV", subtype) + behind)
    assert len(samples) == SECONDS * RATE
    assert not warnings


def aiff(file: int, sound: int, frames: int) -> bytes:
    data = encode(noisy(), "AIFF", "PCM_16")
    at = data.index(b"SSND") + 4, data.index(b"COMM") + 10
    return put(data, (4, ">I", file), (at[0], ">I", sound), (at[1], ">I", frames))


def w64(file: int, sound: int) -> bytes:
    data = encode(noisy(), "W64", "PCM_16")
    return put(data, (16, "<Q", file), (data.index(b"data\xf3") + 16, "<Q", sound))


def rf64(file: int, sound: int) -> bytes:
    data = encode(noisy(), "RF64", "PCM_16")
    at = data.index(b"ds64") + 8
    return put(data, (at, "<Q", file), (at + 8, "<Q", sound))


def caf(sound: int) -> bytes:
    data = encode(noisy(), "CAF", "PCM_16")
    return put(data, (data.index(b"data") + 4, ">q", sound))


def au(sound: int) -> bytes:
    return put(encode(noisy(), "AU", "PCM_16"), (8, ">I", sound))


@pytest.mark.parametrize(
    "make",
    [
        lambda: aiff(32_046, 32_008, 16_000),
        lambda: w64(32_128, 32_024),
        lambda: rf64(8_000_000_100, 8_000_000_000),
        lambda: caf(0),
        lambda: caf((1 << 63) - 1),
        lambda: au(32_000),
    ],
)
def test_other_formats_whose_size_was_not_completed(make: Callable[[], bytes]):
    assert_all_is_there(make())


def test_other_formats_streams():
    endless = 0xFFFFFFFF
    for data in (aiff(endless, endless, endless), rf64(0, 0), caf(-1), au(endless)):
        assert_all_is_there(data, warns=False)
    assert_all_is_there(w64((1 << 64) - 1, (1 << 64) - 1), warns=False)


@pytest.mark.parametrize("size", [0, 32_000, 2_000_000_000, 0xFFFFFFFF])
def test_joined_files_that_were_not_completed(size: int):
    samples, warnings = decode(wav(36 + size & 0xFFFFFFFF, size) * 3)
    assert len(samples) == 3 * SECONDS * RATE
    assert len(warnings) == (0 if size == 0xFFFFFFFF else 3)
    assert all(f"part {at} of 3" in text for at, text in enumerate(warnings, 1))
