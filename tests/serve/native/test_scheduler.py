"""Urgent windows go first, and the others still come to their end, with the same answers."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.config import RuntimeConfig
from serve.contract.engine import open_engine
from serve.native.runtime import NativeRuntime
from serve.native.scheduler import UrgentStepPolicy, WaitingQueue
from serve.native.slots import SlotPool
from serve.runtime.protocol import DecodingOptions
from tests.runtimes import mel_job
from tests.serve.native.decoding import ends

SLOTS = 4


def waiting(id, urgent=False, beam_size=1):
    return SimpleNamespace(id=id, urgent=urgent, options=DecodingOptions(beam_size=beam_size))


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(0, 4))
def test_urgent_windows_overtake_the_others_a_few_times_at_most(urgent, patience):
    line = WaitingQueue(patience)
    for id, each in enumerate(urgent):
        line.add(waiting(id, each))
    order = []
    while line:
        order += list(line)[:1]
        assert line.remove(order[-1].id)
    for kind in (True, False):
        ids = [job.id for job in order if job.urgent == kind]
        assert ids == [id for id, each in enumerate(urgent) if each == kind]
    for at, job in enumerate(order):
        passed = [before.id for before in order[:at] if before.id > job.id]
        assert len(passed) <= (0 if job.urgent else patience)
        # None stands still without need: who is behind an older other found it out of patience.
        if job.urgent and at and not order[at - 1].urgent:
            assert sum(before.id > order[at - 1].id for before in order[: at - 1]) == patience


def turns(wanted, decoding=(), slots=SLOTS, rows=12):
    """Turns, and the windows that decode; a window is how many rows it takes, below 0 urgent."""
    line, places = WaitingQueue(9), SlotPool(slots, rows)
    for id, each in enumerate(wanted):
        line.add(waiting(id, each < 0, abs(each)))
    busy = [waiting(100 + i, each < 0, abs(each)) for i, each in enumerate(decoding)]
    for job in busy:
        places.acquire(job.id, job.options.beam_size)
    return UrgentStepPolicy(line, places), busy


def fit(*wanted, **sizes):
    """How many of the windows that wait fit beside those that decode."""
    made, busy = turns(*wanted, **sizes)
    return made.fit(busy)


def test_urgent_windows_find_a_slot_and_rows_that_the_others_left():
    urgent, other = -3, 3
    assert fit([]) == 0
    assert fit([other] * 4) == 3
    assert fit([other] * 4, [other] * 2) == 1
    assert fit([other], [other] * 3) == 0
    assert fit([urgent], [other] * 3) == 1
    assert fit([urgent] * 4, [other] * 2) == 2
    assert fit([urgent, urgent, *[other] * 4]) == 2, "a batch of their own"
    assert fit([other] * 3, [other, urgent]) == 0, "not while urgent ones decode"
    assert fit([other] * 3, [1, 1], slots=8, rows=12) == 2, "rows for another like them"
    assert fit([1], [1, 1], rows=7) == 1
    assert fit([other], slots=1, rows=3) == fit([other], rows=4) == 1
    assert fit([other], [other], slots=2) == 1, "of few slots none is left free"
    assert fit([other] * 3, rows=7) == 2, "nor are rows, where few of them fit"


def test_windows_are_served_alike_while_the_others_leave_a_place_free():
    for wanted, decoding, sizes in [
        ([-3, -3, 3], [], {}),
        ([3, 3], [3, -3], {}),
        ([1, 1], [1, -1], {"rows": 4}),
    ]:
        made, busy = turns(wanted, decoding, **sizes)
        assert made.fit(busy) == len(wanted)
        assert made.paused(busy) == ()


def test_urgent_windows_have_half_of_the_time_alone():
    (made, both), spent = turns([1] * 3, [-1, 1]), {True: 0.0, False: 0.0}
    for _ in range(300):
        alone = bool(made.paused(both))
        seconds = 1.0 if alone else 3.5
        made.record(seconds, urgent_only=alone)
        spent[alone] += seconds
    assert spent[True] == pytest.approx(spent[False], rel=0.02)
    for kind in both:
        assert made.paused([kind]) == ()


@pytest.fixture
def job(nano_engine):
    return mel_job(open_engine(nano_engine))


@pytest.fixture
def runtime(nano_engine):
    config = RuntimeConfig(slots=SLOTS, rows=12, encoder_batch=1, threads=1)
    return NativeRuntime(open_engine(nano_engine), config)


def urgent(made):
    return dataclasses.replace(made, urgent=True)


def test_an_urgent_window_joins_at_once_where_many_wait(runtime, job):
    for id in range(3 * SLOTS):
        runtime.submit(job(id, max_tokens=400))
    for _ in range(2 * SLOTS):
        assert ends(runtime) == []
    before = runtime.gauges()
    runtime.submit(urgent(job(99, max_tokens=400)))
    assert ends(runtime) == []
    after = runtime.gauges()
    assert (before.busy_slots, after.busy_slots) == (SLOTS - 1, SLOTS)
    assert after.queued == before.queued
    assert after.step_slots - before.step_slots == 1, "the others rest"


def test_none_starves_where_there_is_always_an_urgent_window(runtime, job):
    options = [{"beam_size": 3}, {"best_of": 2, "temperature": 0.8}, {}]
    kinds = [job(id, max_tokens=20, **options[id % 3]) for id in range(6)]
    expected = {}
    for made in kinds:
        runtime.submit(made)
        while made.id not in expected:
            expected |= {event.job_id: event.tokens for event in ends(runtime)}
    for made in kinds:
        runtime.submit(made)
    ended, more = {}, itertools.count(100)
    for _ in range(3000):
        while runtime.gauges().queued + runtime.gauges().busy_slots < 6 + SLOTS - len(ended):
            runtime.submit(urgent(job(next(more), key=1, max_tokens=9)))
        found = ends(runtime)
        ended |= {event.job_id: event.tokens for event in found if event.job_id < 100}
        if len(ended) == 6:
            break
    assert ended == expected
    assert next(more) > 106, "urgent ones went on meanwhile"
