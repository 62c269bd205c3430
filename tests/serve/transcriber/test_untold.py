"""Windows with text that ends before the voice does, through the transcriber."""

import dataclasses

import numpy as np
import pytest

from serve.contract.engine import DETECT_LANGUAGE
from serve.speech import vad
from tests.fakes import Echo, Play
from tests.harness import ABLE, TranscriberTests, noise, quiescent, request
from tests.serve.speech.sounds import Ear


class Reader:
    """A script that says five words in five seconds, and then a timestamp, whatever comes."""

    def __init__(self, tokenizer):
        facts = tokenizer.facts
        text = tokenizer.text_ids("prefix", " one two three four five", 99)
        tokens = (facts.timestamp_begin, *text, *[facts.timestamp_begin + 250] * 2)
        self.play = Play(tokens=tokens, text_below=facts.eot)

    def __call__(self, job):
        return self.play


@pytest.fixture(autouse=True)
def ear(monkeypatch):
    monkeypatch.setattr(vad, "VadModel", Ear)


class TestUntold(TranscriberTests):
    """Over a fake runtime."""

    @pytest.mark.parametrize(
        ("vad", "mode"), [("auto", "parallel"), ("on", "sequential"), ("off", "parallel")]
    )
    def test_what_is_left_of_a_window_is_decoded_from_there(self, start, tokenizer, vad, mode):
        transcriber, runtime = start(Reader(tokenizer), vad=vad)
        answer = transcriber.transcribe(request(audio=noise(14.0), mode=mode))
        assert len(runtime.jobs) == 3
        assert answer.text.split() == ["one", "two", "three", "four", "five"] * 3
        starts = [segment.start for segment in answer.segments]
        assert starts == sorted(starts) and starts[1:] == pytest.approx([5, 10], abs=0.5)
        assert answer.duration == 14.0 and transcriber.stats().untold_s == 0
        quiescent(transcriber, runtime)

    def test_in_sequence_the_rest_knows_what_was_said(self, start, tokenizer):
        transcriber, runtime = start(Reader(tokenizer))
        transcriber.transcribe(request(audio=noise(9.0), mode="sequential"))
        said = tokenizer.text_ids("prefix", " one two three four five", 99)
        first, second = (job.prompt for job in runtime.jobs)
        assert str(said)[1:-1] not in str(first) and str(said)[1:-1] in str(second)

    def test_a_rest_is_in_its_window_s_language(self, start, tokenizer):
        reader, languages, asked = Reader(tokenizer), tokenizer.facts.languages, []

        def unsure(job):
            if DETECT_LANGUAGE not in job.prompt:
                return reader(job)
            asked.append(job)
            code, prob = ("es", 0.5) if len(asked) == 1 else ("en", 0.6)
            return dataclasses.replace(reader(job), language=languages[code], language_prob=prob)

        transcriber, runtime = start(unsure, vad="off")
        answer = transcriber.transcribe(request(audio=noise(50.0), language=None))
        assert len(asked) == 2 and answer.language == "en", "each window has one vote"
        first, rest = runtime.jobs[:2]
        assert DETECT_LANGUAGE in first.prompt and languages["es"] in rest.prompt

    def test_where_each_window_has_its_language_a_rest_may_have_another(self, start, tokenizer):
        reader, languages = Reader(tokenizer), tokenizer.facts.languages

        def heard(job):
            return dataclasses.replace(reader(job), language=languages["es"], language_prob=0.9)

        transcriber, runtime = start(heard, vad="off")
        transcriber.transcribe(request(audio=noise(9.0), language=None, multilingual=True))
        assert [DETECT_LANGUAGE in job.prompt for job in runtime.jobs] == [True, True]

    def test_words_of_a_rest_follow_those_before_it(self, start, tokenizer):
        transcriber, _ = start(Reader(tokenizer), ABLE)
        answer = transcriber.transcribe(request(audio=noise(9.0), word_timestamps=True))
        words = [word for segment in answer.segments for word in segment.words]
        assert len(words) == 10 and words[5].start >= words[4].end
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times) and times[-1] <= 9.0

    def test_it_ends_and_tells_what_stays_untold(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer), vad="off")
        answer = transcriber.transcribe(request("so", audio=noise(20.0)))
        assert len(runtime.jobs) == 5, "of a window so much is decoded and no more"
        assert answer.text == "so so so so so"
        assert transcriber.stats().untold_s == pytest.approx(20.0 - 5.0, abs=1.5)
        quiescent(transcriber, runtime)

    def test_silence_asks_for_nothing(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer), vad="off")
        audio = np.concatenate([noise(1.0), np.zeros(19 * 16_000, np.float32)])
        transcriber.transcribe(request("so", audio=audio))
        assert len(runtime.jobs) == 1 and transcriber.stats().untold_s == 0

    def test_a_loop_of_a_sentence_s_length_is_seen_in_a_long_text(self, start, tokenizer):
        plain = " The quick brown fox jumps over a lazy dog while seven wizards hum nearby."
        facts = tokenizer.facts
        stamps = [facts.timestamp_begin + 50 * second for second in (0, 5, 10)]
        text, loop = (tokenizer.text_ids("prefix", t, 300) for t in (plain, " O-" + "O-" * 30))
        tokens = (stamps[0], *text, stamps[1], stamps[1], *loop, stamps[2])

        def script(job):
            return Play(tokens=tokens if job.options.temperature == 0 else (stamps[0], *text))

        transcriber, runtime = start(script, temperatures=(0.0, 0.5))
        answer = transcriber.transcribe(request(audio=noise(10.0)))
        assert len(runtime.jobs) == 2 and answer.text == plain.strip()
