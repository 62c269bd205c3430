"""Words with times, through the transcriber: asked for, refused, in order, failing, cancelled."""

import dataclasses
import math
import threading

import pytest

from serve.contract.engine import Engine
from serve.contract.errors import OptionError
from serve.contract.messages import SegmentReady
from serve.speech import words
from tests.fakes import CAPABILITIES, CONFIDENCE, Echo
from tests.harness import ABLE, WAIT_S, Client, TranscriberTests, noise, quiescent, request

TIMED = {"word_timestamps": True}


def spoken(transcript):
    return [(w.word, w.start, w.end) for s in transcript.segments for w in s.words]


class TestWords(TranscriberTests):
    """Over a fake runtime: in its alignments all tokens take equally long."""

    def test_segments_hold_their_words_and_keep_to_their_times(self, start, echo, tokenizer):
        transcriber, runtime = start(echo, ABLE)
        answer = transcriber.transcribe(request("over the fox", audio=noise(1.5), **TIMED))
        assert runtime.jobs[-1].align_frames == 75
        (segment,) = answer.segments
        tokens = list(segment.tokens)
        parts = words.split_words(tokens, tokenizer.decode, "en")
        assert [word.word for word in segment.words] == [text for text, _ in parts]
        counts = [count for _, count in parts]
        ends = [sum(counts[: i + 1]) / (len(tokens) + 1) * 1.5 for i in range(3)]
        assert [word.end for word in segment.words] == pytest.approx(ends, abs=0.021)
        assert all(word.probability == 0.5 for word in segment.words)
        assert segment.start == segment.words[0].start and segment.end == segment.words[-1].end
        assert answer.text == "over the fox"
        quiescent(transcriber, runtime)

    def test_tokens_come_with_their_log_probabilities_with_words_or_without(
        self, start, echo, tokenizer
    ):
        transcriber, _ = start(echo, ABLE)
        for timed in ({}, TIMED):
            asked = request("over 🙂 fox", audio=noise(1.5), token_logprobs=True, **timed)
            (segment,) = transcriber.transcribe(asked).segments
            assert (segment.words is not None) == bool(timed)
            texts = [piece.token for piece in segment.token_logprobs]
            assert "".join(texts) == segment.text == " over 🙂 fox"
            of_one = round(math.log(0.5), 4)
            assert segment.token_logprobs[0].logprob == of_one
            total = sum(piece.logprob for piece in segment.token_logprobs)
            assert total == pytest.approx(of_one * len(segment.tokens), abs=1e-3)
            assert len(texts) < len(segment.tokens), "a character of several tokens is one"

    def test_words_say_how_likely_they_are_right_where_the_engine_can(self, start, echo, engine):
        sure = Engine(engine.path, dataclasses.replace(engine.manifest, confidence=CONFIDENCE))
        transcriber, _ = start(echo, ABLE, on=sure)
        # Of probability 0.5, with an avg_logprob of -0.1.
        expected = round(1 / (1 + math.exp(-(1.0 + 0.0 + 2.0 * -0.1))), 4)
        for low, marked in ((None, None), (0.5, None), (0.9, True)):
            asked = request("over the fox", audio=noise(1.5), low_confidence=low, **TIMED)
            (segment,) = transcriber.transcribe(asked).segments
            found = {(w.probability, w.confidence, w.low_confidence) for w in segment.words}
            assert found == {(0.5, expected, marked)}
        transcriber, _ = start(echo, ABLE)
        (segment,) = transcriber.transcribe(request("over", audio=noise(1.5), **TIMED)).segments
        assert {(w.confidence, w.low_confidence) for w in segment.words} == {(None, None)}

    def test_who_does_not_ask_gets_none_and_costs_nothing(self, start, echo):
        transcriber, runtime = start(echo, ABLE)
        (segment,) = transcriber.transcribe(request("over the fox")).segments
        assert segment.words is segment.token_logprobs is None
        assert runtime.jobs[-1].align_frames == 0

    def test_words_that_are_but_tried_come_where_the_runtime_can_time_them(self, start, echo):
        tried = {"try_word_timestamps": True}
        transcriber, _ = start(echo, ABLE)
        answer = transcriber.transcribe(request("over the fox", **tried))
        assert [word for word, _, _ in spoken(answer)] == [" over", " the", " fox"]
        transcriber, runtime = start(echo, CAPABILITIES)
        (segment,) = transcriber.transcribe(request("over the fox", **tried)).segments
        assert segment.words is None and runtime.jobs[-1].align_frames == 0
        with pytest.raises(OptionError, match="try_word_timestamps = 1; expected true or false"):
            transcriber.transcribe(request("over", try_word_timestamps=1))

    def test_windows_come_in_order_whichever_is_timed_first(self, start, echo, monkeypatch):
        """The first window's words are held up until those of a later one are there."""
        later, order = threading.Event(), []
        whole = words.monotonic_path

        def slow(matrix):
            order.append(matrix.shape)
            if len(order) == 1:
                assert later.wait(WAIT_S)
            else:
                later.set()
            return whole(matrix)

        monkeypatch.setattr(words, "monotonic_path", slow)
        transcriber, runtime = start(echo, ABLE)
        audio = noise(70.0)
        client = Client().send(transcriber, request("the dog", audio=audio, **TIMED))
        answer = client.transcript
        assert later.is_set() and len(order) == len(answer.segments) >= 3
        starts = [w.start for s in answer.segments for w in s.words]
        assert starts == sorted(starts) and starts[-1] > 30
        told = [event.segment for event in client.events if isinstance(event, SegmentReady)]
        assert tuple(told) == answer.segments
        quiescent(transcriber, runtime)

    def test_the_words_are_those_of_the_attempt_that_is_kept(self, start, tokenizer):
        said = {0.0: " the dog", 0.5: " over the fox", 1.0: " jumps"}

        def script(job):
            text = said[job.options.temperature]
            ids = tokenizer.text_ids("prefix", text, 99)
            sure = {0.0: -2.0, 0.5: -1.5, 1.0: -3.0}[job.options.temperature]
            play = Echo(tokenizer, tokens=ids, avg_logprob=sure)(job)
            return play

        transcriber, runtime = start(script, ABLE, temperatures=(0.0, 0.5, 1.0))
        answer = transcriber.transcribe(request(**TIMED))
        assert answer.text == "over the fox"
        assert [word for word, _, _ in spoken(answer)] == [" over", " the", " fox"]
        assert len(runtime.jobs) == 3

    def test_refused_by_name_where_it_cannot_be_had(self, start, echo, engine):
        facts = dataclasses.replace(engine.manifest.tokenizer, alignment_heads=((0, 0),))
        named = Engine(engine.path, dataclasses.replace(engine.manifest, tokenizer=facts))
        for on, message in (
            (engine, "word_timestamps = true needs words' times, but the engine has no"),
            (named, "word_timestamps = true needs words' times, but the runtime fake"),
        ):
            transcriber, _ = start(echo, on=on)
            with pytest.raises(OptionError, match=message):
                transcriber.transcribe(request("over", **TIMED))
            with pytest.raises(OptionError, match="token_logprobs = true needs words' times, but"):
                transcriber.transcribe(request("over", token_logprobs=True))
            for name in ("word_timestamps", "token_logprobs"):
                with pytest.raises(OptionError, match=f"{name} = 'yes'; expected true"):
                    transcriber.transcribe(request("over", **{name: "yes"}))


class TestHallucinations(TranscriberTests):
    """In half a minute the fake says a few words, too long to be real speech."""

    def test_odd_segments_between_silences_are_left_out(self, start, echo):
        transcriber, runtime = start(echo, ABLE)
        audio, silence = noise(30.0), "hallucination_silence_threshold"
        for threshold_s, text in ((0, "over the fox"), (2.0, "")):
            client = Client().send(
                transcriber, request("over the fox", audio, **{silence: threshold_s})
            )
            assert client.transcript.text == text and len(client.events) == 1 + (text != "")
            assert all(segment.words is None for segment in client.transcript.segments)
            assert (runtime.jobs[-1].align_frames > 0) == (threshold_s == 2.0)
        short = transcriber.transcribe(request("over the fox", **{silence: 2.0, **TIMED}))
        assert short.text == "over the fox" and len(spoken(short)) == 3
        quiescent(transcriber, runtime)
