"""Handing out windows: fair between requests, bounded, and no job is lost."""

import dataclasses
import types

import pytest
import torch

from serve.contract.errors import OptionError
from serve.runtime.protocol import DecodingOptions
from serve.speech.windows import AudioWindow
from serve.transcriber.active import ActiveRequest
from serve.transcriber.decoding_plan import DecodingPlan
from serve.transcriber.dispatch import Dispatcher
from tests.fakes import CAPABILITIES, FakeRuntime, Play

SLOTS = 2


@pytest.fixture(autouse=True)
def cheap_features(monkeypatch):
    """A window's features hold its first sample, padded with zeros."""
    monkeypatch.setattr("serve.speech.features.log_mel", lambda samples, filters: samples)
    monkeypatch.setattr("serve.transcriber.dispatch.WINDOW_LENGTHS", ())  # no graph of nothing


def make(script=lambda job: Play(), **capabilities):
    capabilities = {"max_windows": SLOTS, **capabilities}
    runtime = FakeRuntime(script, dataclasses.replace(CAPABILITIES, **capabilities))
    return Dispatcher(runtime, torch.zeros(80, 201)), runtime


def make_active(id, windows, prompt_tokens=1, priority="file", samples=10):
    options = DecodingOptions(max_tokens=10)
    plan = DecodingPlan((1,) * prompt_tokens, "en", options)
    made = ActiveRequest(id, plan, print, 0.0, 1e9, priority=priority)
    audio = [torch.full((samples,), id + i / 100).numpy() for i in range(windows)]
    for i, part in enumerate(audio):
        made.add_window(AudioWindow(i * 30.0, part, last=i == windows - 1))
    return made


def owners(runtime, since=0):
    """(request, window) of the jobs submitted, as their features say."""
    return [
        (int(first), round(first % 1 * 100))
        for first in (float(job.features[0]) for job in runtime.jobs[since:])
    ]


@pytest.mark.parametrize(("slots", "free"), [(1, -1), (3, -3), (4, 1), (63, 1), (64, 2), (256, 8)])
def test_windows_of_long_requests_leave_slots_free(slots, free):
    dispatcher, runtime = make(lambda job: Play(delay=10**9), max_windows=slots)
    dispatcher.enqueue(make_active(1, windows=300))
    for _ in range(slots):
        dispatcher.submit_windows()
        runtime.poll(0)
    assert not any(job.urgent for job in runtime.jobs)
    # Where slots are few none is left free, and as many windows wait in the runtime.
    assert len(runtime.jobs) == slots - free


def test_a_runtime_that_puts_short_ones_first_has_long_ones_waiting():
    """For full encoder batches; and there is room for short ones beside them."""
    dispatcher, runtime = make(lambda job: Play(delay=10**9), max_windows=8, urgent_first=True)
    dispatcher.enqueue(make_active(1, windows=300))
    for _ in range(8):
        dispatcher.submit_windows()
    assert len(runtime.jobs) == 12
    dispatcher.enqueue(make_active(2, windows=1))
    dispatcher.submit_windows()
    assert owners(runtime)[12:] == [(2, 0)]


def test_short_windows_go_first_and_those_of_like_lengths_in_order_of_arrival():
    dispatcher, runtime = make()
    for id, seconds in enumerate((29, 16, 30, 14, 2, 20), 1):
        dispatcher.enqueue(make_active(id, windows=1, samples=16_000 * seconds))
    dispatcher.submit_windows()
    assert [id for id, _ in owners(runtime)] == [4, 5, 1, 2]


def test_only_windows_are_urgent_and_stay_so_when_decoded_again():
    dispatcher, runtime = make(max_windows=4)
    for id, windows in ((1, 2), (2, 1)):
        dispatcher.enqueue(make_active(id, windows))
    dispatcher.submit_windows()
    events = [event for event in runtime.poll(0) if event.finished]
    for event in events[:2]:
        dispatcher.retry(dispatcher.record(event), 0.4)
    assert owners(runtime) == [(2, 0), (1, 0), (1, 1), (2, 0), (1, 0)]
    assert [job.urgent for job in runtime.jobs] == [True, False, False, True, False]


def test_while_somebody_streams_live_text_alone_is_urgent(monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("serve.transcriber.dispatch.time", clock)
    dispatcher, runtime = make(lambda job: Play(delay=10**9), max_windows=8, urgent_first=True)

    def come(id, priority):
        dispatcher.enqueue(make_active(id, windows=1, priority=priority))
        dispatcher.submit_windows()

    come(1, "live")
    for id in range(2, 20):
        come(id, "file")
    assert len(runtime.jobs) == 1 + 12, "as many as of long requests"
    come(20, "live")
    assert owners(runtime)[-1] == (20, 0)
    assert [job.urgent for job in runtime.jobs] == [True, *[False] * 12, True]
    now[0] += 60.0
    come(21, "file")
    assert runtime.jobs[-1].urgent and len(runtime.jobs) == 2 * 8, (
        "short ones again, till it is full"
    )


@pytest.mark.gpu
def test_pinned_memory_is_not_written_again_before_it_is_copied():
    """The copies wait behind a busy GPU while the host goes on to the next windows."""
    dispatcher, runtime = make(max_windows=80, device="cuda")
    dispatcher.enqueue(make_active(1, windows=60))
    dispatcher.submit_windows()  # the memory is there
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    while len(runtime.jobs) < 60:
        dispatcher.submit_windows()
    assert owners(runtime) == [(1, i) for i in range(60)]
    assert all(not job.features[10:].any() for job in runtime.jobs)


def test_short_windows_are_padded_and_long_batches_are_split():
    dispatcher, runtime = make(max_windows=20)
    dispatcher.enqueue(make_active(1, windows=12))
    dispatcher.submit_windows()
    assert len(runtime.jobs) == 8
    features = runtime.jobs[0].features
    assert features.shape == (480_000,)
    assert features[:10].tolist() == [1.0] * 10
    assert not features[10:].any()
    dispatcher.submit_windows()
    assert owners(runtime) == [(1, i) for i in range(12)]
    assert dispatcher.windows == 12


def test_a_refused_window_is_told_and_does_not_stay():
    dispatcher, runtime = make()
    too_long = make_active(1, windows=1, prompt_tokens=448)
    dispatcher.enqueue(too_long)
    dispatcher.enqueue(make_active(2, windows=1))
    ((refused, error),) = dispatcher.submit_windows()
    assert refused is too_long
    assert isinstance(error, OptionError)
    assert owners(runtime) == [(2, 0)]
    assert dispatcher.windows == 1


@pytest.mark.parametrize(
    ("told", "waiting"), [({}, 2), ({"streaming": False}, 0)], ids=["tells", "tells not"]
)
def test_a_request_waits_until_the_runtime_is_heard_to_work_on_it(told, waiting):
    """Windows wait in the runtime, too: it is handed twice as many as it has slots."""
    dispatcher, runtime = make(lambda job: Play((7, 8)), **told)
    requests = [make_active(id, windows=1) for id in range(1, 2 * SLOTS + 1)]
    for active in requests:
        dispatcher.enqueue(active)
    dispatcher.submit_windows()
    assert len(runtime.jobs) == 2 * SLOTS
    for event in runtime.poll(0):
        dispatcher.record(event)
    assert sum(active.started_s is None for active in requests) == waiting
