"""Bugs while one request is worked on: it ends with an error, its neighbours do not notice."""

import threading
import time

import pytest
import torch

from serve.contract.config import TranscriberConfig
from serve.contract.errors import CancelledError, DeadlineError, DeviceError, EarshotError
from serve.contract.messages import RequestFinished
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.active import ActiveRequest
from serve.transcriber.loop import Transcriber
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

CURSED = noise(100.0, 0.2)
LOUD = 0.75  # some samples of the cursed request are above this, no others
PLACES = ["log_mel", "next_window", "decode"]
DECODE = Tokenizer.decode  # as it is before anything is planted


def faulty(honest, is_cursed):
    """A function that has a bug with the cursed request and is honest with others."""

    def planted(*args, **options):
        if is_cursed(*args, **options):
            raise ZeroDivisionError("planted")
        return honest(*args, **options)

    return planted


def plant(monkeypatch, place, tokenizer):
    """Plant a bug in one of the places where a single request is worked on."""

    def says(tokens):
        return "cursed" in DECODE(tokenizer, tokens)

    faults = {
        "log_mel": (
            "serve.speech.features.log_mel",
            lambda samples, filters: torch.zeros(len(samples), len(filters), 1),
            lambda samples, filters: bool(abs(samples).max() > LOUD),
        ),
        "next_window": (
            "serve.transcriber.active.ActiveRequest.next_window",
            ActiveRequest.next_window,
            lambda self: says(self.plan.texts.before),
        ),
        "decode": (
            "serve.speech.tokenizer.Tokenizer.decode",
            DECODE,
            lambda self, tokens: says(tokens),
        ),
    }
    target, honest, is_cursed = faults[place]
    monkeypatch.setattr(target, faulty(honest, is_cursed))


def moody(tokenizer):
    """A script: the neighbour of the cursed request takes its time."""

    def script(job):
        cursed = "cursed" in DECODE(tokenizer, job.prompt)
        return Echo(tokenizer, delay=0 if cursed else 50)(job)

    return script


def one_error(client, *words):
    """Check that a request ended in exactly one error, which names the bug."""
    assert type(client.error) is EarshotError
    for word in words:
        assert word in str(client.error)


class TestOneRequestsBug(TranscriberTests):
    """A bug while one request is worked on ends that request alone."""

    @pytest.mark.parametrize("place", PLACES)
    def test_it_ends_that_request_alone(self, start, tokenizer, monkeypatch, caplog, place):
        plant(monkeypatch, place, tokenizer)
        transcriber, runtime = start(moody(tokenizer))
        good = Client().send(transcriber, request("fine", audio=noise(60.0)))
        bad = Client().send(transcriber, request("cursed", audio=CURSED))
        one_error(bad, "ZeroDivisionError('planted')")
        assert set(good.transcript.text.split()) == {"fine"}
        assert "Traceback" in caplog.text, "the log tells where"
        stats = transcriber.stats()
        assert (stats.accepted, stats.ok, stats.failed, stats.pending) == (2, 1, 1, 0)
        quiescent(transcriber, runtime)
        one_error(bad)  # nothing came after it
        assert isinstance(good.terminal, RequestFinished)

    def test_its_other_windows_are_withdrawn(self, start, tokenizer, monkeypatch):
        plant(monkeypatch, "decode", tokenizer)
        seen = []

        def script(job):  # all but the first window would decode for ever
            seen.append(job)
            return Echo(tokenizer, delay=0 if len(seen) == 1 else FOREVER)(job)

        transcriber, runtime = start(script)
        bad = Client().send(transcriber, request("cursed", audio=CURSED))
        one_error(bad, "ZeroDivisionError")
        until(lambda: runtime.gauges().queued + runtime.gauges().busy_slots == 0)
        ended = [job_id for what, job_id in runtime.log if what != "submit"]
        assert sorted(ended) == [job.id for job in runtime.jobs]
        assert transcriber.healthy


class TestTheRuntimesFault(TranscriberTests):
    """What the runtime itself raises is everyone's end."""

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            ("submit", DeviceError("a bug")),
            ("poll", ZeroDivisionError("a bug")),
            ("cancel", ZeroDivisionError("a bug")),
        ],
    )
    def test_it_ends_every_request(self, start, tokenizer, monkeypatch, call, error):
        transcriber, runtime = start(Echo(tokenizer, delay=FOREVER))
        first = Client().send(transcriber, request())
        until(lambda: runtime.gauges().busy_slots == 1)

        def broken(*args):
            raise error

        monkeypatch.setattr(runtime, call, broken)
        second = Client().send(transcriber, request())
        if call == "cancel":
            first.handle.cancel()
            assert isinstance(first.error, CancelledError)
        for client in (first, second)[call == "cancel" :]:
            assert isinstance(client.error, DeviceError)
            assert ("internal error" in str(client.error)) != isinstance(error, DeviceError)
        until(lambda: not transcriber.healthy)
        with pytest.raises(DeviceError, match="a bug"):
            transcriber.submit(request(), Client())
        assert transcriber.stats().pending == 0

    def test_log_mel_on_a_broken_device_is_everyones(self, start, echo, monkeypatch):
        def broken(samples, filters):
            raise torch.AcceleratorError("an illegal memory access was encountered")

        transcriber, _ = start(echo)
        monkeypatch.setattr("serve.speech.features.log_mel", broken)
        client = Client().send(transcriber, request())
        assert isinstance(client.error, DeviceError)
        assert "illegal memory access" in str(client.error)
        until(lambda: not transcriber.healthy)


class TestAHangingRuntime(TranscriberTests):
    """A poll that does not return harms no caller for ever, and is reported."""

    @pytest.fixture
    def hang(self, engine, echo, monkeypatch):
        """Start a transcriber with one request pending; polls hang until the test ends."""
        go_on = threading.Event()

        def hang(timeout_s=WAIT_S, **waits):
            runtime, polls = FakeRuntime(echo), threading.Event()

            def poll(timeout_s):
                polls.set()
                assert go_on.wait(WAIT_S)
                return []

            monkeypatch.setattr(runtime, "poll", poll)
            config = TranscriberConfig(request_timeout_s=timeout_s, vad="off")
            transcriber = Transcriber(engine, runtime, config, **waits)
            transcriber.submit(request(), Client())
            assert polls.wait(WAIT_S)
            return transcriber

        yield hang
        go_on.set()

    @pytest.mark.parametrize(("timeout_s", "limit_s"), [(30.0, 60.0), (1000.0, 1000.0)])
    def test_it_is_unhealthy_after_a_minute_or_the_longest_request(
        self, hang, monkeypatch, timeout_s, limit_s
    ):
        begun_s = time.monotonic()
        transcriber = hang(timeout_s)
        hangs_s = time.monotonic()
        monkeypatch.setattr("serve.transcriber.loop.time", clock_of(lambda: begun_s + limit_s - 1))
        assert transcriber.healthy
        monkeypatch.setattr("serve.transcriber.loop.time", clock_of(lambda: hangs_s + limit_s + 1))
        assert not transcriber.healthy

    def test_being_idle_for_long_is_healthy(self, start, echo, monkeypatch):
        transcriber, _ = start(echo)
        transcriber.transcribe(request())
        until(lambda: transcriber.stats().pending == 0)
        monkeypatch.setattr("serve.transcriber.loop.time", clock_of(lambda: 1e12))
        assert transcriber.healthy

    def test_a_caller_gives_up_a_little_after_the_deadline(self, hang):
        transcriber = hang(timeout_s=0.02, grace_s=0.01)
        with pytest.raises(DeadlineError, match=r"no answer after 0.03 s; the device hangs"):
            transcriber.transcribe(request())

    def test_closing_gives_up_and_says_so(self, hang, caplog):
        hang(join_s=0.01).close()
        assert "the device thread did not stop within 0.01 s" in caplog.text
