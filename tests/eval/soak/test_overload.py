"""Requests beyond a server's capacity, and what is made of how they ended."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from eval.server import Addresses
from eval.soak.overload import GREEDY, MODEST, Caller, _told, figures, late, visitor
from serve.speech.rate import SAMPLE_RATE
from tests.gateways import Running

CLIP = np.zeros(2 * SAMPLE_RATE, np.float32)


def caller(key=GREEDY, obeys=True, **more):
    return Caller(key, CLIP, obeys, **more)


def test_a_caller_is_answered_or_fails(tmp_path):
    running = Running(tmp_path, 600.0)
    server = SimpleNamespace(at=Addresses(running.http, ""), keys=["key"])
    visit = visitor(server, time.monotonic(), 0)
    one = caller()
    try:
        assert visit(one) is None
        assert one.latency_s is not None and not one.failure
    finally:
        running.close()
    lost = caller()
    assert visit(lost) is None
    assert lost.latency_s is None and lost.failure


def test_figures_count_what_was_answered_in_time_while_requests_came():
    callers = [
        caller(let_in_s=3.0, latency_s=1.0, tries=1),
        caller(let_in_s=4.0, latency_s=3.0, tries=2, refused=True, key=MODEST),  # too late
        caller(let_in_s=5.0, latency_s=0.5, tries=2, refused=True, key=MODEST),
        caller(let_in_s=0.5, latency_s=0.5, tries=1),  # before it counts
        caller(tries=6, refused=True, obeys=False),
    ]
    found = figures(callers, 1.3, 2.0, 10.0, 1.5)
    assert found.goodput == pytest.approx(4 / 8)
    assert (found.came, found.refused, found.let_in, found.kept) == (5, 3, 1, 1)
    assert found.shares == {GREEDY: pytest.approx(0.25), MODEST: pytest.approx(0.25)}
    checks = [news for news in _told(found, 0.5, 2.0) if not isinstance(news, tuple)]
    assert [check.passed for check in checks] == [True, False, True, True]


def test_a_bound_of_words_lies_where_95_of_100_do():
    before = {1.0: 10.0, 2.0: 10.0, float("inf"): 10.0}
    assert late(before, {1.0: 100.0, 2.0: 108.0, float("inf"): 110.0}) == 2.0
    assert late({}, {}) == float("inf")
