"""An open loop of requests that come back, and what is made of how they ended."""

import dataclasses

import numpy as np
import pytest

from eval.gateway.open_loop import Caller, OpenLoop, ask, wav
from eval.gateway.overload import GREEDY, MODEST, Overload, _figures, _late, _report
from serve.speech.rate import SAMPLE_RATE
from tests.gateways import WAIT_S, Running

CLIP = np.zeros(2 * SAMPLE_RATE, np.float32)


def caller(came_s=0.0, key=GREEDY, obeys=True, **more):
    return Caller(key, "key", CLIP, came_s, obeys, **more)


def test_who_obeys_comes_back_when_told_and_who_does_not_gives_up():
    tries = []

    def try_once(one):
        one.tries += 1
        tries.append(one)
        return None if one.obeys and one.tries == 2 else 0

    obedient, stubborn = caller(), caller(0.01, obeys=False)
    OpenLoop([obedient, stubborn], try_once).run(most_s=WAIT_S)
    assert (tries.count(obedient), tries.count(stubborn)) == (2, 6)
    assert obedient.promised_s is not None and obedient.let_in_s is not None and obedient.kept
    assert stubborn.let_in_s is None and not stubborn.kept


def test_nobody_is_waited_for_beyond_the_end():
    OpenLoop([caller(came_s=1000.0)], lambda one: None).run(most_s=0.05)


def test_a_caller_is_answered_refused_or_fails(tmp_path):
    running = Running(tmp_path, 600.0)
    try:
        one = caller()
        assert ask(running.http, one, WAIT_S) is None
        assert one.latency_s is not None and not one.failure
    finally:
        running.close()
    lost = caller()
    assert ask(running.http, lost, WAIT_S) is None
    assert lost.latency_s is None and lost.failure


def test_figures_count_what_was_answered_in_time_while_requests_came():
    callers = [
        caller(let_in_s=3.0, latency_s=1.0, tries=1),
        caller(let_in_s=4.0, latency_s=3.0, tries=2, promised_s=4.0, key=MODEST),  # too late
        caller(let_in_s=5.0, latency_s=0.5, tries=2, promised_s=4.9, key=MODEST),
        caller(let_in_s=0.5, latency_s=0.5, tries=1),  # before it counts
        caller(tries=6, promised_s=2.0, obeys=False),
    ]
    found = _figures(callers, 1.3, 0.5, 2.0, 10.0, 1.5)
    assert found.goodput == pytest.approx(4 / 8)
    assert (found.came, found.refused, found.obedient, found.let_in, found.kept) == (5, 3, 2, 1, 1)
    assert found.shares == {GREEDY: pytest.approx(0.5), MODEST: pytest.approx(0.5)}
    assert [check.passed for check in found.checks] == [True, False, True, True]
    assert "100.0%" in _report([found])
    half = dataclasses.replace(found, capacity=2 * found.capacity)
    assert isinstance(half, Overload) and not half.checks[0].passed


def test_a_bound_of_words_lies_where_95_of_100_do():
    before = {1.0: 10.0, 2.0: 10.0, float("inf"): 10.0}
    assert _late(before, {1.0: 100.0, 2.0: 108.0, float("inf"): 110.0}) == 2.0


def test_a_file_holds_its_samples():
    assert len(wav(CLIP)) == 44 + 2 * len(CLIP)
