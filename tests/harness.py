"""What the transcriber's tests share: clients that keep account, requests, and a way to start."""

import dataclasses
import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serve.contract.config import TranscriberConfig
from serve.contract.messages import Request, RequestFailed, RequestFinished, SegmentReady
from serve.speech.features import SAMPLE_RATE
from serve.speech.tokenizer import Tokenizer
from serve.transcriber.loop import Transcriber
from tests.fakes import CAPABILITIES, Echo, FakeRuntime, fake_engine
from tests.waits import WAIT_S, wait_until

ABLE = dataclasses.replace(CAPABILITIES, words=True)  # times words
FOREVER = 10**9  # polls
UNSURE = {"avg_logprob": -3.0}  # below the threshold: decode again


class Client:
    """Collects what happens to one request."""

    def __init__(self):
        self.events = []
        self.ended = threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if not isinstance(event, SegmentReady):
            self.ended.set()

    def send(self, transcriber, request):
        self.handle = transcriber.submit(request, self)
        return self

    @property
    def terminal(self):
        assert self.ended.wait(WAIT_S), "no terminal event"
        found = [event for event in self.events if not isinstance(event, SegmentReady)]
        assert len(found) == 1, found
        assert self.events[-1] is found[0], "an event after the terminal one"
        return found[0]

    @property
    def transcript(self):
        assert isinstance(self.terminal, RequestFinished), self.terminal
        return self.terminal.transcript

    @property
    def error(self):
        assert isinstance(self.terminal, RequestFailed), self.terminal
        return self.terminal.error


def clock_of(seconds):
    """A `time` for one module, as a test sets it; other modules keep the real one.

    A server that tests share is watched by a thread of this process.
    """
    return SimpleNamespace(monotonic=seconds)


def noise(seconds, level=0.1):
    samples = np.random.default_rng(0).standard_normal(round(seconds * SAMPLE_RATE)) * level
    return samples.astype(np.float32)


SHORT = noise(1.0)


def request(prompt="hello", audio=SHORT, **options):
    options = {"language": "en", "sample_rate": SAMPLE_RATE, **options}
    return Request(audio, prompt=prompt, **options)


until = functools.partial(wait_until, look_s=0.001)


def quiescent(transcriber, runtime):
    """Wait until nothing is left anywhere, then check that the transcriber still works."""
    until(lambda: transcriber.stats().pending == 0)
    until(lambda: runtime.gauges().queued + runtime.gauges().busy_slots == 0)
    transcriber.transcribe(request())
    until(lambda: nothing_is_kept(transcriber))
    assert transcriber.healthy


def nothing_is_kept(transcriber):
    """Whether no audio, queued window or job is left of requests, which have all ended."""
    dispatcher = transcriber._dispatcher
    return not transcriber._decoders._tasks and dispatcher.idle and not dispatcher._long_jobs


class TranscriberTests:
    """Base of test classes: fixtures that start transcribers over fake runtimes."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory):
        return fake_engine(tmp_path_factory.mktemp("engine"))

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, engine):
        return Tokenizer(engine)

    @pytest.fixture
    def echo(self, tokenizer):
        return Echo(tokenizer)

    @pytest.fixture(autouse=True)
    def cheap_features(self, monkeypatch):
        """The fake runtime does not look at features."""
        monkeypatch.setattr(
            "serve.speech.features.log_mel",
            lambda samples, filters: torch.zeros(len(samples), len(filters), 1),
        )

    @pytest.fixture
    def start(self, engine):
        """Start a transcriber over a script; at the end each is closed and its books checked."""
        started = []

        def start(script, capabilities=CAPABILITIES, step_s=0.0005, on=engine, **config):
            runtime = FakeRuntime(script, capabilities, step_s=step_s)
            # It says noise. What is doubted is asked for twice, of which test_short.py tells.
            usual = {"request_timeout_s": WAIT_S, "vad": "off", "short_encoder": "off"}
            # Its idle thread looks round so seldom that who relies on that waits in vain.
            settings = TranscriberConfig(**{**usual, **config})
            transcriber = Transcriber(on, runtime, settings, idle_s=10 * WAIT_S)
            started.append((transcriber, runtime))
            return transcriber, runtime

        yield start
        for transcriber, runtime in started:
            transcriber.close()
            stats = transcriber.stats()
            assert stats.pending == 0
            assert stats.accepted == stats.ended
            assert nothing_is_kept(transcriber)
            assert runtime.closed
