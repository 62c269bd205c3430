"""The transcriber over a fake runtime, when all goes well: answers and windows."""

import dataclasses
import time

import numpy as np
import pytest

from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import CancelledError
from serve.contract.messages import SegmentReady
from serve.speech.judging import LOOP_START
from tests.fakes import CAPABILITIES, Echo, Play
from tests.harness import UNSURE, Client, TranscriberTests, noise, quiescent, request, until


class TestAnswers(TranscriberTests):
    """Text, times, languages and counts of requests that go well."""

    def test_answers_with_text_times_and_counts(self, start, echo):
        transcriber, runtime = start(echo)
        answer = transcriber.transcribe(request("hello there", audio=noise(2.0)))
        assert answer.text == "hello there"
        assert (answer.language, answer.language_prob) == ("en", None)
        assert answer.duration == 2.0
        (segment,) = answer.segments
        assert (segment.start, segment.end, segment.text) == (0.0, 1.0, " hello there")
        assert 0 <= answer.timings.queue_s <= answer.timings.total_s
        until(lambda: transcriber.stats().tokens == len(segment.tokens) + 2)
        stats = transcriber.stats()
        assert (stats.accepted, stats.ok, stats.windows, stats.retries) == (1, 1, 1, 0)
        assert (stats.audio_s, stats.mean_batch, stats.queued) == (2.0, 1.0, 0)
        assert stats.rtfx == pytest.approx(2.0 / stats.busy_s)
        quiescent(transcriber, runtime)

    def test_an_answer_tells_when_what_was_done(self, start, echo):
        transcriber, _ = start(echo)
        began = time.time()
        answer = transcriber.transcribe(request("hello there", audio=noise(70.0)))
        ended = time.time()
        phases = {phase.name: phase for phase in answer.phases}
        assert list(phases) == [phase.name for phase in answer.phases], "each once, in order"
        assert phases.keys() == {"queue.decoder", "decode", "queue.slot", "encode", "steps"}
        assert all(began - 0.1 <= p.begin <= p.end <= ended + 0.1 for p in answer.phases)
        assert phases["queue.decoder"].end == phases["decode"].begin
        assert phases["queue.slot"].end == phases["encode"].begin
        assert {phases[name].windows for name in ("decode", "encode", "steps")} == {3}
        assert phases["steps"].busy_s == pytest.approx(answer.timings.decode_s)

    def test_an_answers_tokens_are_the_first_guess_at_longer_audio(self, start, echo):
        transcriber, runtime = start(echo)
        shorter = transcriber.transcribe(request("hello there", audio=noise(2.0)))
        longer = transcriber.transcribe(request("hello", audio=noise(40.0), draft=shorter.tokens))
        assert longer.text == "hello hello"
        assert shorter.tokens[1:-1] == shorter.segments[0].tokens
        assert [job.draft for job in runtime.jobs] == [(), shorter.tokens, ()]

    def test_without_timestamps_a_window_is_one_segment(self, start, echo):
        transcriber, runtime = start(echo)
        answer = transcriber.transcribe(request("one two", audio=noise(3.0), timestamps=False))
        assert [(s.start, s.end, s.text) for s in answer.segments] == [(0.0, 3.0, " one two")]
        assert runtime.jobs[0].options.timestamps is False

    def test_silence_gives_no_text(self, start, tokenizer):
        transcriber, _ = start(Echo(tokenizer, no_speech_prob=0.9, **UNSURE))
        answer = transcriber.transcribe(request(language=None))
        assert (answer.text, answer.segments, answer.language) == ("", (), "es")

    def test_the_same_request_is_decoded_the_same_way(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, **UNSURE))
        for _ in range(2):
            transcriber.transcribe(request(audio=noise(50.0)))
        options = [(job.options.temperature, job.options.seed) for job in runtime.jobs]
        half = len(options) // 2
        assert sorted(options[:half]) == sorted(options[half:])
        seeds = {seed for _, seed in options}
        assert len(seeds) == half, "every window and temperature has its own seed"


class TestWindows(TranscriberTests):
    """Decoding again, finding the language, the order of segments."""

    def test_an_unsure_window_is_decoded_again_hotter(self, start, tokenizer):
        sure_at = 0.4
        transcriber, runtime = start(
            lambda job: Echo(
                tokenizer, avg_logprob=-0.1 if job.options.temperature >= sure_at else -3
            )(job)
        )
        answer = transcriber.transcribe(request())
        assert [job.options.temperature for job in runtime.jobs] == [0.0, 0.2, 0.4]
        assert [s.temperature for s in answer.segments] == [0.4]
        stats = transcriber.stats()
        assert (stats.windows, stats.retries) == (1, 2)

    def test_if_all_fail_the_likeliest_attempt_stands(self, start, tokenizer):
        def script(job):
            at_best = job.options.temperature == 0.5
            return Echo(tokenizer, avg_logprob=-2.0 if at_best else -3.0)(job)

        transcriber, runtime = start(script, temperatures=(0.0, 0.5, 1.0))
        answer = transcriber.transcribe(request())
        assert [(s.text, s.temperature) for s in answer.segments] == [(" hello", 0.5)]
        assert [job.options.temperature for job in runtime.jobs] == [0.0, 0.5, 1.0]

    def test_a_loop_is_decoded_again_as_any_repetition(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, loops=50), temperatures=(0.0, 0.5))
        answer = transcriber.transcribe(request("no " * 60))
        found = [(job.options.temperature, job.loop_tokens, job.draft) for job in runtime.jobs]
        assert found == [(0.0, 24, ()), (0.5, 24, ())]
        assert len(answer.segments[0].tokens) == 49, "as far as it got"
        fixed = transcriber.transcribe(request("no " * 60, temperature=0.2))
        assert len(runtime.jobs) == 3 and fixed.segments[0].tokens == answer.segments[0].tokens
        until(lambda: transcriber.stats().loops == 3)
        assert transcriber.stats().retries == 1

    def test_what_was_ended_as_a_loop_and_is_none_goes_on(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, loops=4))
        text = "the quick brown fox jumps over it"
        for temperature in (None, 0.2):
            answer = transcriber.transcribe(request(text, temperature=temperature))
            assert answer.text == text
            first, second = runtime.jobs[-2:]
            assert first.options == second.options
            assert (first.loop_tokens, second.loop_tokens) == (24, 0)
            assert len(second.draft) == 4

    def test_loops_end_at_once_for_whom_wants_it(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, loops=50))
        wanted = request("no " * 60, temperature=0.0, unfinished=True)
        answer = transcriber.transcribe(wanted)
        (job,) = runtime.jobs
        assert job.loop_tokens == LOOP_START
        assert len(answer.segments[0].tokens) == 49 - LOOP_START, "without what showed the loop"

    def test_a_search_reaches_the_jobs_of_its_temperatures(self, start, tokenizer):
        able = dataclasses.replace(CAPABILITIES, beam_width=5, search_options=True)
        transcriber, runtime = start(
            Echo(tokenizer, **UNSURE), able, temperatures=(0.0, 0.5), beam_size=4
        )
        transcriber.transcribe(request())
        transcriber.transcribe(request(beam_size=5, best_of=2, length_penalty=0.5))
        found = [job.options for job in runtime.jobs]
        assert [(o.beam_size, o.best_of) for o in found] == [(4, 1), (1, 4), (5, 1), (1, 2)]
        assert [o.length_penalty for o in found] == [1.0, 1.0, 0.5, 0.5]

    def test_the_language_of_the_first_window_is_that_of_the_rest(self, start, tokenizer):
        spanish = tokenizer.facts.languages["es"]
        transcriber, runtime = start(Echo(tokenizer, delay=5))
        answer = transcriber.transcribe(request(audio=noise(100.0), language=None))
        assert (answer.language, answer.language_prob) == ("es", 0.9)
        first, *rest = runtime.jobs
        assert len(rest) >= 3
        assert DETECT_LANGUAGE in first.prompt
        assert all(spanish in job.prompt and DETECT_LANGUAGE not in job.prompt for job in rest)
        assert runtime.log[:2] == [("submit", first.id), ("finish", first.id)]
        assert runtime.most_in_hand > 1, "the rest go together"

    def test_a_silent_window_does_not_name_the_language(self, start, tokenizer):
        german = tokenizer.facts.languages["de"]
        order = []

        def script(job):
            order.append(job)
            silent = {"no_speech_prob": 0.9, **UNSURE} if len(order) == 1 else {"language": german}
            return Echo(tokenizer, **silent)(job)

        transcriber, runtime = start(script)
        answer = transcriber.transcribe(request(audio=noise(100.0), language=None))
        assert answer.language == "de"
        detecting = [DETECT_LANGUAGE in job.prompt for job in runtime.jobs]
        assert detecting == [True, True] + [False] * (len(detecting) - 2)

    def test_segments_come_in_order_as_soon_as_they_are_final(self, start, tokenizer):
        facts = tokenizer.facts
        seen = []

        def script(job):  # the later a window, the sooner it is done; each says its own letter
            seen.append(job)
            text = tokenizer.previous_text(chr(ord("a") + len(seen) - 1))
            return Play(
                (facts.timestamp_begin, *text, facts.timestamp_begin + 100), 4000 - 900 * len(seen)
            )

        capabilities = dataclasses.replace(CAPABILITIES, max_windows=4)
        transcriber, runtime = start(script, capabilities)
        client = Client().send(transcriber, request(audio=noise(80.0), vad=False))
        answer = client.transcript
        finished = [job_id for what, job_id in runtime.log if what == "finish"]
        assert finished != sorted(finished), "the windows did not end in reverse"
        *news, _ = client.events
        assert [event.segment for event in news] == list(answer.segments)
        assert answer.text == " ".join("abcdefgh"[: len(answer.segments)])
        starts = [segment.start for segment in answer.segments]
        assert len(starts) >= 3
        assert starts == sorted(starts)
        assert starts[0] == 0.0
        assert starts[-1] > 45.0

    def test_a_short_request_goes_next_beside_many_long_ones(self, start, tokenizer):
        """However much audio was sent before it."""
        transcriber, runtime = start(Echo(tokenizer, delay=300))
        minutes = request("long", audio=noise(20.0), sample_rate=1_000)  # 320 s
        long = [Client().send(transcriber, minutes) for _ in range(4)]
        until(lambda: len(runtime.jobs) > 8)
        before = len(runtime.jobs)
        short = Client().send(transcriber, request("short"))
        assert short.transcript.text == "short"
        texts = [tokenizer.decode(job.prompt) for job in runtime.jobs[before:]]
        first = next(i for i, text in enumerate(texts) if "short" in text)
        # While its second of audio was decoded and the device thread went round.
        assert first <= 4 * CAPABILITIES.max_windows
        assert not any(client.ended.is_set() for client in long)
        for client in long:
            client.handle.cancel()
            assert isinstance(client.error, CancelledError)
        quiescent(transcriber, runtime)

    def test_the_first_text_does_not_wait_for_the_last_audio(self, start, echo):
        """What is wrong with the end of the audio is told after its first segments, once."""
        transcriber, runtime = start(echo)
        audio = noise(110.0)
        audio[-1] = np.nan
        client = Client().send(transcriber, request(audio=audio))
        assert "NaN" in str(client.error)
        *segments, _ = client.events
        assert len(segments) >= 2
        assert all(isinstance(event, SegmentReady) for event in segments)
        stats = transcriber.stats()
        assert (stats.failed, stats.ok, stats.audio_s) == (1, 0, 0.0)
        quiescent(transcriber, runtime)

    def test_long_audio_does_not_fill_the_runtime(self, start, echo):
        transcriber, runtime = start(echo, step_s=0)
        answer = transcriber.transcribe(request("so", audio=noise(300.0)))
        assert len(runtime.jobs) >= 10
        assert len(answer.text.split()) == len(runtime.jobs)
        assert runtime.most_in_hand <= 2 * CAPABILITIES.max_windows
