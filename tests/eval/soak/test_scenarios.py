"""Hours of audio made of bundled clips."""

from build.clips import load_clips
from eval.soak import scenarios
from eval.soak.scenarios import hour_of
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits


def test_a_long_file_is_made_of_the_clips_in_turn(monkeypatch):
    monkeypatch.setattr(scenarios, "_HOUR_S", 12)
    clips = tuple(load_clips("tests/data/manifest.jsonl"))[:3]
    samples = audio.whole(audio.decode(hour_of(clips), AudioLimits(12.0)))
    assert len(samples) == 12 * SAMPLE_RATE
