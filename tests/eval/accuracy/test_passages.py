"""Clips of one speaker become passages; the texts follow each other as the audio does."""

import pytest
import soundfile

from build.clips import load_clips
from eval.accuracy import passages
from eval.accuracy.passages import PAUSES_S, join_clips


@pytest.fixture
def clips_of(manifest, tmp_path, monkeypatch):
    """Makes clips of a speaker, 4 s each, with these other fields."""
    monkeypatch.setattr(passages, "CACHE", tmp_path / "passages")
    same = {"group": "en/readers", "speaker": "a", "duration": 4.0}
    return lambda *fields: load_clips(manifest(*(same | other for other in fields)))


def test_clips_of_a_speaker_are_joined_up_to_a_length(clips_of):
    clips = clips_of(*[{}] * 5, {"speaker": "b"}, {"speaker": "c", "duration": 15.0})
    found = join_clips(clips, 10.0)
    texts = ["text 0 text 1", "text 2 text 3", "text 4", "text 5", "text 6"]
    assert [one.text for one in found] == texts
    assert found[0].file == "en/readers/a 000 (2 clips from 0.wav)"
    assert found[2:] == clips[4:]  # alone, they stay as they are
    samples, rate = soundfile.read(found[0].path)
    pause_s = len(samples) / rate - 8.0
    assert PAUSES_S[0] <= pause_s <= PAUSES_S[1] and found[0].duration_s == len(samples) / rate
    middle = samples[64_000 : 64_000 + int(pause_s * rate)]
    assert not middle.any() and samples[:64_000].any()
    assert join_clips(clips, 10.0) == found


def test_a_silent_clip_is_joined_to_none(clips_of):
    clips = clips_of({}, {"text": ""}, {})
    assert join_clips(clips, 10.0) == clips


def test_languages_without_spaces_are_joined_without(clips_of):
    clips = clips_of(*({"text": text, "language": "zh"} for text in "甲乙"))
    assert [one.text for one in join_clips(clips, 10.0)] == ["甲乙"]
