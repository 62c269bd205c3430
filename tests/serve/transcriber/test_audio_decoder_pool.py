"""Decoding a little ahead: bounded memory, nothing forgotten, nothing decoded for the departed."""

import collections
import gc
import threading
import weakref

import numpy as np
import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.messages import Request
from serve.runtime.protocol import DecodingOptions
from serve.speech.cutting import cut
from serve.speech.features import SAMPLE_RATE
from serve.speech.windows import AudioWindow
from serve.transcriber.active import ActiveRequest
from serve.transcriber.audio_decoder_pool import LOOK_AHEAD, AudioDecoderPool
from serve.transcriber.decoding_plan import DecodingPlan
from tests.harness import WAIT_S, until
from tests.serve.speech.sounds import encode

SLOTS = 3
MAX_AHEAD = 2 * SLOTS


def request(seconds):
    return Request(np.zeros(round(seconds * SAMPLE_RATE), np.float32), sample_rate=SAMPLE_RATE)


LONG_S = 100.0
SECOND, LONG = request(1), request(LONG_S)
WINDOWS = len(list(cut([LONG.audio])))  # of the long one


def make_active(id, **plan):
    plan = DecodingPlan((1,), "en", DecodingOptions(), **plan)
    return ActiveRequest(id, plan, print, 0.0, 1e9)


class Harness:
    """An intake, and what it said."""

    def __init__(self, workers=2):
        self.said = []  # (request, window or error), in order
        config = TranscriberConfig(decode_workers=workers)
        self.intake = AudioDecoderPool(config, SLOTS, self.record, self.record, lambda active: None)

    def record(self, active, news):
        self.said.append((active.id, news))

    def submit(self, active):
        """As the device thread does with a request's next window."""
        active.submitted += 1
        self.intake.mark_submitted(active)

    def settle(self):
        """Wait until the workers have nothing more that they may do."""
        until(lambda: self.intake.working == 0)

    def windows(self):
        """How many windows each request has been given."""
        return collections.Counter(id for id, _ in self.said)


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.intake.close()


def test_a_request_is_decoded_only_so_far_ahead(harness):
    active = make_active(0)
    harness.intake.add(active, LONG)
    harness.settle()
    assert len(harness.said) == LOOK_AHEAD
    for taken in range(1, WINDOWS - LOOK_AHEAD + 1):
        harness.submit(active)
        harness.settle()
        assert len(harness.said) == LOOK_AHEAD + taken
    starts = [window.start_s for _, window in harness.said]
    assert starts == sorted(starts)


def test_many_requests_are_decoded_only_so_far_ahead_but_for_their_first_windows(harness):
    requests = [make_active(id) for id in range(8)]
    for each in requests:
        harness.intake.add(each, LONG)
    harness.settle()
    assert harness.windows().keys() == set(range(8)), "nobody's first window waits for memory"
    assert len(harness.said) == 8 + MAX_AHEAD
    harness.intake.add(make_active(8), SECOND)
    harness.settle()
    assert harness.windows()[8] == 1


def test_windows_of_silent_channels_do_not_count_as_decoded_ahead(harness):
    """They are never submitted, so other requests would wait for ever."""
    silence = Request(encode(np.zeros((SAMPLE_RATE, 2), np.float32), "WAV", "PCM_16"))
    ids = set(range(3 * MAX_AHEAD))
    for id in ids:
        harness.intake.add(make_active(id, vad="auto", channels=True), silence)
    until(lambda: {id for id, window in harness.said if window.last} == ids)


def test_all_of_it_arrives_whatever_the_bound(harness):
    """Windows are taken as they come; each request's are all decoded, in order, exactly once."""
    requests = [make_active(id) for id in range(5)]
    for each in requests:
        harness.intake.add(each, LONG)
    taken = 0
    while taken < 5 * WINDOWS:
        until(lambda: len(harness.said) > taken)  # noqa: B023 - at once
        id, _ = harness.said[taken]
        harness.submit(requests[id])
        taken += 1
        assert len(harness.said) - taken <= 5 + MAX_AHEAD
    for each in requests:
        windows = [window for id, window in harness.said if id == each.id]
        assert [w.start_s for w in windows] == sorted({w.start_s for w in windows})
        assert sum(w.duration_s for w in windows) == LONG_S
        assert [w.last for w in windows] == [False] * (len(windows) - 1) + [True]


def test_a_request_may_end_while_a_worker_frees_its_audio(monkeypatch):
    """As one does at its last window, which has no speech, and others as the server stops."""
    begun, go_on = threading.Event(), threading.Event()

    def blocks(*_):
        try:
            yield np.zeros(SAMPLE_RATE, np.float32)
        finally:
            begun.set()
            assert go_on.wait(WAIT_S)

    monkeypatch.setattr("serve.speech.audio.from_samples", blocks)
    monkeypatch.setattr("serve.speech.cutting.cut_long", cut_at_each_block)
    active, alone = make_active(0), Harness(workers=1)
    alone.intake.add(active, SECOND)
    assert begun.wait(WAIT_S)
    alone.intake.release(active)
    alone.intake.close()
    go_on.set()
    alone.settle()


def cut_at_each_block(blocks, *_, **__):
    for block in blocks:
        yield AudioWindow(0.0, block, last=True)


def freed(samples):
    if samples() is not None:
        gc.collect()
    return samples() is None


@pytest.mark.parametrize("how", ["release", "close", "decoded"])
def test_audio_is_freed(harness, how):
    active = make_active(0)
    sent = request(40 if how == "decoded" else 150)
    samples = weakref.ref(sent.audio)
    harness.intake.add(active, sent)
    del sent
    harness.settle()
    if how == "release":
        assert samples() is not None, "the rest is still to be decoded"
        harness.intake.release(active)
    elif how == "close":
        harness.intake.close()
    assert freed(samples)
