"""One request's state: which window may go, what is kept of it, what the answer says."""

import dataclasses
import weakref

import numpy as np
import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.runtime.protocol import DecodingOptions, Scores
from serve.speech.features import SAMPLE_RATE
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Window
from serve.transcriber.active import ActiveRequest
from serve.transcriber.plan import Plan
from tests.fakes import fake_engine
from tests.harness import clock_of

CONFIG = TranscriberConfig(temperatures=(0.0, 0.5))
SCORES = Scores(
    avg_logprob=-0.1,
    no_speech_prob=0.0,
    language=None,
    language_prob=None,
    encode_s=0.25,
    decode_s=0.5,
)
UNSURE = dataclasses.replace(SCORES, avg_logprob=-3.0)
SILENCE = dataclasses.replace(UNSURE, no_speech_prob=0.9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(fake_engine(tmp_path_factory.mktemp("engine")))


@pytest.fixture
def make(tokenizer):
    """Make a request of windows of ten seconds."""

    def make(windows=3, language="en", fixed_temperature=False):
        prompt = tokenizer.prompt_ids(language, "transcribe", True, "")
        options = DecodingOptions(max_tokens=99)
        plan = Plan(prompt, language, options, fixed_temperature)
        active = ActiveRequest(1, plan, print, 5.0, 1e9)
        samples = np.zeros(10 * SAMPLE_RATE, np.float32)
        for i in range(windows):
            active.add_window(Window(10.0 * i, samples, last=i == windows - 1))
        return active

    return make


@pytest.fixture
def finish(tokenizer):
    """Let a window say some text from its second 1 to 2; returns what `judge_attempt` does."""

    def finish(active, index, text="hello", scores=SCORES, temperature=0.0):
        facts = tokenizer.facts
        prompt = tokenizer.prompt_ids("en", "transcribe", True, text)
        words = prompt[1 : prompt.index(facts.sot)]
        begin = facts.timestamp_begin
        tokens = (begin + 50, *words, begin + 100)
        return active.judge_attempt(index, temperature, tokens, scores, tokenizer, CONFIG)

    return finish


def test_windows_go_in_order_and_all_at_once(make):
    active = make(windows=2)
    assert active.duration_s == 20.0
    assert active.ready
    assert [active.next_window()[0] for _ in range(2)] == [0, 1]
    assert not active.ready
    with pytest.raises(AssertionError, match="request 1 has no window"):
        active.next_window()


def test_without_audio_nothing_is_ready_or_complete():
    active = ActiveRequest(1, Plan((1,), "en", DecodingOptions(), False), print, 0.0, 1e9)
    assert not active.ready
    assert not active.complete
    assert (active.ended, active.started_s, active.duration_s) == (False, None, 0.0)


def test_windows_come_one_by_one_and_only_the_last_completes(finish, tokenizer):
    prompt = tokenizer.prompt_ids("en", "transcribe", True, "")
    active = ActiveRequest(1, Plan(prompt, "en", DecodingOptions(), False), print, 0.0, 1e9)
    samples = np.zeros(SAMPLE_RATE, np.float32)
    active.add_window(Window(0.0, samples))
    assert (active.duration_s, active.next_window()[0]) == (1.0, 0)
    finish(active, 0)
    assert active.stitch_ready(tokenizer)
    assert not active.complete, "more may come"
    assert not active.ready
    active.add_window(Window(1.0, samples, last=True))
    assert (active.duration_s, active.ready, active.complete) == (2.0, True, False)
    assert active.next_window()[0] == 1
    finish(active, 1)
    active.stitch_ready(tokenizer)
    assert active.complete
    with pytest.raises(AssertionError, match="has had its last window"):
        active.add_window(Window(2.0, samples))


def test_short_requests_rank_before_all_others_and_then_who_has_had_least(make):
    short, long = make(windows=1), make(windows=3)
    ten_s = 10 * SAMPLE_RATE
    assert (short.is_short, short.rank) == (True, (0, ten_s))
    assert (long.is_short, long.rank) == (False, (1, ten_s))
    long.next_window()
    assert long.rank == (2, ten_s)
    long.next_window()
    assert (long.is_short, long.rank) == (False, (3, ten_s)), "the last of several is not the only"


def test_what_is_submitted_is_not_kept(make):
    active = make(windows=1)
    _, window = active.next_window()
    samples = weakref.ref(window)
    del window
    assert samples() is None


def test_seeds_differ_by_window_and_temperature_alone(make):
    active = make(windows=40)
    seeds = [active.options(i, t).seed for i in range(40) for t in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert len(set(seeds)) == len(seeds)
    assert active.options(0, 0.0).seed == 0
    assert active.options(2, 1.0).seed == 2999
    options = active.options(1, 0.2)
    assert (options.temperature, options.max_tokens, options.timestamps) == (0.2, 99, True)


def test_the_first_job_starts_the_clock(make, monkeypatch):
    times = iter([7.0, 8.0])
    monkeypatch.setattr("serve.transcriber.active.time", clock_of(lambda: next(times)))
    active = make()
    assert active.started_s is None
    active.mark_started()
    active.mark_started()
    assert active.started_s == 7.0


def test_segments_wait_for_the_windows_before_them(make, finish, tokenizer):
    active = make()
    assert finish(active, 1, "two") is None
    assert active.stitch_ready(tokenizer) == []
    assert finish(active, 0, "one") is None
    segments = active.stitch_ready(tokenizer)
    assert [(s.text, s.start, s.end) for s in segments] == [
        (" one", 1.0, 2.0),
        (" two", 11.0, 12.0),
    ]
    assert active.stitch_ready(tokenizer) == []
    assert not active.complete
    finish(active, 2, "three")
    active.stitch_ready(tokenizer)
    assert active.complete


def test_the_answer_has_the_text_and_the_times(make, finish, tokenizer, monkeypatch):
    active = make(windows=2)
    times = iter([7.0, 9.0])
    monkeypatch.setattr("serve.transcriber.active.time", clock_of(lambda: next(times)))
    active.mark_started()
    for index, text in enumerate(("one", "two")):
        finish(active, index, text)
    active.stitch_ready(tokenizer)
    answer = active.transcript()
    assert (answer.text, answer.duration) == ("one two", 20.0)
    assert (answer.language, answer.language_prob) == ("en", None)
    assert [segment.text for segment in answer.segments] == [" one", " two"]
    timings = answer.timings
    assert (timings.queue_s, timings.total_s) == (2.0, 4.0)
    assert (timings.encode_s, timings.decode_s) == (0.5, 1.0)


def test_an_incomplete_request_has_no_answer(make, finish, tokenizer):
    active = make()
    active.mark_started()
    finish(active, 0)
    active.stitch_ready(tokenizer)
    with pytest.raises(AssertionError):
        active.transcript()


def test_an_unsure_attempt_is_not_kept(make, finish, tokenizer):
    active = make(windows=1)
    assert finish(active, 0, "wrong", UNSURE) == 0.5
    assert active.stitch_ready(tokenizer) == []
    assert finish(active, 0, "right", temperature=0.5) is None
    (segment,) = active.stitch_ready(tokenizer)
    assert (segment.text, segment.temperature) == (" right", 0.5)


@pytest.mark.parametrize(("logprobs", "best"), [((-2.0, -3.0), 0), ((-3.0, -2.0), 1)])
def test_of_attempts_that_all_failed_the_likeliest_is_kept(make, finish, tokenizer, logprobs, best):
    active = make(windows=2)
    for text, temperature, logprob in zip(("cold", "hot"), (0.0, 0.5), logprobs, strict=True):
        scores = dataclasses.replace(UNSURE, avg_logprob=logprob)
        retry = finish(active, 0, text, scores, temperature)
    assert retry is None, "no higher temperature is left"
    assert finish(active, 1, "another", temperature=0.5) is None
    first, other = active.stitch_ready(tokenizer)
    expected = [(" cold", 0.0), (" hot", 0.5)][best]
    assert (first.text, first.temperature, first.avg_logprob) == (*expected, logprobs[best])
    assert other.text == " another", "each window has its own attempts"


def test_a_beam_is_for_temperature_0_and_samples_for_the_rest(make):
    active = make()
    searched = dataclasses.replace(
        active.plan.options, beam_size=5, best_of=3, patience=2.0, repetition_penalty=1.5
    )
    active.plan = dataclasses.replace(active.plan, options=searched)
    cold, hot = active.options(0, 0.0), active.options(0, 0.2)
    assert (cold.beam_size, cold.best_of) == (5, 1)
    assert (hot.beam_size, hot.best_of) == (1, 3)
    assert (hot.patience, hot.repetition_penalty) == (2.0, 1.5)


def test_a_temperature_of_the_clients_own_is_final(make, finish):
    assert finish(make(fixed_temperature=True), 0, "wrong", UNSURE) is None


def test_silence_is_done_and_says_nothing(make, finish, tokenizer):
    active = make(windows=1)
    assert finish(active, 0, "thanks for watching", SILENCE) is None
    assert active.stitch_ready(tokenizer) == []
    assert active.complete


def test_windows_go_one_at_a_time_until_the_language_is_known(make, finish, tokenizer):
    languages = tokenizer.facts.languages
    active = make(windows=4, language=None)
    active.next_window()
    assert not active.ready, "the first is not decoded yet"
    german = {"language": languages["de"], "language_prob": 0.4}
    finish(active, 0, scores=dataclasses.replace(SILENCE, **german))
    assert active.ready, "silence names no language, so the next goes alone"
    assert DETECT_LANGUAGE in active.prompt(1).ids
    active.next_window()
    assert not active.ready
    spanish = {"language": languages["es"], "language_prob": 0.8}
    finish(active, 1, scores=dataclasses.replace(SCORES, **spanish))
    assert active.prompt(2).ids == tokenizer.prompt_ids("es", "transcribe", True, "")
    active.next_window()
    assert active.ready, "all others go together"
    finish(active, 2)
    finish(active, 3)
    active.mark_started()
    active.stitch_ready(tokenizer)
    answer = active.transcript()
    assert (answer.language, answer.language_prob) == ("es", 0.8)


def test_a_runtime_that_detects_nothing_is_told_off(make, finish):
    with pytest.raises(AssertionError, match="asked for the language and named none"):
        finish(make(language=None), 0)
