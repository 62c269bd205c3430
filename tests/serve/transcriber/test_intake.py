"""Decoding ahead: bounded memory, nothing forgotten, nothing decoded for the departed."""

import queue
import threading

import numpy as np
import pytest

from serve.config import TranscriberConfig
from serve.errors import AudioError, OptionError
from serve.messages import Request
from serve.runtime.protocol import DecodingOptions
from serve.speech.features import SAMPLE_RATE
from serve.transcriber.active import ActiveRequest
from serve.transcriber.intake import Intake
from serve.transcriber.plan import Plan

WAIT_S = 30.0
SECOND = Request(np.zeros(SAMPLE_RATE, np.float32), sample_rate=SAMPLE_RATE)


@pytest.fixture
def news():
    return queue.SimpleQueue()


@pytest.fixture
def intake(news):
    """At most about four seconds of decoded audio."""
    config = TranscriberConfig(max_audio_s=1.0, decode_workers=2)
    made = Intake(config, lambda *args: news.put(args), lambda *args: news.put(args), nothing)
    yield made
    made.close()


def nothing(active, request):
    """To be done before a request's audio is decoded."""


def make_active(id):
    return ActiveRequest(id, Plan((1,), "en", DecodingOptions(), False), print, 0.0, 1e9)


def test_audio_becomes_windows_in_order_of_arrival(intake, news):
    requests = [make_active(i) for i in range(3)]
    for each in requests:
        intake.add(each, SECOND)
    got = {}
    for _ in requests:
        made, windows = news.get(timeout=WAIT_S)
        got[made.id] = windows
    assert sorted(got) == [0, 1, 2]
    assert all(len(windows) == 1 and windows[0].duration_s == 1.0 for windows in got.values())


def test_bad_audio_is_reported(intake, news):
    intake.add(make_active(0), Request(b"no sound here"))
    _, error = news.get(timeout=WAIT_S)
    assert isinstance(error, AudioError)


def test_what_comes_before_the_audio_may_refuse_a_request(news):
    def prepare(active, request):
        news.put("prepared")
        if active.id == 0:
            raise OptionError("wrong")

    def listen(*args):
        news.put(args)

    intake = Intake(TranscriberConfig(decode_workers=1), listen, listen, prepare)
    for id in range(2):
        intake.add(make_active(id), SECOND)
    heard = [news.get(timeout=WAIT_S) for _ in range(4)]
    assert heard[0] == heard[2] == "prepared"
    assert isinstance(heard[1][1], OptionError) and isinstance(heard[3][1], list)
    intake.close()


def test_decoding_pauses_while_memory_is_full(intake, news):
    requests = [make_active(i) for i in range(10)]
    for each in requests:
        intake.add(each, SECOND)
    first = [news.get(timeout=WAIT_S)[0] for _ in range(4)]
    # Two workers may each have begun one more before the fourth was counted.
    with pytest.raises(queue.Empty):
        for _ in range(2):
            first.append(news.get(timeout=0.2)[0])
        news.get(timeout=0.2)
    assert intake.held_ids() == set(range(10))
    ended = set()
    while len(ended) < 10:
        for each in first:
            intake.release(each)
            ended.add(each.id)
        first = [] if len(ended) == 10 else [news.get(timeout=WAIT_S)[0]]
    assert intake.held_ids() == set()


def test_decoding_pauses_as_soon_as_memory_is_full(news):
    """With one worker, which is idle again once it has taken something else."""
    config = TranscriberConfig(max_audio_s=1.0, decode_workers=1)
    intake = Intake(config, lambda *args: news.put(args), lambda *args: news.put(args), nothing)
    requests = [make_active(i) for i in range(6)]
    for each in requests:
        intake.add(each, SECOND)
    intake._workers.submit(int).result(WAIT_S)
    assert [news.get_nowait()[0].id for _ in range(news.qsize())] == [0, 1, 2, 3]
    intake.release(requests[1])
    intake._workers.submit(int).result(WAIT_S)
    assert [news.get_nowait()[0].id for _ in range(news.qsize())] == [4]
    intake.close()


def test_what_ended_before_its_turn_is_not_decoded(intake, news, monkeypatch):
    go_on = threading.Event()
    decoded = []

    def cut(samples):
        decoded.append(len(samples))
        assert go_on.wait(WAIT_S)
        return []

    monkeypatch.setattr("serve.transcriber.intake.cut", cut)
    requests = [make_active(i) for i in range(5)]
    for each in requests:
        intake.add(each, SECOND)
    for each in requests[2:]:
        intake.release(each)
    go_on.set()
    assert {news.get(timeout=WAIT_S)[0].id for _ in range(2)} == {0, 1}
    with pytest.raises(queue.Empty):
        news.get(timeout=0.1)
    assert len(decoded) == 2


def test_what_ended_while_it_was_decoded_holds_no_memory(intake, news, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def cut(samples):
        begun.set()
        assert go_on.wait(WAIT_S)
        return []

    monkeypatch.setattr("serve.transcriber.intake.cut", cut)
    gone = make_active(0)
    intake.add(gone, SECOND)
    assert begun.wait(WAIT_S)
    intake.release(gone)
    go_on.set()
    news.get(timeout=WAIT_S)
    assert intake.held_ids() == set()


def test_after_closing_nothing_more_is_decoded(intake, news):
    intake.close()
    intake.add(make_active(0), SECOND)
    with pytest.raises(queue.Empty):
        news.get(timeout=0.1)


def test_closing_drops_what_waits_for_memory(intake, news):
    for i in range(10):
        intake.add(make_active(i), SECOND)
    for _ in range(4):
        news.get(timeout=WAIT_S)
    intake.close()
    for worker in list(intake._workers._threads):
        worker.join(WAIT_S)
    decoded = 4 + news.qsize()
    assert len(intake.held_ids()) == decoded < 10


def test_closing_ends_the_workers(intake, news):
    intake.add(make_active(0), SECOND)
    news.get(timeout=WAIT_S)
    workers = list(intake._workers._threads)
    assert workers
    intake.close()
    for worker in workers:
        worker.join(WAIT_S)
        assert not worker.is_alive()
