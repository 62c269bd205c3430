"""Odd but real files, as requests: tracks, clocks, channels, and what their clients are told."""

import numpy as np
import pytest

from serve.contract.errors import OptionError
from serve.contract.messages import Request
from tests.fakes import Echo
from tests.harness import UNSURE, TranscriberTests, noise, request
from tests.serve.speech.sounds import Sound, encode, tone, tracks


def file(data: bytes, **options) -> Request:
    return request(audio=data, sample_rate=None, **options)


def sound(seed: int = 0, seconds: float = 2.0, **options) -> Sound:
    samples = np.random.default_rng(seed).normal(0, 0.1, round(24_000 * seconds))
    return Sound(samples.astype(np.float32), **options)


class TestOddAudio(TranscriberTests):
    """Over a fake runtime: each window says the prompt from 0 to 1 s."""

    def test_a_track_is_chosen(self, start, echo):
        film = tracks(
            "matroska",
            sound(0, 1.0, language="eng", default=False),
            sound(1, 2.0, language="spa", default=True),
            sound(2, 3.0, language="fra", default=False),
            picture_s=3.0,
        )
        transcriber, _ = start(echo)
        answer = transcriber.transcribe(file(film))
        assert answer.duration == pytest.approx(2.0, abs=0.1)
        (warning,) = answer.warnings
        assert "track 2 (spa" in warning
        for track, seconds in (("3", 3.0), ("en", 1.0), ("spa", 2.0)):
            answer = transcriber.transcribe(file(film, audio_track=track))
            assert answer.duration == pytest.approx(seconds, abs=0.1)
            assert answer.warnings == ()
        with pytest.raises(OptionError, match=r"audio_track = 'de'.*1 \(eng.*2 \(spa.*3 \(fra"):
            transcriber.transcribe(file(film, audio_track="de"))

    def test_sound_too_low_for_speech_is_told_and_not_tried_again(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, **UNSURE))
        low = encode(tone(1_000), "WAV", "PCM_16", 1_000)
        (warning,) = transcriber.transcribe(file(low)).warnings
        assert warning.startswith("the audio has no frequencies above ")
        assert [job.options.temperature for job in runtime.jobs] == [0.0]
        transcriber.transcribe(file(encode(noise(1.0), "WAV", "PCM_16")))
        assert len(runtime.jobs) > 2
