"""Headers with a wrong size of the sound: all of it is heard, and that is told.

Files that were joined, as recorders append them: all parts are heard, in order.
"""

import re
import struct

import numpy as np
import pytest

from serve.contract.errors import AudioError, AudioLimitError, CancelledError
from serve.speech import repair, sources
from serve.speech.meter import AudioLimits
from tests.marks import sample
from tests.serve.speech.sounds import (
    RATE,
    SECONDS,
    decode,
    encode,
    encode_variant,
    noisy,
    tone,
    tones_of,
)

NOT_COMPLETED = r"the audio's header is incomplete: .* of audio, but the file has 3\.00 s"


def put(data: bytes, *fields: tuple[int, str, int]) -> bytes:
    changed = bytearray(data)
    for at, layout, value in fields:
        struct.pack_into(layout, changed, at, value)
    return bytes(changed)


def declaring_wav(file: int, sound: int, subtype: str = "PCM_16") -> bytes:
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
    assert_all_is_there(declaring_wav(file, sound, subtype))


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_a_streams_size_means_the_end(size: int, subtype: str):
    assert_all_is_there(declaring_wav(size, size, subtype), warns=False)
    assert_all_is_there(declaring_wav(0, 0, subtype), warns=False)


def test_the_files_size_proves_that_of_the_sound_wrong():
    whole = declaring_wav(0, 0)
    assert_all_is_there(declaring_wav(len(whole) - 8, 123_456_789))


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


def rf64(file: int, sound: int) -> bytes:
    data = encode(noisy(), "RF64", "PCM_16")
    at = data.index(b"ds64") + 8
    return put(data, (at, "<Q", file), (at + 8, "<Q", sound))


def test_rf64_whose_size_was_not_completed_and_its_streams():
    assert_all_is_there(rf64(8_000_000_100, 8_000_000_000))
    assert_all_is_there(rf64(0, 0), warns=False)


@pytest.mark.parametrize(("fmt", "mark", "layout"), [("CAF", b"data", ">q"), ("AU", b".snd", ">i")])
def test_other_formats_streams(fmt: str, mark: bytes, layout: str):
    data = encode(noisy(), fmt, "PCM_16")
    size_at = data.index(mark) + (4 if fmt == "CAF" else 8)
    assert_all_is_there(put(data, (size_at, layout, -1)), warns=False)


@pytest.mark.parametrize("size", [0, 32_000, 2_000_000_000, 0xFFFFFFFF])
def test_joined_files_that_were_not_completed(size: int):
    samples, warnings = decode(declaring_wav(36 + size & 0xFFFFFFFF, size) * 3)
    assert len(samples) == 3 * SECONDS * RATE
    assert len(warnings) == (0 if size == 0xFFFFFFFF else 3)
    assert all(f"part {at} of 3" in text for at, text in enumerate(warnings, 1))


LIMITS = AudioLimits(60.0)


def wav(hertz: int = 300, rate: int = RATE, channels: int = 1, subtype: str = "PCM_16") -> bytes:
    return encode_part("WAV", subtype, hertz, rate, channels)


def encode_part(fmt: str, subtype: str | None, hertz: int, rate: int, channels: int) -> bytes:
    samples = np.repeat(tone(rate, hertz=hertz)[:, None], channels, axis=1)
    return encode(samples, fmt, subtype, rate)


APPENDED = """
WAV-PCM_16 WAV-FLOAT WAVEX-PCM_24 RF64-PCM_16 FLAC-PCM_16 OGG-VORBIS OGG-OPUS MP3-MPEG_LAYER_III
""".split()


@pytest.mark.parametrize("name", sample(APPENDED, 3))
def test_parts_of_other_rates_and_channels_are_heard_in_order(name: str):
    rates = [(300, 8_000, 1), (500, 48_000, 2), (700, 16_000, 1)]
    samples, warnings = decode(b"".join(encode_part(*name.split("-"), *part) for part in rates))
    assert len(samples) / RATE == pytest.approx(3 * SECONDS, abs=0.5)
    assert tones_of(samples) == [300, 500, 700]
    assert not warnings


APPENDED_BY_FFMPEG = """
mp4-aac mp4-aac-fragments mov-pcm_s16le webm-libopus webm-libopus-live adts-aac ac3-ac3
mpegts-aac mp3-libmp3lame mp3-libmp3lame-endless
""".split()


@pytest.mark.parametrize("name", sample(APPENDED_BY_FFMPEG, 5))
def test_parts_of_ffmpegs_formats_are_heard_in_order(name: str):
    rates = [(48_000, "mono"), (48_000, "stereo")]
    if "libopus" not in name:
        rates = [(44_100, "mono"), (48_000, "stereo")]
    parts = [
        encode_variant(name, rate, layout, hertz)
        for hertz, (rate, layout) in zip((300, 500), rates, strict=True)
    ]
    samples, warnings = decode(b"".join(parts))
    assert len(samples) / RATE == pytest.approx(2 * SECONDS, abs=0.2)
    assert tones_of(samples) == [300, 500]
    assert all(name == "mpegts-aac" and "clock jumps back" in text for text in warnings)


@pytest.mark.parametrize("between", [b"", bytes(2048), b"LIST\x04\0\0\0abcd", b"TAG" + bytes(125)])
def test_what_lies_between_parts_is_passed_over(between: bytes):
    samples, warnings = decode(between.join([wav(300), wav(500), wav(700)]))
    assert len(samples) == 3 * SECONDS * RATE
    assert tones_of(samples) == [300, 500, 700]
    assert not warnings


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
def test_a_wav_with_several_chunks_of_sound(subtype: str):
    first, second = wav(300, subtype=subtype), wav(500, subtype=subtype)
    behind = second[second.index(b"data") :]
    note = b"LIST\x04\0\0\0abcd"
    samples, warnings = decode(first + note + behind + note)
    assert tones_of(samples) == [300, 500]
    assert len(samples) == 2 * SECONDS * RATE
    assert not warnings
    with pytest.raises(AudioError, match=r"cut short.*part 2 of 2"):
        decode(first + behind[:-20_000])
    samples, warnings = decode(first + b"data" + bytes(4) + behind[8:])
    assert len(samples) == 2 * SECONDS * RATE
    assert "header is incomplete" in warnings[0]


def test_parts_without_samples_are_none():
    empty = encode(tone()[:0], "WAV", "PCM_16")
    assert tones_of(decode(empty + wav(500) + empty)[0]) == [500]
    with pytest.raises(AudioError, match="no samples"):
        decode(empty * 3)


@pytest.mark.parametrize("make", [wav, lambda hertz: encode(tone(hertz=hertz), "FLAC")])
@pytest.mark.parametrize("number", [1, 2])
def test_a_part_that_is_cut_short(make, number: int):
    parts = [make(300), make(500)]
    parts[number - 1] = parts[number - 1][: len(parts[number - 1]) * 5 // 6]
    with pytest.raises(AudioError, match=rf"cut short.*part {number} of 2.*; send the whole file"):
        decode(b"".join(parts))
    samples, warnings = decode(b"".join(parts), partial=True)
    assert 5.0 < len(samples) / RATE < 5.8
    assert tones_of(samples)[0] == 300
    assert tones_of(samples[::-1])[0] == 500
    assert f"part {number} of 2" in warnings[0]


def test_a_part_that_cannot_be_read():
    broken = bytearray(wav(500, subtype="PCM_24"))
    broken[20:22] = struct.pack("<H", 0x1234)  # an unknown coding
    with pytest.raises(AudioError, match=r"cannot be read|not supported"):
        decode(wav(300) + broken)
    samples, warnings = decode(wav(300) + broken + wav(700), partial=True)
    assert tones_of(samples) == [300, 700]
    assert "part 2 of 3" in warnings[0]


def test_limits_are_of_all_parts():
    data = wav() * 3
    assert len(decode(data, 9.0, max_values=9.0 * RATE)[0]) == 9.0 * RATE
    with pytest.raises(AudioLimitError, match=r"lasts 9\.0 s; expected at most 8 s"):
        decode(data, 8.0)
    with pytest.raises(AudioLimitError, match="million samples"):
        decode(data, 60.0, max_values=8.0 * RATE)
    mixed = wav(rate=8_000) + wav(rate=48_000)
    with pytest.raises(AudioLimitError, match="expected at most 5 s"):
        decode(mixed, 5.0)


def test_channels_one_by_one_must_be_the_same_in_all_parts():
    stereo = wav(channels=2)
    for channel in (0, 1):
        assert len(decode(stereo * 2, 60.0, channel=channel)[0]) == 2 * SECONDS * RATE
    three = wav(channels=3)
    with pytest.raises(AudioError, match=r"from 2 to 3 channels after 3\.00 s.*channels = mix"):
        decode(stereo + three, 60.0, channel=1)


def test_more_parts_than_files_have_are_refused():
    part = encode(tone(seconds=0.001), "WAV", "PCM_16")
    with pytest.raises(AudioError, match="joined from more than 1000 files"):
        decode(part * (repair.MAX_PARTS + 1))
    assert len(decode(part * 100)[0]) == 100 * 16


def test_the_search_for_parts_ends_when_nobody_wants_them():
    stopped = iter([False, True])
    with pytest.raises(CancelledError):
        list(sources.decode(wav() + bytes(3 << 20), LIMITS, lambda: next(stopped, True)))


@pytest.mark.parametrize("fmt", ["FLAC", "WAV"])
def test_the_search_takes_time_in_proportion_to_the_file(fmt: str):
    """A file is read once, whatever it is full of."""

    class Counting(bytes):
        read = 0

        def __getitem__(self, place):
            part = super().__getitem__(place)
            Counting.read += len(part)
            return part

    begin = encode(tone(), fmt, "PCM_16")[:12]
    data = Counting(begin + begin * 200 + b"RIFF" * (1 << 18))
    parts = repair.split(data, lambda: None)
    assert len(parts) >= 1
    assert Counting.read < 3 * len(data) + 300 * (1 << 20)
