"""Clips of one speaker become passages; the texts follow each other as the audio does."""

import numpy as np
import pytest
import soundfile

from build.clips import Clip
from eval.accuracy import passages
from eval.accuracy.passages import PAUSES_S, join_clips
from serve.speech.meter import AudioLimits

LIMITS = AudioLimits(60.0)


@pytest.fixture
def clip(tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "CACHE", tmp_path / "cache")

    def make(file, seconds, text="word", speaker="a", **fields):
        samples = np.full(int(seconds * 16_000), 0.25, np.float32)
        soundfile.write(tmp_path / file, samples, 16_000)
        values = {"language": "en", "group": "en/readers", "speaker": speaker, **fields}
        return Clip(file, tmp_path / file, text, duration_s=seconds, **values)

    return make


def test_clips_of_a_speaker_are_joined_up_to_a_length(clip):
    clips = [clip(f"{n}.wav", 4.0, f"word {n}") for n in range(5)]
    clips.append(clip("b.wav", 4.0, "other", "b"))
    clips.append(clip("long.wav", 15.0, "long", "c"))
    found = join_clips(clips, 10.0, LIMITS)
    texts = ["word 0 word 1", "word 2 word 3", "word 4", "other", "long"]
    assert [one.text for one in found] == texts
    assert found[0].file == "en/readers/a 000 (2 clips from 0.wav)"
    assert found[2:] == clips[4:]  # alone, they stay as they are
    samples, rate = soundfile.read(found[0].path)
    pause_s = len(samples) / rate - 8.0
    assert PAUSES_S[0] <= pause_s <= PAUSES_S[1] and found[0].duration_s == len(samples) / rate
    middle = samples[64_000 : 64_000 + int(pause_s * rate)]
    assert not middle.any() and samples[:64_000].min() > 0.2
    assert join_clips(clips, 10.0, LIMITS) == found


def test_a_silent_clip_is_joined_to_none(clip):
    clips = [clip("a.wav", 1.0), clip("s.wav", 1.0, ""), clip("b.wav", 1.0)]
    assert join_clips(clips, 10.0, LIMITS) == clips


def test_languages_without_spaces_are_joined_without(clip):
    clips = [clip(f"{n}.wav", 1.0, text, language="zh") for n, text in enumerate("甲乙")]
    assert [one.text for one in join_clips(clips, 10.0, LIMITS)] == ["甲乙"]
