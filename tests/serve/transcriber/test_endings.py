"""The transcriber over a fake runtime: every ending a request can have, and their count."""

import collections
import random
import threading
import time

import numpy as np
import pytest
import torch

from serve.contract.config import TranscriberConfig
from serve.contract.errors import (
    AudioError,
    CancelledError,
    DeadlineError,
    EarshotError,
    OverloadedError,
)
from serve.contract.messages import RequestFailed, RequestFinished, SegmentReady
from serve.runtime.protocol import DecodingOptions
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.transcriber import audio_decoder_pool, request_tracker
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.dispatch import Dispatcher
from serve.transcriber.request_tracker import RequestTracker
from tests.fakes import Echo, FakeRuntime
from tests.harness import (
    FOREVER,
    WAIT_S,
    Client,
    TranscriberTests,
    clock_of,
    noise,
    quiescent,
    request,
    until,
)

KINDS = ["plain", "unsure", "wrong", "long", "detect", "noise", "plain", "plain"]
LONG = noise(40.0)


def moody(tokenizer):
    """A script: windows take their time, and do what their prompt's first word says."""
    dice = random.Random(7)

    def script(job):
        text = tokenizer.decode(job.prompt)
        play = {"delay": dice.randrange(6)}
        if "wrong" in text:
            play["error"] = EarshotError("scripted")
        if "unsure" in text and job.options.temperature < 0.3:
            play["avg_logprob"] = -3.0
        return Echo(tokenizer, **play)(job)

    return script


def request_of_kind(kind, i):
    options = {
        "detect": {"language": None},
        "long": {"audio": LONG},
        "noise": {"audio": b"neither music nor speech", "sample_rate": None},
    }
    return request(f"{kind} {i}", **options.get(kind, {}))


def send_many(transcriber, user, sent):
    """Send 30 requests, cancelling a fifth of them sooner or later."""
    dice = random.Random(user)
    for i in range(user * 30, user * 30 + 30):
        kind = dice.choice(KINDS)
        client = Client().send(transcriber, request_of_kind(kind, i))
        sent.append((kind, i, client))
        if i % 5 == 0:
            time.sleep(dice.choice([0, 0, 0.001, 0.01]))
            client.handle.cancel()


def ending(kind, i, client):
    """How a request ended, having checked that it may end so."""
    if isinstance(client.terminal, RequestFinished):
        words = client.transcript.text.split()
        windows = len(words) // 2
        assert words == [kind, str(i)] * windows, "another request's answer"
        assert windows >= (2 if kind == "long" else 1)
        return "ok"
    if isinstance(client.error, CancelledError):
        assert i % 5 == 0
        return "cancelled"
    assert kind in ("wrong", "noise"), client.error
    return "failed"


def held_up(monkeypatch):
    """Hold up the decoding of audio: the times of blocks that came, and what lets them go on."""
    blocks, go_on, honest = [], threading.Event(), audio.check_values

    def check_values(block, start_s):
        blocks.append(start_s)
        assert go_on.wait(WAIT_S)
        honest(block, start_s)

    monkeypatch.setattr("serve.speech.audio.check_values", check_values)
    return blocks, go_on


class TestEndings(TranscriberTests):
    """Each request ends exactly once, and harms no other."""

    @pytest.mark.parametrize("audio", [b"not audio at all", b"", np.zeros(0, np.float32)])
    def test_bad_audio_ends_its_request_only(self, start, echo, audio):
        transcriber, runtime = start(echo)
        rate = None if isinstance(audio, bytes) else SAMPLE_RATE
        with pytest.raises(AudioError):
            transcriber.transcribe(request(audio=audio, sample_rate=rate))
        assert transcriber.stats().failed == 1
        quiescent(transcriber, runtime)

    def test_an_unforeseen_fault_in_decoding_ends_its_request_only(self, start, echo, monkeypatch):
        transcriber, runtime = start(echo)
        with monkeypatch.context() as patch:
            patch.setattr("serve.speech.cutting.cut_long", lambda *_, **__: 1 / 0)
            with pytest.raises(EarshotError, match="ZeroDivisionError"):
                transcriber.transcribe(request())
        quiescent(transcriber, runtime)

    def test_too_many_requests_are_refused_until_one_ends(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, delay=FOREVER), max_pending=3)
        clients = [Client().send(transcriber, request()) for _ in range(3)]
        with pytest.raises(OverloadedError, match=r"^3 requests are pending"):
            transcriber.submit(request(), Client())
        clients[1].handle.cancel()
        assert isinstance(clients[1].error, CancelledError)
        clients.append(Client().send(transcriber, request()))
        until(lambda: runtime.gauges().busy_slots == 3)
        stats = transcriber.stats()
        assert (stats.accepted, stats.rejected, stats.pending) == (4, 1, 3)

    def test_too_much_audio_is_refused_until_some_is_decoded(self, start, tokenizer, monkeypatch):
        """What counts is the audio as it was sent, and only until its last window is cut."""
        script = Echo(tokenizer, delay=FOREVER)
        monkeypatch.setattr(request_tracker, "MAX_PENDING_MB", 20)
        transcriber, _ = start(script)
        _, go_on = held_up(monkeypatch)
        long = request(audio=noise(163.0), sample_rate=2_000)  # 9.95 MiB
        clients = [Client().send(transcriber, long) for _ in range(2)]
        with pytest.raises(OverloadedError, match=r"19\.9 MiB .* adds 9\.9 MiB; .* is 20 MiB"):
            transcriber.submit(long, Client())
        clients.append(Client().send(transcriber, request()))
        clients[0].handle.cancel()
        assert isinstance(clients[0].error, CancelledError)
        clients.append(Client().send(transcriber, long))
        with pytest.raises(OverloadedError):
            transcriber.submit(long, Client())
        assert transcriber.stats().rejected == 2
        go_on.set()

    def test_audio_counts_until_it_is_decoded(self, start, tokenizer, monkeypatch):
        script = Echo(tokenizer, delay=FOREVER)
        monkeypatch.setattr(request_tracker, "MAX_PENDING_MB", 1)
        transcriber, runtime = start(script)
        for slots in (1, 2):
            Client().send(transcriber, request(audio=noise(14.0)))  # 0.85 MiB
            until(lambda: runtime.gauges().busy_slots == slots)  # noqa: B023 - at once
            until(lambda: not transcriber._decoders.working)

    @pytest.mark.parametrize(
        ("limit", "message"),
        [
            ({"MAX_SAMPLES": 1e6}, "expected at most 1 million"),
            ({"MAX_DECODE_S": 1e-9}, "more CPU time than the 1e-09 s allowed"),
            ({}, "expected at most 99 s"),
        ],
    )
    def test_audio_beyond_a_budget_ends_its_request_only(
        self, start, echo, monkeypatch, limit, message
    ):
        for name, value in limit.items():
            monkeypatch.setattr(audio_decoder_pool, name, value)
        transcriber, runtime = start(echo, max_audio_s=3600.0 if limit else 99.0)
        client = Client().send(transcriber, request(audio=noise(100.0)))
        assert isinstance(client.error, AudioError)
        assert message in str(client.error)
        if "MAX_DECODE_S" not in limit:
            quiescent(transcriber, runtime)

    def test_hundreds_of_mixed_requests_end_exactly_once_each(self, start, tokenizer):
        waits = {"max_pending": 1000, "request_timeout_s": 10 * WAIT_S}
        transcriber, runtime = start(moody(tokenizer), step_s=0, **waits)
        sent = []
        users = [
            threading.Thread(target=send_many, args=(transcriber, user, sent)) for user in range(4)
        ]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join(WAIT_S)
        endings = collections.Counter(ending(*each) for each in sent)
        assert len(sent) == 120
        assert endings.keys() == {"ok", "cancelled", "failed"}
        until(lambda: transcriber.stats().pending == 0)
        stats = transcriber.stats()
        assert {"ok": stats.ok, "cancelled": stats.cancelled, "failed": stats.failed} == endings
        assert (stats.accepted, stats.timed_out, stats.rejected) == (120, 0, 0)
        quiescent(transcriber, runtime)
        assert collections.Counter(ending(*each) for each in sent) == endings, "news after the end"

    def test_a_request_that_takes_too_long_ends_with_an_error(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, delay=FOREVER), request_timeout_s=0.5)
        client = Client().send(transcriber, request("stuck"))
        assert isinstance(client.error, DeadlineError)
        until(lambda: runtime.gauges().queued + runtime.gauges().busy_slots == 0)
        assert (transcriber.stats().timed_out, transcriber.stats().pending) == (1, 0)
        assert transcriber.healthy

    def test_a_deadline_holds_while_audio_is_decoded(self, start, echo, monkeypatch):
        go_on = threading.Event()
        monkeypatch.setattr("serve.speech.cutting.cut_long", lambda *_, **__: go_on.wait(WAIT_S))
        transcriber, _ = start(echo, request_timeout_s=0.2)
        client = Client().send(transcriber, request())
        assert isinstance(client.error, DeadlineError)
        go_on.set()

    def test_cancelling_ends_the_decoding_of_the_audio(self, start, tokenizer, monkeypatch):
        """At its next block, and nothing of the request is left."""
        transcriber, runtime = start(Echo(tokenizer), decode_workers=1)
        with monkeypatch.context() as patch:
            blocks, go_on = held_up(patch)
            client = Client().send(transcriber, request(audio=noise(600.0)))
            until(lambda: blocks)
            client.handle.cancel()
            assert isinstance(client.error, CancelledError)
            go_on.set()
        assert transcriber.transcribe(request("after")).text == "after"
        assert (len(blocks), len(runtime.jobs)) == (1, 1), "the only worker decoded the rest first"
        quiescent(transcriber, runtime)

    def test_draining_finishes_what_was_accepted_and_refuses_the_rest(self, start, tokenizer):
        transcriber, _ = start(Echo(tokenizer, delay=5))
        clients = [Client().send(transcriber, request(f"{i}")) for i in range(20)]
        transcriber.drain(WAIT_S)
        assert all(client.ended.is_set() for client in clients)
        assert [client.transcript.text for client in clients] == [f"{i}" for i in range(20)]
        with pytest.raises(OverloadedError, match="shutting down"):
            transcriber.submit(request(), Client())

    def test_draining_waits_for_the_last_answer_to_be_delivered(self, start, echo):
        transcriber, _ = start(echo)
        begun, slow, delivered = threading.Event(), threading.Event(), threading.Event()

        def on_event(event):
            if isinstance(event, RequestFinished):
                begun.set()
                slow.wait(0.3)
                delivered.set()

        transcriber.submit(request(), on_event)
        assert begun.wait(WAIT_S)
        transcriber.drain(WAIT_S)
        assert delivered.is_set()

    def test_closing_ends_what_is_left_after_draining(self, start, tokenizer):
        transcriber, runtime = start(Echo(tokenizer, delay=FOREVER))
        clients = [Client().send(transcriber, request(audio=noise(40.0))) for _ in range(9)]
        transcriber.drain(0.05)
        assert transcriber.stats().pending == 9
        transcriber.close()
        transcriber.close()
        assert all(isinstance(client.error, CancelledError) for client in clients)
        assert runtime.closed
        assert not transcriber.healthy
        with pytest.raises(OverloadedError):
            transcriber.transcribe(request())

    @pytest.mark.parametrize("fails_on", [SegmentReady, RequestFinished])
    def test_a_client_that_raises_harms_nobody_else(self, start, echo, fails_on):
        transcriber, runtime = start(echo)
        seen = []

        def on_event(event):
            seen.append(type(event))
            if isinstance(event, fails_on):
                raise RuntimeError("this client is broken")

        transcriber.submit(request(audio=noise(100.0)), on_event)
        until(lambda: transcriber.stats().ended == 1)
        until(lambda: seen[-1] is not SegmentReady)
        if fails_on is SegmentReady:
            assert seen == [SegmentReady, RequestFailed]
            assert transcriber.stats().cancelled == 1
        else:
            assert seen.count(RequestFinished) == 1
        quiescent(transcriber, runtime)

    def test_an_interrupted_wait_cancels_its_request(self, start, tokenizer, monkeypatch):
        transcriber, _ = start(Echo(tokenizer, delay=FOREVER))

        def interrupt(self, timeout=None):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                transcriber.transcribe(request())
        until(lambda: transcriber.stats().cancelled == 1)


def test_busy_time_is_that_with_something_pending(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(request_tracker, "time", clock_of(lambda: now[0]))
    ledger = RequestTracker(TranscriberConfig())
    plan = DecodingPlan((1,), "en", DecodingOptions())

    def end(active):
        ledger.remove(active, "ok")
        ledger.mark_answered()

    def busy_s():
        runtime = FakeRuntime(print)
        return ledger.stats(Dispatcher(runtime, torch.zeros(80, 201)), runtime.gauges()).busy_s

    first = ledger.accept(plan, print, 0)
    now[0] = 101.0
    second = ledger.accept(plan, print, 0)
    now[0] = 103.0
    assert busy_s() == 3.0, "also while it lasts"
    end(first)
    now[0] = 104.0
    end(second)
    now[0] = 150.0
    assert busy_s() == 4.0
