"""Load in a closed and in an open loop, on a clock that only the runtime moves."""

import collections
import itertools

import pytest

from eval.bench import runtime_load as load_module
from eval.bench.runtime_load import WindowLoad, closed_loop, offline, open_loop
from serve.contract.errors import DeadlineError, DeviceError
from serve.runtime.protocol import DecodingOptions, Gauges, Job, JobEvent


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class OneSecondEach:
    """A runtime with one slot: every poll with work takes a second and ends the oldest window."""

    def __init__(self, clock, short_by=0, stuck=(), error=None, together=1):
        self._clock, self._short_by, self._stuck, self._error = clock, short_by, stuck, error
        self._together = together  # so many windows end in one poll
        self._waiting = collections.deque()
        self.max_queued = self.steps = 0

    def submit(self, job):
        self._waiting.append(job)
        self.max_queued = max(self.max_queued, len(self._waiting))

    def poll(self, timeout_s):
        events = []
        self._clock.now += 1.0
        if self._together > 1 and self._clock.now % self._together:
            return events
        for _ in range(min(self._together, len(self._waiting))):
            if self._waiting[0].id in self._stuck:
                break
            job = self._waiting.popleft()
            self.steps += 1
            tokens = (7,) * (job.options.max_tokens - self._short_by)
            finished = "error" if self._error else "length"
            events.append(JobEvent(job.id, tokens[:1]))
            events.append(JobEvent(job.id, tokens[1:], finished, error=self._error))
        return events

    def gauges(self):
        return Gauges(0, 0, self.steps, self.steps, 0, self.steps, 0.25 * self.steps, self.steps)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load_module, "time", clock)
    return clock


def load_of(clock, **kind):
    """A load of jobs without features, and its runtime."""
    runtime, ids = OneSecondEach(clock, **kind), itertools.count()

    def make_jobs(lengths):
        assert 0 < len(lengths) <= 3
        return [
            Job(next(ids), None, (1,), DecodingOptions(max_tokens=length)) for length in lengths
        ]

    return WindowLoad(runtime, make_jobs, 3), runtime


def test_a_closed_loop_keeps_the_runtime_full_and_counts_after_the_warm_up(clock):
    load, runtime = load_of(clock)
    found = closed_loop(load, itertools.repeat(5), 4, 7, 10.0)
    assert found == {
        "windows_per_s": 1.0,
        "windows": 12,  # three rounds of 4 slots, not the 8 of the warm-up
        "seconds": 12.0,
        "step_ms": 1000.0,
        "encode_ms": 250.0,
        "busy_slots": 1.0,
    }
    assert runtime.max_queued == 7 and load.in_flight == 0


def test_windows_that_end_together_are_counted_by_whole_rounds(clock):
    """A round of 4 takes 4 s; by the clock alone 10 s would count two of them, 0.8 a second."""
    load, _ = load_of(clock, together=4)
    found = closed_loop(load, itertools.repeat(5), slots=4, in_flight=4, seconds=10.0)
    assert (found["windows"], found["windows_per_s"]) == (12, 1.0)


def test_windows_at_hand_at_the_start_are_timed_with_fill_and_drain(clock):
    load, runtime = load_of(clock)
    assert offline(load, [2] * 11, in_flight=5) == 11.0
    assert runtime.max_queued == 5 and load.in_flight == 0


def test_latency_counts_from_when_an_arrival_was_due(clock):
    """The second is due while the runtime holds the host: its wait may not be left out."""
    load, _ = load_of(clock)
    assert open_loop(load, [0.5, 0.75, 9.0], length=4, warm_s=0.6) == [1.75, 1.0]
    assert load.in_flight == 0


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ({"short_by": 1}, AssertionError, "1 tokens short"),
        ({"error": DeviceError("it broke")}, DeviceError, "it broke"),
        ({"stuck": (0,)}, DeadlineError, "no window ended for 120 s, with 1 in the runtime"),
    ],
)
def test_a_window_that_does_not_end_as_forced_ends_the_bench(clock, kind, error, message):
    load, _ = load_of(clock, **kind)
    load.submit([5])
    with pytest.raises(error, match=message):
        load.drain()
