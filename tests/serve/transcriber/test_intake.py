"""Decoding a little ahead: bounded memory, nothing forgotten, nothing decoded for the departed."""

import collections
import dataclasses
import gc
import threading
import time
import weakref

import numpy as np
import pytest

from serve.contract.config import TranscriberConfig
from serve.contract.errors import AudioError
from serve.contract.messages import Request
from serve.runtime.protocol import DecodingOptions
from serve.speech.features import SAMPLE_RATE
from serve.speech.windows import Window
from serve.transcriber.active import ActiveRequest
from serve.transcriber.intake import LOOK_AHEAD, Intake
from serve.transcriber.plan import Plan
from tests.serve.speech.sounds import encode, tone

WAIT_S = 30.0
SLOTS = 3
MAX_AHEAD = 2 * SLOTS


def request(seconds):
    return Request(np.zeros(round(seconds * SAMPLE_RATE), np.float32), sample_rate=SAMPLE_RATE)


SECOND, LONG = request(1), request(600)


def make_active(id):
    return ActiveRequest(id, Plan((1,), "en", DecodingOptions(), False), print, 0.0, 1e9)


def until(condition):
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.001)


class Harness:
    """An intake, and what it said."""

    def __init__(self, workers=2):
        self.said = []  # (request, window or error), in order
        config = TranscriberConfig(decode_workers=workers)
        self.intake = Intake(config, SLOTS, self.note, self.note, lambda active, request: None)

    def note(self, active, news):
        self.said.append((active.id, news))

    def settle(self):
        """Wait until the workers have nothing more that they may do."""
        until(lambda: self.intake._working == 0)

    def wait_for(self, count):
        """Wait until so much was said."""
        until(lambda: len(self.said) >= count)

    def windows(self):
        """How many windows each request has been given."""
        return collections.Counter(id for id, _ in self.said)


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.intake.close()


@pytest.fixture
def alone():
    """With one worker, so that all happens in a certain order."""
    made = Harness(workers=1)
    yield made
    made.intake.close()


def pause(harness):
    """Keep the only worker busy; returns what lets it go on."""
    go_on = threading.Event()
    harness.intake._workers.submit(go_on.wait, WAIT_S)
    return go_on


@pytest.mark.parametrize("format", ["WAV", "FLAC"])  # of which the first needs no library
def test_what_is_there_of_cut_audio_is_taken_where_the_plan_says_so(harness, format):
    data = encode(tone(seconds=20), format)
    cut = Request(data[: len(data) // 2])
    strict, lenient = make_active(0), make_active(1)
    lenient.set_plan(dataclasses.replace(lenient.plan, partial=True))
    for active in (strict, lenient):
        harness.intake.add(active, cut)
    harness.settle()
    (_, error), (_, window) = sorted(harness.said, key=lambda said: said[0])
    assert isinstance(error, AudioError) and "cut short" in str(error)
    assert window.last and window.duration_s == pytest.approx(10.0, abs=2.0)
    assert lenient.warnings[0].startswith("audio is cut short or damaged:")
    assert "of the 20.00 s it declares" in lenient.warnings[0]


def test_a_request_is_decoded_only_so_far_ahead(harness):
    active = make_active(0)
    harness.intake.add(active, LONG)
    harness.settle()
    assert len(harness.said) == LOOK_AHEAD == harness.intake.held_windows()
    for taken in range(1, 17):
        harness.intake.taken(active)
        harness.settle()
        assert len(harness.said) == min(LOOK_AHEAD + taken, 21)
    starts = [window.start_s for _, window in harness.said]
    assert starts == sorted(starts)


def test_many_requests_are_decoded_only_so_far_ahead_but_for_their_first_windows(harness):
    requests = [make_active(id) for id in range(20)]
    for each in requests:
        harness.intake.add(each, LONG)
    harness.settle()
    assert harness.windows().keys() == set(range(20)), "nobody's first window waits for memory"
    assert len(harness.said) == harness.intake.held_windows() == 20 + MAX_AHEAD
    harness.intake.add(make_active(20), SECOND)
    harness.settle()
    assert harness.windows()[20] == 1
    for each in requests:
        harness.intake.release(each)
    assert harness.intake.held_windows() == 1


def test_ended_requests_let_others_be_decoded(harness):
    requests = [make_active(id) for id in range(20)]
    for each in requests:
        harness.intake.add(each, LONG)
    harness.settle()
    waiting = [each for each in requests if harness.windows()[each.id] == 1]
    assert len(waiting) >= 20 - MAX_AHEAD
    for each in requests:
        if each not in waiting:
            harness.intake.release(each)
    harness.settle()
    assert sum(harness.windows()[each.id] - 1 for each in waiting) >= MAX_AHEAD


def test_all_of_it_arrives_whatever_the_bound(harness):
    """Windows are taken as they come; each request's are all decoded, in order, exactly once."""
    requests = [make_active(id) for id in range(5)]
    for each in requests:
        harness.intake.add(each, LONG)
    taken = 0
    while taken < 5 * 21:
        harness.wait_for(taken + 1)
        id, _ = harness.said[taken]
        harness.intake.taken(requests[id])
        taken += 1
        assert harness.intake.held_windows() <= 5 + MAX_AHEAD
    for each in requests:
        windows = [window for id, window in harness.said if id == each.id]
        assert [w.start_s for w in windows] == sorted({w.start_s for w in windows})
        assert sum(w.duration_s for w in windows) == 600.0
        assert [w.last for w in windows] == [False] * (len(windows) - 1) + [True]
    assert (harness.intake._ahead, harness.intake.held_windows()) == (0, 0)


def test_what_ended_before_its_turn_is_not_decoded(alone):
    go_on = pause(alone)
    requests = [make_active(id) for id in range(5)]
    for each in requests:
        alone.intake.add(each, SECOND)
    for each in requests[2:]:
        alone.intake.release(each)
    go_on.set()
    alone.settle()
    assert [id for id, _ in alone.said] == [0, 1]
    assert alone.intake.held_ids() == {0, 1}


def stop_inside(monkeypatch):
    """Let the resampling of a block wait; returns what tells that it began, and lets it go on."""
    begun, go_on, blocks = threading.Event(), threading.Event(), []
    honest = np.clip

    def clip(block, *bounds):
        blocks.append(len(block))
        begun.set()
        assert go_on.wait(WAIT_S)
        return honest(block, *bounds)

    monkeypatch.setattr("serve.speech.audio.np.clip", clip)
    return begun, go_on, blocks


def test_closing_ends_what_is_decoded_at_the_next_block(alone, monkeypatch):
    begun, go_on, blocks = stop_inside(monkeypatch)
    for id in range(4):
        alone.intake.add(make_active(id), LONG)
    assert begun.wait(WAIT_S)
    alone.intake.close()
    go_on.set()
    for worker in list(alone.intake._workers._threads):
        worker.join(WAIT_S)
        assert not worker.is_alive()
    assert (len(blocks), alone.said) == (1, [])


def test_a_request_may_end_while_a_worker_frees_its_audio(alone, monkeypatch):
    """As one does at its last window, in which nobody speaks, and others as the server stops."""
    begun, go_on = threading.Event(), threading.Event()

    def blocks(*_):
        try:
            yield np.zeros(SAMPLE_RATE, np.float32)
        finally:
            begun.set()
            assert go_on.wait(WAIT_S)

    monkeypatch.setattr("serve.speech.audio.from_samples", blocks)
    monkeypatch.setattr("serve.transcriber.intake.cut_and_listen", cut_at_each_block)
    active = make_active(0)
    alone.intake.add(active, SECOND)
    assert begun.wait(WAIT_S)
    alone.intake.release(active)
    alone.intake.close()
    go_on.set()
    alone.settle()


def cut_at_each_block(blocks, _):
    for block in blocks:
        yield Window(0.0, block, last=True)


def freed(samples):
    gc.collect()
    return samples() is None


@pytest.mark.parametrize("how", ["release", "close", "decoded"])
def test_audio_is_freed(harness, how):
    active = make_active(0)
    sent = request(40 if how == "decoded" else 600)
    samples = weakref.ref(sent.audio)
    harness.intake.add(active, sent)
    del sent
    harness.settle()
    if how == "release":
        assert not freed(samples), "the rest is still to be decoded"
        harness.intake.release(active)
    elif how == "close":
        harness.intake.close()
    assert freed(samples)
