"""One request's state: which window may go, what is kept of it, what the answer says."""

import weakref

import numpy as np
import pytest

from serve.contract.config import TranscriberConfig
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(fake_engine(tmp_path_factory.mktemp("engine")))


@pytest.fixture
def make(tokenizer):
    """Make a request of windows of ten seconds."""

    def make(windows=3, language="en"):
        prompt = tokenizer.prompt_ids(language, "transcribe", True, "")
        options = DecodingOptions(max_tokens=99)
        plan = Plan(prompt, language, options, False)
        active = ActiveRequest(1, plan, print, 5.0, 1e9)
        samples = np.zeros(10 * SAMPLE_RATE, np.float32)
        for i in range(windows):
            active.add_window(Window(10.0 * i, samples, last=i == windows - 1))
        return active

    return make


@pytest.fixture
def finish(tokenizer):
    """Let a window say some text from its second 1 to 2; returns what `judge_attempt` does."""

    def finish(active, index, text="hello"):
        facts = tokenizer.facts
        prompt = tokenizer.prompt_ids("en", "transcribe", True, text)
        words = prompt[1 : prompt.index(facts.sot)]
        begin = facts.timestamp_begin
        tokens = (begin + 50, *words, begin + 100)
        return active.judge_attempt(index, 0.0, tokens, SCORES, tokenizer, CONFIG)

    return finish


def test_windows_go_in_order_and_all_at_once(make):
    active = make(windows=2)
    assert active.duration_s == 20.0
    assert active.ready
    assert [active.next_window()[0] for _ in range(2)] == [0, 1]
    assert not active.ready
    with pytest.raises(AssertionError, match="request 1 has no window"):
        active.next_window()


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


def test_what_is_submitted_is_not_kept(make):
    active = make(windows=1)
    _, window = active.next_window()
    samples = weakref.ref(window)
    del window
    assert samples() is None


def test_the_first_job_starts_the_clock(make, monkeypatch):
    times = iter([7.0, 8.0])
    monkeypatch.setattr("serve.transcriber.active.time", clock_of(lambda: next(times)))
    active = make()
    assert active.started_s is None
    active.mark_started()
    active.mark_started()
    active.mark_started(9.0)
    assert active.started_s == 7.0


def test_it_began_when_the_runtime_says(make):
    active = make()
    active.mark_started(5.0)
    assert active.started_s == 5.0


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


def test_a_runtime_that_detects_nothing_is_told_off(make, finish):
    with pytest.raises(AssertionError, match="asked for the language and named none"):
        finish(make(language=None), 0)
