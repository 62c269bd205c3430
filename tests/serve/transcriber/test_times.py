"""Times in a request's answer, and the time during which requests were pending."""

import weakref

import numpy as np

from serve.contract.config import TranscriberConfig
from serve.runtime.protocol import DecodingOptions, Scores
from serve.speech.features import SAMPLE_RATE
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import AudioWindow
from serve.transcriber.active import ActiveRequest
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.request_tracker import RequestTracker
from tests.fakes import fake_engine
from tests.harness import clock_of

SCORES = Scores(
    avg_logprob=-0.1,
    no_speech_prob=0.0,
    language=None,
    language_prob=None,
    encode_s=0.25,
    decode_s=0.5,
)


def test_samples_go_with_their_job_and_times_add_up(tmp_path, monkeypatch):
    tokenizer = Tokenizer.open(fake_engine(tmp_path))
    prompt = tokenizer.prompt_ids("en", "transcribe", True, "")
    active = ActiveRequest(1, DecodingPlan(prompt, "en", DecodingOptions(), False), print, 5.0, 1e9)
    times = iter([7.0, 9.0])
    monkeypatch.setattr("serve.transcriber.active.time", clock_of(lambda: next(times)))
    active.mark_started()
    begin = tokenizer.facts.timestamp_begin
    for index, text in enumerate((" one", " two")):
        samples = np.zeros(10 * SAMPLE_RATE, np.float32)
        active.add_window(AudioWindow(10.0 * index, samples, last=index == 1))
        _, window = active.next_window()
        kept = weakref.ref(window)
        del window
        assert kept() is None, "the samples are kept while they are decoded"
        tokens = (begin + 50, *tokenizer.text_ids("prefix", text, 9), begin + 100)
        active.judge_attempt(index, 0.0, tokens, SCORES, tokenizer, TranscriberConfig())
    active.stitch_ready(tokenizer)
    answer = active.transcript()
    assert (answer.text, answer.duration) == ("one two", 20.0)
    assert (answer.timings.queue_s, answer.timings.total_s) == (2.0, 4.0)
    assert (answer.timings.encode_s, answer.timings.decode_s) == (0.5, 1.0)


def test_busy_time_is_that_with_something_pending(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("serve.transcriber.request_tracker.time", clock_of(lambda: now[0]))
    ledger, plan = (
        RequestTracker(TranscriberConfig()),
        DecodingPlan((1,), "en", DecodingOptions(), False),
    )

    def end(active):
        ledger.remove(active, "ok")
        ledger.mark_answered()

    first = ledger.accept(plan, print, 0)
    now[0] = 101.0
    second = ledger.accept(plan, print, 0)
    now[0] = 103.0
    assert ledger.counters()[0].busy_s == 3.0, "also while it lasts"
    end(first)
    now[0] = 104.0
    end(second)
    now[0] = 150.0
    assert ledger.counters()[0].busy_s == 4.0
