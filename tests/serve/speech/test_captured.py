"""Recordings of streams: they begin inside a frame, with an HTTP header, or change inside."""

import numpy as np
import pytest

from serve.contract.errors import AudioError
from tests.marks import nightly
from tests.serve.speech.sounds import RATE, SECONDS, decode, encode_ffmpeg, recording, tones_of

HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nicy-name: Radio\r\n\r\n"
ICY = b"ICY 200 OK\r\nicy-notice1: <BR>hello<BR>\r\nicy-br: 64\r\n\r\n"
REDIRECTED = b"HTTP/1.0 302 Found\r\nLocation: /live\r\n\r\n" + HTTP
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


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("mp3", b""), ("aac", b""), ("mp3", ICY)),
        *nightly(*((name, b"") for name in ("mp3-large", "mp2", "ac3"))),
        *nightly(*(("mp3", head) for head in (HTTP, REDIRECTED, ID3))),
    ],
)
def test_a_stream_from_inside_a_frame_on(name: str, head: bytes):
    for begin in (1, 777, 1500) if name == "mp3" and not head else (777,):
        samples, warnings = decode(head + STREAMS[name]()[begin:])
        assert_is_tone(samples, SECONDS - 0.7)
        for text in warnings:
            assert text.startswith("audio's first ")
            assert "are not a whole" in text


@pytest.mark.parametrize(
    "name", ["mp3-libmp3lame", *nightly("WAV-PCM_16", "FLAC-PCM_16", "OGG-VORBIS", "adts-aac")]
)
def test_a_header_of_http_before_a_file(name: str):
    data = recording(name)
    for head in (HTTP, ICY, REDIRECTED):
        samples, warnings = decode(head + data)
        np.testing.assert_array_equal(samples, decode(data)[0])
        assert not warnings


def with_titles(data: bytes, every: int) -> bytes:
    """A stream with a title now and then, as for a player that asked for them."""
    stream = b"ICY 200 OK\r\ncontent-type: audio/mpeg\r\nicy-metaint:%d\r\n\r\n" % every
    for number, at in enumerate(range(0, len(data), every)):
        title = b"StreamTitle='A song';".ljust(32, b"\0") if number % 2 == 0 else b""
        stream += data[at : at + every] + bytes([len(title) // 16]) + title
    return stream


@pytest.mark.parametrize("name", ["mp3", "aac"])
def test_titles_in_a_stream_are_left_out(name: str):
    data = STREAMS[name]()
    np.testing.assert_array_equal(decode(with_titles(data, 4096))[0], decode(data)[0])


def test_an_answer_that_is_no_audio_is_none():
    page = b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\n\r\n<html>Not found</html>"
    with pytest.raises(AudioError, match="audio is text, not a recording"):
        decode(page)
    with pytest.raises(AudioError, match="audio is text, not a recording"):
        decode(b"HTTP/1.1 200 OK\r\n" * 10_000)


def test_bytes_like_a_frame_alone_are_no_stream():
    random = np.random.default_rng(0).bytes(100_000)
    with pytest.raises(AudioError, match="an unknown format"):
        decode(b"\x00" + random.replace(b"\xff", b"\xfe") + b"\xff\xfb\x90\x64" + bytes(100))


def test_a_stream_beyond_the_first_bytes_is_not_looked_for():
    with pytest.raises(AudioError, match="an unknown format"):
        decode(bytes(200_000) + STREAMS["mp3"]())


@pytest.mark.parametrize("options", [{}, *nightly({"write_xing": "0"})])
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
