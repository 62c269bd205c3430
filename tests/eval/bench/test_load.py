"""Load in a closed and in an open loop, on a clock that only the runtime moves."""

import collections
import functools
import itertools

import pytest

from eval.bench import runtime_load as load_module
from eval.bench.runtime_load import WindowLoad, closed_loop, offline, open_loop
from serve.contract.errors import DeadlineError, DeviceError
from serve.runtime.protocol import DecodingOptions, Gauges, Job, JobEvent

BROKE = DeviceError("it broke")


def in_full(job, missing=0):
    """How a window ends: with its tokens in two events."""
    tokens = (7,) * (job.options.max_tokens - missing)
    return JobEvent(job.id, tokens[:1]), JobEvent(job.id, tokens[1:], "length")


class OneSecondEach:
    """A runtime with one slot: every poll takes a second and ends the oldest window.

    It stands in for the module `time`, too.
    """

    def __init__(self, end=in_full, together=1):
        self._end = end
        self._together = together  # so many windows end in one poll
        self._waiting = collections.deque()
        self.now, self.max_queued, self.steps = 100.0, 0, 0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def submit(self, job):
        self._waiting.append(job)
        self.max_queued = max(self.max_queued, len(self._waiting))

    def poll(self, timeout_s):
        self.now += 1.0
        if self._together > 1 and self.now % self._together:
            return []
        ending = [self._waiting.popleft() for _ in range(min(self._together, len(self._waiting)))]
        self.steps += len(ending)
        return [event for job in ending for event in self._end(job)]

    def gauges(self):
        return Gauges(0, 0, self.steps, self.steps, 0, self.steps, 0.25 * self.steps, self.steps)


@pytest.fixture
def load_of(monkeypatch):
    """Makes a load of jobs without features, and its runtime."""

    def make(**kind):
        runtime, ids = OneSecondEach(**kind), itertools.count()
        monkeypatch.setattr(load_module, "time", runtime)

        def make_jobs(lengths):
            assert 0 < len(lengths) <= 3
            options = [DecodingOptions(max_tokens=length) for length in lengths]
            return [Job(next(ids), None, (1,), option) for option in options]

        return WindowLoad(runtime, make_jobs, 3), runtime

    return make


def test_a_closed_loop_keeps_the_runtime_full_and_counts_after_the_warm_up(load_of):
    load, runtime = load_of()
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


def test_windows_that_end_together_are_counted_by_whole_rounds(load_of):
    """A round of 4 takes 4 s; by the clock alone 10 s would count two of them, 0.8 a second."""
    load, _ = load_of(together=4)
    found = closed_loop(load, itertools.repeat(5), slots=4, in_flight=4, seconds=10.0)
    assert (found["windows"], found["windows_per_s"]) == (12, 1.0)


def test_windows_at_hand_at_the_start_are_timed_with_fill_and_drain(load_of):
    load, runtime = load_of()
    assert offline(load, [2] * 11, in_flight=5) == 11.0
    assert runtime.max_queued == 5 and load.in_flight == 0


def test_latency_counts_from_when_an_arrival_was_due(load_of):
    """The second is due while the runtime holds the host: its wait may not be left out."""
    load, _ = load_of()
    assert open_loop(load, [0.5, 0.75, 9.0], length=4, warm_s=0.6) == [1.75, 1.0]
    assert load.in_flight == 0


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        (functools.partial(in_full, missing=1), AssertionError, "1 tokens short"),
        (lambda job: [JobEvent(job.id, (), "error", error=BROKE)], DeviceError, "it broke"),
        (lambda job: [], DeadlineError, "no window ended for 120 s, with 1 in the runtime"),
    ],
)
def test_a_window_that_does_not_end_as_forced_ends_the_bench(load_of, end, error, message):
    load, _ = load_of(end=end)
    load.submit([5])
    with pytest.raises(error, match=message):
        load.drain()
