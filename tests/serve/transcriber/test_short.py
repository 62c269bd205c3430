"""How much of a window the encoder sees, and which are heard again as a whole."""

import dataclasses

import pytest
import torch

from serve.contract.engine import DETECT_LANGUAGE
from serve.speech import vad
from tests.fakes import CAPABILITIES
from tests.harness import UNSURE, TranscriberTests, noise, request
from tests.serve.speech.sounds import Ear
from tests.serve.transcriber.test_untold import Reader


def seen(runtime):
    return [job.features.shape[-1] for job in runtime.jobs]


class Doubted:
    """A script that says other things of windows of which the encoder saw less."""

    def __init__(self, echo, **play):
        self.echo, self.play = echo, play

    def __call__(self, job):
        play = self.echo(job)
        whole = job.features.shape[-1] == 3000
        return play if whole else dataclasses.replace(play, **self.play)


class TestShort(TranscriberTests):
    """Over a fake runtime."""

    @pytest.fixture(autouse=True)
    def cheap_features(self, monkeypatch):
        """Features are as many as the encoder sees."""
        monkeypatch.setattr(
            "serve.speech.features.log_mel", lambda samples, _: samples[:, None, ::160]
        )

    @pytest.mark.parametrize(("seconds", "frames"), [(2.0, 300), (2.5, 400), (29.5, 3000)])
    def test_if_asked_to_it_sees_the_audio_and_a_second_of_silence(
        self, start, echo, seconds, frames
    ):
        transcriber, runtime = start(echo, short_encoder="auto")
        transcriber.transcribe(request(audio=noise(seconds), short_encoder=True))
        transcriber.transcribe(request(audio=noise(seconds), short_encoder=False))
        assert seen(runtime) == [frames, 3000]

    @pytest.mark.parametrize(
        ("seconds", "frames"),
        [(2.9, 3000), (3.0, 1000), (9.0, 1000), (9.1, 1500), (19.0, 2000), (19.1, 3000)],
    )
    def test_else_it_sees_no_less_than_costs_nothing(self, start, echo, seconds, frames):
        transcriber, runtime = start(echo, short_encoder="auto")
        transcriber.transcribe(request(audio=noise(seconds)))
        transcriber.transcribe(request(audio=noise(seconds), task="translate"))
        assert seen(runtime) == [frames, 3000]

    def test_a_runtime_of_whole_windows_is_given_these(self, start, echo):
        lacks = dataclasses.replace(CAPABILITIES, short_windows=False)
        transcriber, runtime = start(echo, lacks, short_encoder="auto")
        transcriber.transcribe(request(audio=noise(5.0)))
        assert seen(runtime) == [3000]

    @pytest.mark.parametrize(
        "play", [UNSURE, {"no_speech_prob": 0.9, **UNSURE}], ids=["unlikely", "silence"]
    )
    def test_what_is_doubted_is_heard_again_as_a_whole(self, start, echo, play):
        transcriber, runtime = start(Doubted(echo, **play), short_encoder="auto")
        answer = transcriber.transcribe(request("so", audio=noise(5.0)))
        assert answer.text == "so" and seen(runtime) == [1000, 3000]
        short, whole = runtime.jobs
        assert torch.equal(whole.features[:, :1000], short.features)
        assert whole.options == short.options and whole.draft == ()
        assert transcriber.stats().retries == 1

    def test_a_runtime_that_takes_samples_is_told_how_much_it_hears(self, start, echo):
        takes = dataclasses.replace(CAPABILITIES, input_kind="samples")

        def script(job):
            sure = {} if job.frames == 3000 else UNSURE
            return dataclasses.replace(echo(job), **sure)

        transcriber, runtime = start(script, takes, short_encoder="auto")
        transcriber.transcribe(request("so", audio=noise(5.0)))
        assert [job.frames for job in runtime.jobs] == [1000, 3000]
        assert [job.features.shape for job in runtime.jobs] == [(80_000,)] * 2

    def test_what_is_doubted_does_not_name_the_language(self, start, echo, tokenizer):
        languages = tokenizer.facts.languages
        script = Doubted(echo, language=languages["en"], **UNSURE)
        transcriber, runtime = start(script, short_encoder="auto")
        answer = transcriber.transcribe(request("so", audio=noise(5.0), language=None))
        assert answer.language == "es"  # as whole windows say
        assert all(DETECT_LANGUAGE in job.prompt for job in runtime.jobs)

    def test_text_that_ends_before_the_voice_is_doubted_and_its_rest_is_heard_whole(
        self, start, tokenizer, monkeypatch
    ):
        monkeypatch.setattr(vad, "VadModel", Ear)
        transcriber, runtime = start(Reader(tokenizer), vad="auto", short_encoder="auto")
        answer = transcriber.transcribe(request(audio=noise(12.0)))
        assert answer.text.split() == ["one", "two", "three", "four", "five"] * 3
        assert seen(runtime) == [1500, 3000, 3000, 3000]
