"""Requests beyond a server's capacity, and the figures of their ends."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from eval.server import Addresses
from eval.soak.overload import GREEDY, MODEST, OverloadClient, figures, p95_bound, try_once
from serve.speech.rate import SAMPLE_RATE
from tests.gateways import Running

CLIP = np.zeros(2 * SAMPLE_RATE, np.float32)


def client(key=GREEDY, obeys=True, **more):
    return OverloadClient(key, CLIP, obeys, **more)


def test_a_client_is_answered_or_fails(tmp_path):
    running = Running(tmp_path, 600.0)
    server = SimpleNamespace(at=Addresses(running.http, ""), keys=["key"])
    attempt = try_once(server, time.monotonic(), 0)
    one = client()
    try:
        assert attempt(one) is None
        assert one.answered and not one.failure
    finally:
        running.close()
    lost = client()
    assert attempt(lost) is None
    assert not lost.answered and lost.failure


def test_figures_count_what_was_answered_in_time_while_requests_came():
    clients = [
        client(end_s=4.0, latency_s=1.0, tries=1),
        client(end_s=7.0, latency_s=3.0, tries=2, rejected=True, key=MODEST),  # too late
        client(end_s=5.5, latency_s=0.5, tries=2, rejected=True, key=MODEST),
        client(end_s=1.0, latency_s=0.5, tries=1),  # before it counts
        client(tries=6, rejected=True, obeys=False),
    ]
    found = list(figures("a", clients, 0.5, 2.0, 10.0))
    values = dict(news for news in found if isinstance(news, tuple))
    assert values["a: goodput, RTFx"] == pytest.approx(4 / 8)
    assert (values["a: requests"], values["a: rejected"]) == (5, 3)
    assert values["a: greedy key, RTFx"] == values["a: modest key, RTFx"] == pytest.approx(0.25)
    checks = [news for news in found if not isinstance(news, tuple)]
    assert [check.passed for check in checks] == [True, False, True, True]
    assert checks[2].detail == "100.0%; 2 of 2 rejected ones at their second try"


def test_the_bound_of_words_lies_above_95_of_100():
    before = {1.0: 10.0, 2.0: 10.0, float("inf"): 10.0}
    assert p95_bound(before, {1.0: 100.0, 2.0: 108.0, float("inf"): 110.0}) == 2.0
    assert p95_bound({}, {}) == float("inf")
