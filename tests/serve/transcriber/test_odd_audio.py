"""Odd but real files, as requests: tracks, clocks, channels, and what their clients are told."""

import pytest

from serve.contract.errors import OptionError
from serve.contract.messages import Request
from tests.fakes import Echo
from tests.harness import UNSURE, TranscriberTests, noise, request
from tests.serve.speech.sounds import RATE, Sound, encode, tone, tracks


def file(data: bytes, **options) -> Request:
    return request(audio=data, sample_rate=None, **options)


class TestOddAudio(TranscriberTests):
    """Over a fake runtime: each window says the prompt from 0 to 1 s."""

    def test_a_track_is_chosen_else_the_answer_tells_which_it_is(self, start, echo):
        film = tracks("matroska", *(Sound(noise(seconds), RATE) for seconds in (1.0, 2.0)))
        transcriber, _ = start(echo)
        for asked, seconds, warnings in (({}, 1.0, 1), ({"audio_track": "2"}, 2.0, 0)):
            answer = transcriber.transcribe(file(film, **asked))
            assert answer.duration == pytest.approx(seconds, abs=0.1)
            assert len(answer.warnings) == warnings
        with pytest.raises(OptionError, match="audio_track = '3'"):
            transcriber.transcribe(file(film, audio_track="3"))

    def test_sound_too_low_for_speech_is_told_and_not_tried_again(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, **UNSURE))
        low = encode(tone(1_000), "WAV", "PCM_16", 1_000)
        (warning,) = transcriber.transcribe(file(low)).warnings
        assert warning.startswith("the audio has no frequencies above ")
        assert [job.options.temperature for job in runtime.jobs] == [0.0]
        transcriber.transcribe(file(encode(noise(1.0), "WAV", "PCM_16")))
        assert len(runtime.jobs) > 2
