"""Which of a file's audio tracks is transcribed."""

import numpy as np
import pytest

from serve.contract.errors import OptionError
from tests.serve.speech.sounds import RATE, Sound, decode, encode, tone, tracks

LEVELS = (0.1, 0.2, 0.4)


def taken(data: bytes, track: str = "") -> tuple[float, list[str]]:
    """How loud the track is that is taken, and what is told."""
    samples, told = decode(data, track=track)
    return float(np.abs(samples[RATE // 2 : RATE]).max()), told


def film(fmt: str, default: int | None, languages: tuple[str, ...] = ("eng", "spa", "fra")):
    return tracks(
        fmt,
        *(
            Sound(
                2 * level * tone(24_000, 2.0),
                default=None if default is None else place == default,
                language=languages[place],
            )
            for place, level in enumerate(LEVELS)
        ),
        picture_s=2.0,
    )


@pytest.mark.parametrize(("fmt", "default"), [("matroska", 0), ("mp4", 1), ("mov", 2)])
def test_the_default_track_is_taken(fmt: str, default: int):
    level, told = taken(film(fmt, default))
    assert level == pytest.approx(LEVELS[default], rel=0.1)
    assert len(told) == 1
    assert f"3 audio tracks; track {default + 1} (" in told[0]
    for name in ("eng", "spa", "fra", "audio_track"):
        assert name in told[0]


def test_without_a_default_it_is_the_first():
    level, told = taken(film("mpegts", None))
    assert level == pytest.approx(LEVELS[0], rel=0.1)
    assert len(told) == 1


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
