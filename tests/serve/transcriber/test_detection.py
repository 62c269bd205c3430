"""Languages that a request, or the config, leaves to be detected among."""

import dataclasses

import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import ConfigError, OptionError
from serve.runtime.protocol import Detection
from tests.fakes import CAPABILITIES, fake_engine
from tests.harness import TranscriberTests, noise, request

DETECTED = {"language": None}


class TestDetection(TranscriberTests):
    """Through the transcriber."""

    def detections(self, start, echo, options, **config):
        transcriber, runtime = start(echo, **config)
        transcriber.transcribe(request("so", audio=noise(70.0), **DETECTED | options))
        assert len(runtime.jobs) > 1
        found = [job.detection for job in runtime.jobs if DETECT_LANGUAGE in job.prompt]
        return {dataclasses.replace(detection, close=()) for detection in found}

    @pytest.mark.parametrize("each", [False, True])
    def test_those_of_the_request_reach_the_runtime(self, start, echo, tokenizer, each):
        asked = {"languages": ["German", "es", "DE"], "multilingual": each}
        known = tokenizer.facts.languages
        # Where each window has a language, none is decoded in another window's.
        switch = 0.0 if each else TranscriberConfig.language_switch
        expected = Detection((known["de"], known["es"]), 0.25, 3, switch)
        config = {"language_certainty": 0.25, "language_tries": 3, "languages": ("fr",)}
        assert self.detections(start, echo, asked, **config) == {expected}

    def test_where_it_says_none_they_are_as_configured(self, start, echo, tokenizer):
        french = (tokenizer.facts.languages["fr"],)
        assert {x.languages for x in self.detections(start, echo, {}, languages=("fr",))} == {
            french
        }
        usual = TranscriberConfig()
        expected = Detection(
            (), usual.language_certainty, usual.language_tries, usual.language_switch
        )
        assert self.detections(start, echo, {}) == {expected}

    def test_one_that_is_named_needs_not_be_among_those_configured(self, start, echo):
        transcriber, runtime = start(echo, languages=("fr", "de"))
        assert transcriber.transcribe(request("so", language="es")).language == "es"
        assert DETECT_LANGUAGE not in runtime.jobs[0].prompt

    @pytest.mark.parametrize(
        ("able", "options", "message"),
        [
            ({}, {"languages": "en"}, "languages = 'en'; expected a list of codes"),
            ({}, {"languages": ["en", "germn"]}, "'germn' is unknown; did you mean 'german'"),
            (
                {},
                {"languages": ["en", "de"], "language": "en"},
                r"languages = \['en', 'de'\] with language = 'en'; expected one of them",
            ),
            (
                {"languages": False},
                {"languages": ["en"]},
                r"languages = \['en'\], but the runtime fake cannot choose among some languages",
            ),
            ({}, {"multilingual": "yes"}, "multilingual = 'yes'; expected true or false"),
            (
                {},
                {"multilingual": True, "language": "en"},
                "multilingual = true with language = 'en'; expected one",
            ),
            (
                {"detect_language": False},
                {"multilingual": True},
                "multilingual = true, but the runtime fake cannot",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, start, echo, able, options, message):
        transcriber, _ = start(echo, dataclasses.replace(CAPABILITIES, **able))
        with pytest.raises(OptionError, match=message):
            transcriber.transcribe(request(**DETECTED | options))

    def test_an_english_only_engine_refuses_them(self, start, echo, tmp_path):
        transcriber, _ = start(echo, on=fake_engine(tmp_path, multilingual=False))
        for asked, told in (({"languages": ["en"]}, r"\['en'\]"), ({"multilingual": True}, "true")):
            (name,) = asked
            with pytest.raises(OptionError, match=f"{name} = {told}, but this engine is English"):
                transcriber.transcribe(request(**asked, **DETECTED))

    @pytest.mark.parametrize(
        ("able", "languages", "message"),
        [
            ({}, ("xx",), "transcriber.languages: language 'xx' is unknown"),
            ({"languages": False}, ("en",), r"transcriber.languages = \['en'\], but the runtime"),
        ],
    )
    def test_a_wrong_config_does_not_start(self, start, echo, able, languages, message):
        with pytest.raises(ConfigError, match=message):
            start(echo, dataclasses.replace(CAPABILITIES, **able), languages=languages)
