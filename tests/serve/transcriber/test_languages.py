"""A language for each window: asked for, refused, found side by side, told in segments."""

import dataclasses

import pytest

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import ConfigError, OptionError
from serve.runtime.protocol import Detection
from serve.speech import words
from serve.transcriber import decoding_plan
from tests.fakes import CAPABILITIES, Echo, fake_engine
from tests.harness import ABLE, FOREVER, UNSURE, Client, TranscriberTests, noise, request, until

MIXED = {"language": None, "multilingual": True}
THREE = [("es", 0.9), ("en", 0.9), ("de", 0.9)]


DETECTION = Detection(  # where nothing is said about languages
    (),
    decoding_plan.LANGUAGE_CERTAINTY,
    decoding_plan.MAX_TRIED_LANGUAGES,
    decoding_plan.SWITCH_PROBABILITY,
)


class TestUnsure(TranscriberTests):
    """Through the transcriber."""

    def test_the_next_window_is_asked_too(self, start, tokenizer):
        script = Station(tokenizer, ("es", 0.5), *[("en", 0.95)] * 9)
        transcriber, runtime = start(script, vad="off")
        answer = transcriber.transcribe(request("so", audio=noise(100.0), language=None))
        asked = [DETECT_LANGUAGE in job.prompt for job in runtime.jobs]
        assert asked[:2] == [True, True] and not any(asked[2:])
        assert answer.language == "en" and len(asked) >= 4

    def test_after_three_the_likeliest_is_taken(self, start, tokenizer):
        script = Station(tokenizer, ("zh", 0.5), ("en", 0.4), *[("en", 0.45)] * 9)
        transcriber, runtime = start(script, vad="off")
        answer = transcriber.transcribe(request("so", audio=noise(130.0), language=None))
        asked = [DETECT_LANGUAGE in job.prompt for job in runtime.jobs]
        assert asked[:3] == [True] * 3 and len(asked) >= 4 and not any(asked[3:])
        assert answer.language == "en"


class Station:
    """Windows that are heard in some languages in turn, by code and probability."""

    def __init__(self, tokenizer, *heard, **play):
        self.top_language = heard
        self.languages = tokenizer.facts.languages
        self.echo = Echo(tokenizer, **play)

    def __call__(self, job):
        number = job.options.seed // 1000  # as `ActiveRequest.job` numbers windows
        code, prob = self.top_language[number % len(self.top_language)]
        language = self.languages[code]
        return dataclasses.replace(
            self.echo(job), language=language, language_prob=prob, top_language=(language, prob)
        )


class TestSeveralByDefault(TranscriberTests):
    """Recordings with windows clearly in other languages; no option is set."""

    def answer(self, start, tokenizer, *heard, config=(), **options):
        transcriber, runtime = start(Station(tokenizer, *heard), **dict(config))
        options = {"language": None, **options}
        client = Client().send(transcriber, request("so", audio=noise(100.0), **options))
        return client.transcript, client, runtime

    def test_a_window_that_clearly_is_in_another_has_its_own(self, start, tokenizer):
        answer, client, _ = self.answer(
            start, tokenizer, ("en", 0.99), ("es", 0.99), ("es", 0.97), ("en", 0.99)
        )
        languages = [segment.language for segment in answer.segments]
        assert languages == ["en", "es", "es", "en", "en"]
        sent = [event.segment.language for event in client.events[:-1]]
        assert sent == [None, "es", "es", None, None]
        (warning,) = answer.warnings
        assert warning.startswith("language en was detected, but es is spoken at ")
        begin, end = answer.segments[1].start, answer.segments[3].start
        assert f"{begin:.1f} to {end:.1f} s; these parts were transcribed in that" in warning
        assert "Send multilingual = true" in warning

    def test_the_language_of_the_whole_is_the_one_that_most_was_said_in(self, start, tokenizer):
        answer, _, _ = self.answer(
            start, tokenizer, ("en", 0.99), ("es", 0.95), ("es", 0.97), ("es", 0.99)
        )
        assert (answer.language, answer.language_prob) == ("es", pytest.approx(0.97))

    @pytest.mark.parametrize(
        ("heard", "config"),
        [
            ([("en", 0.99), ("en", 0.99)], {}),
            ([("en", 0.99), ("es", 0.4)], {}),  # may be
            ([("en", 0.99), ("en", 0.95)], {"languages": ("en", "es")}),
        ],
    )
    def test_else_all_are_in_the_one_that_was_found(self, start, tokenizer, heard, config):
        answer, _, runtime = self.answer(start, tokenizer, *heard, config=config)
        assert {segment.language for segment in answer.segments} == {None}
        assert (answer.language, answer.warnings) == ("en", ())
        assert all(tokenizer.facts.languages["en"] in job.prompt for job in runtime.jobs[1:])

    def test_close_languages_are_one(self, start, tokenizer):
        answer, _, _ = self.answer(start, tokenizer, ("hr", 0.99), ("sr", 0.99))
        assert {segment.language for segment in answer.segments} == {None}
        assert (answer.language, answer.warnings) == ("hr", ())

    def test_the_clients_language_wins_and_it_is_told(self, start, tokenizer):
        heard = [("es", 0.99), ("en", 0.99), ("es", 0.99), ("de", 0.6)]
        answer, _, runtime = self.answer(start, tokenizer, *heard, language="en")
        assert {job.detection.switch for job in runtime.jobs} == {0.0}
        assert (answer.language, answer.segments[0].language) == ("en", None)
        (warning,) = answer.warnings
        times = [segment.start for segment in answer.segments]
        assert warning.startswith(f"language = en, but es is spoken at 0.0 to {times[1]:.1f} s, ")
        assert "de" not in warning.split(";")[0]
        assert "Send multilingual = true instead of language to detect" in warning

    def test_where_no_window_switches_a_clear_one_is_told(self, start, tokenizer, monkeypatch):
        monkeypatch.setattr(decoding_plan, "SWITCH_PROBABILITY", 0.0)
        answer, _, runtime = self.answer(start, tokenizer, ("en", 0.99), ("es", 0.99))
        assert all(tokenizer.facts.languages["en"] in job.prompt for job in runtime.jobs[1:])
        assert {segment.language for segment in answer.segments} == {None}
        (warning,) = answer.warnings
        assert "these parts were decoded as en. Send multilingual = true" in warning

    def test_an_attempt_at_a_higher_temperature_is_in_that_too(self, start, tokenizer):
        script = Station(tokenizer, ("en", 0.99), ("es", 0.99))
        unsure = Echo(tokenizer, **UNSURE)
        script.echo = lambda job: (
            unsure(job) if job.options.temperature == 0 else Echo(tokenizer)(job)
        )
        transcriber, runtime = start(script, temperatures=(0.0, 0.2))
        answer = transcriber.transcribe(request("so", audio=noise(50.0), language=None))
        assert [segment.language for segment in answer.segments] == ["en", "es"]
        spanish = tokenizer.facts.languages["es"]
        again = [job.prompt for job in runtime.jobs if job.options.temperature == 0.2]
        assert [spanish in prompt for prompt in again] == [False, True]


class TestMultilingual(TranscriberTests):
    """Through the transcriber."""

    def test_each_window_has_its_own(self, start, tokenizer):
        transcriber, runtime = start(Station(tokenizer, *THREE))
        answer = transcriber.transcribe(request("so", audio=noise(100.0), **MIXED))
        found = [segment.language for segment in answer.segments]
        assert len(found) >= 4
        assert found == ["es", "en", "de", "es", "en", "de", "es"][: len(found)]
        assert (answer.language, answer.language_prob) == ("es", pytest.approx(0.9))
        assert all(DETECT_LANGUAGE in job.prompt for job in runtime.jobs)

    def test_no_window_waits_for_another(self, start, tokenizer):
        transcriber, runtime = start(Station(tokenizer, *THREE, delay=FOREVER))
        client = Client().send(transcriber, request(audio=noise(100.0), **MIXED))
        until(lambda: len(runtime.jobs) > 2)
        client.handle.cancel()
        assert client.error

    def test_in_sequence_too(self, start, tokenizer):
        transcriber, runtime = start(Station(tokenizer, *THREE))
        answer = transcriber.transcribe(
            request("so", audio=noise(70.0), mode="sequential", **MIXED)
        )
        assert list(dict.fromkeys(s.language for s in answer.segments)) == ["es", "en", "de"]
        assert runtime.most_in_hand == 1

    def test_a_window_decoded_again_keeps_its_language(self, start, tokenizer):
        transcriber, runtime = start(Station(tokenizer, *THREE, **UNSURE), temperatures=(0.0, 0.2))
        transcriber.transcribe(request(audio=noise(70.0), **MIXED))
        languages = tokenizer.facts.languages
        again = [job.prompt for job in runtime.jobs if job.options.temperature == 0.2]
        for code in ("es", "en", "de"):
            assert sum(languages[code] in prompt for prompt in again) == 1

    def test_words_are_split_as_their_windows_language_writes_them(
        self, start, tokenizer, monkeypatch
    ):
        asked = []
        split = words.split_words
        monkeypatch.setattr(
            "serve.speech.words.split_words",
            lambda tokens, decode, language: (
                asked.append(language) or split(tokens, decode, language)
            ),
        )
        transcriber, _ = start(Station(tokenizer, *THREE), ABLE)
        timed = request("so", audio=noise(70.0), word_timestamps=True, **MIXED)
        answer = transcriber.transcribe(timed)
        assert sorted(asked) == sorted(segment.language for segment in answer.segments)


class TestDetection(TranscriberTests):
    """Languages that a request, or the config, leaves to be detected among."""

    def detections(self, start, echo, options, **config):
        transcriber, runtime = start(echo, **config)
        transcriber.transcribe(request("so", audio=noise(70.0), **{"language": None, **options}))
        assert len(runtime.jobs) > 1
        found = [job.detection for job in runtime.jobs if DETECT_LANGUAGE in job.prompt]
        return {dataclasses.replace(detection, close_languages=()) for detection in found}

    @pytest.mark.parametrize("each", [False, True])
    def test_those_of_the_request_reach_the_runtime(self, start, echo, tokenizer, each):
        asked = {"languages": ["German", "es", "DE"], "multilingual": each}
        known = tokenizer.facts.languages
        # Where each window has a language, none is decoded in another window's.
        switch = 0.0 if each else DETECTION.switch
        among = (known["de"], known["es"])
        expected = dataclasses.replace(DETECTION, languages=among, switch=switch)
        assert self.detections(start, echo, asked, languages=("fr",)) == {expected}

    def test_where_it_says_none_they_are_as_configured(self, start, echo, tokenizer):
        french = (tokenizer.facts.languages["fr"],)
        found = self.detections(start, echo, {}, languages=("fr",))
        assert found == {dataclasses.replace(DETECTION, languages=french)}
        assert self.detections(start, echo, {}) == {DETECTION}

    def test_one_that_is_named_needs_not_be_among_those_configured(self, start, echo):
        transcriber, runtime = start(echo, languages=("fr", "de"))
        assert transcriber.transcribe(request("so", language="es")).language == "es"
        assert DETECT_LANGUAGE not in runtime.jobs[0].prompt

    def test_an_english_only_engine_refuses_them(self, start, echo, tmp_path):
        transcriber, _ = start(echo, on=fake_engine(tmp_path, multilingual=False))
        for asked, told in (({"languages": ["en"]}, r"\['en'\]"), ({"multilingual": True}, "true")):
            (name,) = asked
            with pytest.raises(OptionError, match=f"{name} = {told}, but this engine is English"):
                transcriber.transcribe(request(**asked, language=None))

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
