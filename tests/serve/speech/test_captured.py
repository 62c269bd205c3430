"""Recordings of streams: they begin inside a frame, or change inside."""

import numpy as np
import pytest

from serve.contract.errors import AudioError
from tests.marks import nightly
from tests.serve.speech.sounds import RATE, SECONDS, decode, encode_ffmpeg, tones_of

ID3 = b"ID3\x04\0\0\0\0\x02\x05" + bytes(261)
STREAMS = {
    "mp3": lambda: encode_ffmpeg("mp3", "libmp3lame", 44_100),
    "mp3-large": lambda: encode_ffmpeg("mp3", "libmp3lame", 48_000, bit_rate=320_000),
    "mp2": lambda: encode_ffmpeg("mp2", "mp2", 48_000),
    "aac": lambda: encode_ffmpeg("adts", "aac", 48_000),
    "ac3": lambda: encode_ffmpeg("ac3", "ac3"),
}


def assert_is_tone(samples: np.ndarray, least_s: float) -> None:
    assert least_s < len(samples) / RATE < SECONDS + 0.2
    assert tones_of(samples, 1.2)[:2] == [300, 300]


@pytest.mark.parametrize("name", ["mp3", "aac", *nightly("mp3-large", "mp2", "ac3")])
def test_a_stream_from_inside_a_frame_on(name: str):
    for begin in (1, 777, 1500) if name == "mp3" else (777,):
        samples, warnings = decode(STREAMS[name]()[begin:])
        assert_is_tone(samples, SECONDS - 0.7)
        assert not warnings


def test_a_stream_from_inside_a_frame_on_behind_a_large_picture():
    size = 3 << 20
    tag = b"ID3\x04\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0))
    samples, warnings = decode(tag + bytes(size) + STREAMS["mp3"]()[777:])
    assert_is_tone(samples, SECONDS - 0.7)
    assert not warnings


def test_bytes_like_a_frame_alone_are_no_stream():
    random = np.random.default_rng(0).bytes(100_000)
    with pytest.raises(AudioError, match="an unknown format"):
        decode(b"\x00" + random.replace(b"\xff", b"\xfe") + b"\xff\xfb\x90\x64" + bytes(100))


@pytest.mark.parametrize("options", [{}, {"write_xing": "0"}])
def test_an_mp3_whose_rate_or_channels_change(options: dict[str, str]):
    parts = [
        encode_ffmpeg("mp3", "libmp3lame", *kind, hertz=hertz, **options)
        for hertz, kind in ((300, (44_100, "stereo")), (500, (22_050, "mono")))
    ]
    for between in (b"", ID3, b"TAG" + bytes(125)):
        samples, warnings = decode(between.join(parts))
        assert len(samples) / RATE == pytest.approx(2 * SECONDS, abs=0.3)
        assert tones_of(samples) == [300, 500]
        assert not warnings
