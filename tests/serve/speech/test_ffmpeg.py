"""Times are those of a file's clock: late sound, clocks that begin anywhere, gaps, jumps.

Which of a file's audio tracks is transcribed.
"""

import io

import av
import numpy as np
import pytest

from serve.contract.errors import AudioError, OptionError
from serve.speech.ffmpeg import FileClock
from tests.marks import sample
from tests.serve.speech.sounds import RATE, Sound, decode, encode, tone, tracks

S = 4.0
TONE = tone(24_000, S)
CLOCKED = [
    ("matroska", "aac", {}),
    ("webm", "libopus", {}),
    ("mp4", "aac", {}),
    ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov"}),
    ("mov", "pcm_s16le", {}),
    ("mpegts", "aac", {}),
    ("flv", "aac", {}),
]


def begin_s(samples: np.ndarray) -> float:
    return float(np.flatnonzero(np.abs(samples) > 0.1)[0] / RATE)


def silence(samples: np.ndarray) -> tuple[float, float]:
    """The longest stretch without sound: where it begins, and how long it lasts, in seconds."""
    edges = np.flatnonzero(np.abs(samples) > 0.1)
    longest = int(np.diff(edges).argmax())
    return edges[longest] / RATE, np.diff(edges)[longest] / RATE


@pytest.mark.parametrize(
    ("fmt", "late_s"),
    [("matroska", 0.5), ("mp4", 4.9), ("mov", 12.0), ("mpegts", 4.9), ("flv", 0.5)],
)
def test_sound_after_the_picture(fmt: str, late_s: float):
    data = tracks(fmt, Sound(TONE, begins_s=late_s), picture_s=late_s + S)
    samples, (told,) = decode(data)
    assert begin_s(samples) == pytest.approx(late_s, abs=0.1)
    assert len(samples) / RATE == pytest.approx(late_s + S, abs=0.1)
    assert "the file" in told


@pytest.mark.parametrize(("fmt", "codec", "options"), sample(CLOCKED, 5))
def test_a_clock_that_begins_anywhere(fmt: str, codec: str, options: dict[str, str]):
    rate = 48_000 if codec == "libopus" else 24_000
    sound = Sound(tone(rate, S), rate, codec=codec, begins_s=10_800.0)
    samples, told = decode(tracks(fmt, sound, options=options))
    assert told == []
    assert begin_s(samples) < 0.1
    assert len(samples) / RATE == pytest.approx(S, abs=0.1)


@pytest.mark.parametrize(
    ("fmt", "codec", "options", "gap_s"),
    [
        *sample([(*kind, 2.0) for kind in CLOCKED if kind[0] != "mov"], 5),
        *((*CLOCKED[0], 0.4), (*CLOCKED[0], 60.0)),
    ],
)
def test_gaps_are_filled(fmt: str, codec: str, options: dict[str, str], gap_s: float):
    rate = 48_000 if codec == "libopus" else 24_000
    sound = Sound(tone(rate, S), rate, codec=codec, gap=(1.5, gap_s))
    samples, (told,) = decode(tracks(fmt, sound, options=options))
    at, length = silence(samples)
    assert at == pytest.approx(1.5, abs=0.15)
    assert length == pytest.approx(gap_s, abs=0.1)
    assert len(samples) / RATE == pytest.approx(S + gap_s, abs=0.15)
    assert "have 1 gap without audio" in told


@pytest.mark.parametrize(
    ("fmt", "codec", "gap_s", "max_s"),
    [
        ("webm", "libopus", 7_200.0, 3_600.0),
        ("mpegts", "aac", 7_200.0, 3_600.0),
        ("mpegts", "aac", 60.0, 50.0),
    ],
)
def test_gaps_that_are_too_long_are_told_and_not_filled(fmt, codec, gap_s, max_s):
    sound = Sound(tone(48_000, S), 48_000, codec=codec, gap=(1.5, gap_s))
    samples, (told,) = decode(tracks(fmt, sound), max_s)
    assert len(samples) / RATE == pytest.approx(S, abs=0.15)
    assert "jump ahead" in told


def test_small_errors_of_packets_times_insert_nothing():
    clock, random = FileClock(5.0, 1e6), np.random.default_rng(0)
    for number in range(1_000):
        jitter_s = random.uniform(-0.1, 0.1)
        assert clock.silence_before(5.0 + number / 50 + jitter_s, 1 / 50) == 0.0
    assert clock.warnings() == []


def test_many_small_gaps_add_up():
    clock = FileClock(0.0, 1e6)
    filled = sum(clock.silence_before(number * 0.022, 0.02) for number in range(10_000))
    assert filled == pytest.approx(20.0, abs=0.5)


def test_frames_without_a_time_follow_those_before():
    clock = FileClock(0.0, 1e6)
    times = [0.0, None, None, 0.6, 2.0]
    assert sum(clock.silence_before(time, 0.2) for time in times) == pytest.approx(1.2)


def test_a_cut_file_whose_clock_begins_late_is_still_cut():
    data = tracks("matroska", Sound(tone(24_000, 20.0), begins_s=3.0))
    with pytest.raises(AudioError, match="cut short"):
        decode(data[: len(data) // 2])
    samples, told = decode(data[: len(data) // 2], partial=True)
    assert 5.0 < len(samples) / RATE < 15.0
    assert any("cut short" in text for text in told)


def test_samples_are_those_that_ffmpeg_decodes():
    data = tracks("mp4", Sound(tone(RATE, S), RATE), picture_s=S)
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
    np.testing.assert_array_equal(decode(data)[0], np.clip(np.concatenate(frames), -1, 1))


LEVELS = (0.1, 0.2, 0.4)


def taken(data: bytes, track: str = "") -> tuple[float, list[str]]:
    """How loud the track is that is taken, and what is told."""
    samples, told = decode(data, track=track)
    return float(np.abs(samples[RATE // 2 : RATE]).max()), told


def film(fmt: str, default: int | None):
    """Three tracks of their own levels and languages."""
    sounds = [
        Sound(2 * level * tone(24_000, 2.0), language=language)
        for level, language in zip(LEVELS, ("eng", "spa", "fra"), strict=True)
    ]
    for place, sound in enumerate(sounds):
        sound.default = None if default is None else place == default
    return tracks(fmt, *sounds, picture_s=2.0)


@pytest.mark.parametrize(("fmt", "default"), [("matroska", 0), ("mp4", 1), ("mov", 2)])
def test_the_default_track_is_taken(fmt: str, default: int):
    level, (told,) = taken(film(fmt, default))
    assert level == pytest.approx(LEVELS[default], rel=0.1)
    assert f"3 audio tracks; track {default + 1} (" in told
    for name in ("eng", "spa", "fra", "audio_track"):
        assert name in told


def test_without_a_default_it_is_the_first():
    level, (_,) = taken(film("mpegts", None))
    assert level == pytest.approx(LEVELS[0], rel=0.1)


@pytest.mark.parametrize(
    ("fmt", "track", "place"),
    [
        *(("matroska", "1", 0), ("mp4", "3", 2), ("mpegts", "2", 1), ("mpegts", "spa", 1)),
        *(("matroska", "ES-mx", 1), ("mp4", "Spanish", 1), ("matroska", "fre", 2)),
    ],
)
def test_a_track_is_chosen_by_number_or_language(fmt: str, track: str, place: int):
    level, told = taken(film(fmt, 1 if fmt != "mpegts" else None), track)
    assert level == pytest.approx(LEVELS[place], rel=0.1)
    assert told == []


@pytest.mark.parametrize("track", ["4", "de", "und", "xyz"])
def test_a_track_that_is_not_there_is_an_error_that_lists_those_that_are(track: str):
    with pytest.raises(OptionError) as refused:
        taken(film("matroska", 1), track)
    text = str(refused.value)
    assert text.startswith(f"audio_track = '{track}'")
    assert "1 (eng, aac, mono), 2 (spa, aac, mono, default), 3 (fra, aac, mono)" in text


@pytest.mark.parametrize("fmt", ["WAV", "FLAC", "MP3"])
def test_files_of_one_track_have_a_first(fmt: str):
    data = encode(tone(), fmt)
    assert taken(data, "1") == taken(data)
    for track in ("2", "es"):
        with pytest.raises(OptionError, match=r"expected one of 1 \(no language"):
            taken(data, track)
