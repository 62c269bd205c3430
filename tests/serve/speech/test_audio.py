"""Audio decoding: formats, rates, channels, and everything that must be refused."""

import io
import re
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import soundfile
import soxr

from serve.contract.errors import AudioError, CancelledError, CutShortError
from serve.speech import audio, ffmpeg, sources
from serve.speech.meter import AudioLimits, DecodeBudget, MeteredFile
from tests.marks import sample
from tests.serve.speech.sounds import (
    FFMPEG,
    PHONES,
    RATE,
    SECONDS,
    SNDFILE,
    Sound,
    encode,
    encode_ffmpeg,
    noisy,
    recording,
    tone,
    tracks,
    wide_amr,
)
from tests.serve.speech.sounds import decode as decode_and_warn

LIMIT_S = 60.0


def decode(data: bytes, max_s: float) -> np.ndarray:
    """All of a file."""
    return decode_and_warn(data, max_s)[0]


def from_samples(samples: np.ndarray, rate: int, max_s: float) -> np.ndarray:
    return audio.join_blocks(audio.from_samples(samples, rate, AudioLimits(max_s)))


def assert_is_tone(samples: np.ndarray, slack_s: float = 0.0) -> None:
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=slack_s + 1 / RATE)
    assert np.abs(samples).max() <= 1.0
    middle = samples[RATE : 2 * RATE]
    assert np.argmax(np.abs(np.fft.rfft(middle))) == 300
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize(
    "name", [name for name in SNDFILE if name not in ("HTK-PCM_16", "WVE-ALAW")]
)
def test_formats_of_libsndfile(name: str):
    padded = name.endswith(("ADPCM", "OPUS"))
    assert_is_tone(decode(recording(name), LIMIT_S), slack_s=0.06 if padded else 0.0)


@pytest.mark.parametrize("name", FFMPEG)
def test_formats_of_ffmpeg(name: str):
    assert_is_tone(decode(recording(name), LIMIT_S), slack_s=0.1)


@pytest.mark.parametrize("name", PHONES)
def test_what_phones_record(name: str):
    assert_is_tone(decode(recording(name), LIMIT_S), slack_s=0.1)


def test_wide_band_amr():
    samples = decode(wide_amr(), LIMIT_S)
    assert len(samples) == SECONDS * RATE
    assert np.abs(samples).max() > 0.01


def test_films_are_heard_and_not_looked_at():
    """A decoder of pictures is code that a hostile file could aim at."""
    film = tracks("matroska", Sound(tone(24_000)), picture_s=SECONDS)
    assert_is_tone(decode(film, LIMIT_S), slack_s=0.1)
    assert not {"mpeg4", "h264", "vp8", "mjpeg", "png"} & {*ffmpeg._DECODERS, *ffmpeg._PCM_DECODERS}
    assert not {"hls", "concat", "dash", "image2", "lavfi", "rawvideo"} & set(ffmpeg.DEMUXERS)


@pytest.mark.nightly
def test_a_broadcast_whose_streams_change_is_refused_by_name():
    """PyAV knows only the streams that were there when it was opened: its own IndexError."""
    first = encode_ffmpeg("mpegts", "aac")
    later = encode_ffmpeg("mpegts", "aac", mpegts_start_pid="0x300", mpegts_pmt_start_pid="0x1100")
    with pytest.raises(AudioError, match=r"cut short or damaged: .* can be decoded") as refused:
        list(sources.decode(first * 20 + later, AudioLimits(600.0)))
    assert isinstance(refused.value.__cause__, IndexError)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_16_bit_wav_is_what_libsndfile_reads(channels: int):
    """It is read without libsndfile; between other chunks, in several blocks."""
    noise = np.random.default_rng(0).uniform(-1, 1, (audio.BLOCK_VALUES, channels))
    data = encode(noise.astype(np.float32), "WAV", "PCM_16")
    odd = b"LIST" + struct.pack("<I", 5) + b"INFOx\0"
    data = data[:12] + odd + data[12:36] + odd + data[36:] + odd
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert isinstance(sources.open_source(data, DecodeBudget(AudioLimits(LIMIT_S))), audio.Pcm16)
    np.testing.assert_array_equal(decode(data, LIMIT_S), expected.mean(axis=1))


@pytest.mark.parametrize("fmt", ["WAV", "RF64"])
def test_many_channels(fmt: str):
    """RF64 goes through PyAV, which once read beyond its 8 channel pointers and crashed."""
    many = np.repeat(tone()[:, None], 49, axis=1)
    assert_is_tone(decode(encode(many, fmt), LIMIT_S))


@pytest.mark.parametrize("fmt", ["WAV", "FLAC", "OGG", "MP3"])
def test_blocks_hold_what_the_whole_file_holds(fmt: str):
    """Reading an MP3 by blocks once went wrong at each block, since the reader seeks in between.

    The tone makes frames of different sizes that borrow bits from each other; noise would not.
    """
    data = encode(tone(seconds=10), fmt)
    whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_allclose(decode(data, LIMIT_S), whole, atol=1e-6)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_blocks_leave_no_seams(rate: int):
    """Resampling block by block equals resampling the whole at once."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * rate).astype(np.float32)
    whole = soxr.resample(samples, rate, RATE, quality="HQ")
    blocks = from_samples(samples, rate, LIMIT_S)
    np.testing.assert_allclose(blocks, whole, atol=1e-5)


def test_overshoot_is_clipped():
    samples = from_samples(tone() * 2.5, RATE, LIMIT_S)
    assert samples.max() == 1.0
    assert samples.min() == -1.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (b"a", "audio is text, not a recording; expected a recording: WAV, FLAC"),
        (bytes(10_000), "audio of 10000 bytes has an unknown format .* rate=16000"),
        (b"#EXTM3U\n#EXTINF:5,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "audio is text, not"),
        (b"OggS" + bytes(100), "audio begins as an OGG file, but cannot be read: it is damaged"),
    ],
)
def test_not_audio(data: bytes, message: str):
    with pytest.raises(AudioError, match=message) as refused:
        decode(data, LIMIT_S)
    assert not re.search(r"\b[0-9a-f]{2}( [0-9a-f]{2})+\b", str(refused.value)), "hex bytes"


def test_sound_of_an_unknown_kind_is_named():
    with pytest.raises(AudioError, match="audio's codec is g726le, which is not supported"):
        decode(encode_ffmpeg("au", "g726le", 8_000, "mono", 32_000), LIMIT_S)


PARTIAL = """
WAV-PCM_16 WAV-FLOAT WAV-IMA_ADPCM AIFF-PCM_16 FLAC-PCM_16 OGG-VORBIS OGG-OPUS
MP3-MPEG_LAYER_III NIST-PCM_16 CAF-PCM_16 W64-PCM_16 RF64-PCM_16 AU-PCM_16 mp4-aac-fragments
webm-libopus webm-libopus-live adts-aac avi-libmp3lame asf-wmav2 flv-aac amr
""".split()


@pytest.mark.parametrize("name", sample(PARTIAL, 4))
def test_a_cut_file_is_refused_or_taken_with_a_warning_whatever_its_format(name: str):
    whole = recording(name)
    if name == "OGG-VORBIS":
        whole = encode(noisy(), "OGG")  # of several pages
    cut = whole[: int(0.7 * len(whole)) + 1]
    with pytest.raises(CutShortError, match=r"cut short.*; send the whole file, or set partial"):
        decode(cut, LIMIT_S)
    samples, warnings = decode_and_warn(cut, partial=True)
    assert 0.6 < len(samples) / RATE < 2.3
    assert np.argmax(np.abs(np.fft.rfft(samples[: RATE // 2]))) == 150
    assert warnings and warnings[-1].startswith("audio is cut short")
    assert "send" not in warnings[-1]
    samples, warnings = decode_and_warn(whole, partial=True)
    assert len(samples) > 2.9 * RATE and not warnings


def test_an_aiff_file_that_goes_on_after_its_declared_samples_is_taken_with_a_warning():
    whole = encode(np.full(2 * RATE, 0.25, np.float32), "AIFF", "PCM_16")
    half = bytearray(whole)
    for chunk, offset, number in ((b"COMM", 10, RATE), (b"SSND", 4, 8 + 2 * RATE)):
        begin = whole.index(chunk) + offset
        half[begin : begin + 4] = struct.pack(">I", number)
    samples, (warning,) = decode_and_warn(bytes(half))
    assert len(samples) == RATE
    assert warning.startswith("the file goes on after the samples")
    assert decode_and_warn(whole)[1] == []


def test_nothing_is_nothing_in_part_either():
    """An MP4 with its index at the end."""
    data = encode_ffmpeg("mp4", "aac")
    with pytest.raises(AudioError, match="begins as an MP4, M4A or 3GP file, but cannot be read"):
        list(audio.decode(data[: len(data) // 2], AudioLimits(LIMIT_S, partial=True)))


def without_length(flac: bytes) -> bytes:
    data = bytearray(flac)
    data[21] &= 0xF0  # the 36 bits of the number of samples
    data[22:26] = bytes(4)
    return bytes(data)


def test_streamed_flac_without_a_length():
    data = without_length(encode(tone(), "FLAC"))
    assert_is_tone(decode(data, LIMIT_S))
    with pytest.raises(AudioError, match="at most 2 s"):
        decode(data, 2.0)


def test_no_samples():
    empty = [encode(tone()[:0], fmt) for fmt in ("WAV", "AIFF", "OGG")]
    for data in (*empty, empty[0] + b"LIST\x04\0\0\0abcd"):  # metadata is not sound
        with pytest.raises(AudioError, match="no samples"):
            decode(data, LIMIT_S)
    with pytest.raises(AudioError, match="no samples"):
        from_samples(tone()[:0], RATE, LIMIT_S)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "NaN or infinite") for value in (np.nan, np.inf, -np.inf)),
        (16384.0, "divide 16-bit samples"),
    ],
)
def test_values_that_no_sample_has(value: float, message: str):
    samples = tone()
    samples[2 * RATE] = value
    with pytest.raises(AudioError, match=message):
        decode(encode(samples, "WAV", "FLOAT"), LIMIT_S)
    with pytest.raises(AudioError, match=message):
        from_samples(samples, RATE, LIMIT_S)


@pytest.mark.parametrize("rate", [-16_000, 0, 999, 384_001])
def test_absurd_rates(rate: int):
    if rate > 0:
        with pytest.raises(AudioError, match=f"a rate of {rate} Hz"):
            decode(encode(tone()[:2000], "WAV", None, rate), LIMIT_S)
    with pytest.raises(AudioError, match=f"a rate of {rate} Hz"):
        from_samples(tone()[:2000], rate, LIMIT_S)


def test_samples_are_copied():
    given = tone()
    result = from_samples(given, RATE, LIMIT_S)
    given[:] = 0
    assert_is_tone(result)


def test_wrong_type_or_shape():
    for samples in (tone().astype(np.float64), tone()[None], tone().tolist(), np.float32(0.5)):
        with pytest.raises(AudioError, match="expected float32 of shape"):
            from_samples(samples, RATE, LIMIT_S)


@pytest.mark.parametrize("fmt", ["WAV", "FLAC", "OGG", "MP3"])
def test_too_long(fmt: str):
    data = encode(tone(), fmt)
    assert len(decode(data, SECONDS)) == SECONDS * RATE
    with pytest.raises(AudioError, match=r"3\.0 s; expected at most 2\.9 s"):
        decode(data, 2.9)
    with pytest.raises(AudioError, match=r"3\.0 s; expected at most 2\.9 s"):
        from_samples(tone(), RATE, 2.9)


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_does_not_exhaust_memory(declared: bool):
    """An hour of silence in a small FLAC is refused without being unpacked."""
    data = encode(np.zeros(330 * RATE, np.int16), "FLAC")
    assert len(data) < 1_000_000
    data = data if declared else without_length(data)
    tracemalloc.start()
    with pytest.raises(AudioError, match="expected at most 20 s"):
        list(sources.decode(data, AudioLimits(20.0)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20 * RATE * 4 + len(data) + 4_000_000


# --- as a stream


def first_block(data: bytes) -> np.ndarray:
    return next(audio.decode(data, AudioLimits(LIMIT_S)))


@pytest.mark.parametrize("name", ["WAV-PCM_16", "FLAC-PCM_16", "mp4-aac"])
def test_closing_the_blocks_frees_the_decoder(monkeypatch: pytest.MonkeyPatch, name: str):
    data, closed = recording(name), []
    kind = type(sources.open_source(data, DecodeBudget(AudioLimits(LIMIT_S))))
    honest = kind.close
    monkeypatch.setattr(kind, "close", lambda self: closed.append(1) or honest(self))
    blocks = sources.decode(data, AudioLimits(LIMIT_S))
    next(blocks)
    assert closed == []
    blocks.close()
    assert closed == [1]
    list(sources.decode(data, AudioLimits(LIMIT_S)))
    assert closed == [1, 1], "and so does the end"


@pytest.mark.parametrize(("fmt", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("AIFF", None)])
def test_what_the_header_tells_is_refused_before_the_first_block(fmt: str, subtype: str | None):
    data = encode(tone(seconds=30), fmt, subtype)
    with pytest.raises(AudioError, match=r"cut short or damaged: 2\d\.\d+ s of the 30\.00 s"):
        first_block(data[: int(len(data) * 0.9)])


@pytest.mark.parametrize("fmt", ["FLAC", "MP3"])
def test_what_only_decoding_tells_comes_after_good_blocks(fmt: str):
    data = encode(tone(seconds=30), fmt)
    blocks = audio.decode(data[: int(len(data) * 0.9)], AudioLimits(LIMIT_S))
    assert len(next(blocks))
    with pytest.raises(AudioError, match=r"of the 30\.00 s it declares"):
        list(blocks)


def test_samples_of_a_bad_value_come_after_good_blocks():
    samples = tone(seconds=20)
    samples[-1] = np.nan
    blocks = audio.from_samples(samples, RATE, AudioLimits(LIMIT_S))
    assert len(next(blocks))
    with pytest.raises(AudioError, match="NaN or infinite"):
        list(blocks)


# --- what it may cost


def test_more_values_than_allowed_are_refused_by_the_header():
    eight = np.repeat(tone()[:, None], 8, axis=1)
    for data in (encode(eight, "WAV", "PCM_16"), encode(eight, "FLAC"), encode(eight, "RF64")):
        assert len(decode_and_warn(data, max_values=eight.size)[0])
        with pytest.raises(AudioError, match=r"expected at most 0\.3 million"):
            next(audio.decode(data, AudioLimits(LIMIT_S, max_values=3e5)))
    with pytest.raises(AudioError, match="million samples"):
        next(audio.from_samples(tone(), RATE, AudioLimits(LIMIT_S, max_values=tone().size - 1)))


def test_more_values_than_allowed_are_refused_while_decoding():
    data = without_length(encode(np.repeat(tone(seconds=20)[:, None], 2, axis=1), "FLAC"))
    blocks = audio.decode(data, AudioLimits(LIMIT_S, max_values=3e5))
    assert len(next(blocks))
    with pytest.raises(AudioError, match=r"0\.3 million samples .* at most 0\.3 million"):
        list(blocks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processor time, in a list that tests may change; each look at it takes a millisecond."""
    now = [0.0]

    def thread_time() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("serve.speech.meter.time.thread_time", thread_time)
    return now


@pytest.mark.parametrize("name", ["WAV-PCM_16", "FLAC-PCM_16", "MP3-MPEG_LAYER_III", "mp4-aac"])
def test_decoding_that_takes_too_long_ends(clock: list[float], name: str):
    data = recording(name, 50.0)
    assert len(audio.join_blocks(sources.decode(data, AudioLimits(LIMIT_S, max_cpu_s=10.0))))
    with pytest.raises(AudioError, match=r"than the 0\.01 s allowed"):
        list(sources.decode(data, AudioLimits(LIMIT_S, max_cpu_s=0.01)))


def test_time_between_the_blocks_is_not_decodings(clock: list[float]):
    for _ in audio.from_samples(tone(seconds=50), RATE, AudioLimits(LIMIT_S, max_cpu_s=1.0)):
        clock[0] += 5.0


@pytest.mark.parametrize("fmt", ["WAV", "FLAC"])
def test_decoding_that_nobody_wants_ends_at_the_next_block(fmt: str):
    stopped = threading.Event()
    data = encode(tone(seconds=50), fmt, "PCM_16")
    blocks = audio.decode(data, AudioLimits(LIMIT_S), stopped.is_set)
    assert len(next(blocks))
    stopped.set()
    with pytest.raises(CancelledError):
        next(blocks)


def test_headers_that_never_end():
    endless = (b"junk" + bytes(4)) * 30_000
    with pytest.raises(AudioError, match="more than 1000 chunks"):
        first_block(encode(tone(), "WAV")[:12] + endless)
    # Other headers are read by libraries, which have so many reads.
    with pytest.raises(AudioError, match="after 4000 reads"):
        first_block(encode(tone(seconds=0.1), "WAV", "FLOAT") + endless)


@pytest.mark.parametrize(("offset", "whence"), [(-1, 0), (-(2**63), 0), (2**63, 0), (2**63 - 1, 1)])
def test_a_file_asked_for_a_place_that_is_none_stays_where_it_is(offset: int, whence: int):
    """An error would be printed with its traceback by the library's callback, each time."""
    file = MeteredFile(bytes(10), DecodeBudget(AudioLimits(1.0)))
    assert file.seek(3) == 3
    assert file.seek(offset, whence) == file.tell() == 3
