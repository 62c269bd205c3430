"""Requests beyond a server's capacity, and the figures of how they end."""

import pytest

from eval.config import EvaluationProduct
from eval.soak.overload import OverloadClient, judge
from eval.soak.stage import Stage


def test_figures_count_what_was_answered_in_time_while_requests_came():
    clients = [
        OverloadClient("a", 2.0, end_s=4.0, latency_s=1.0),
        OverloadClient("a", 2.0, end_s=7.0, latency_s=3.0),  # too late
        OverloadClient("a", 2.0, end_s=5.5, latency_s=0.5),
        OverloadClient("a", 2.0, end_s=1.0, latency_s=0.5),  # before it counts
        OverloadClient("a", 2.0),
    ]
    stage = Stage(EvaluationProduct(), (), lambda _: None)
    judge(stage, "a", clients, capacity=0.5, target_s=2.0, seconds=10.0)
    figures = {figure.name: figure for figure in stage.figures}
    assert figures["a: goodput in time, RTFx"].value == pytest.approx(4 / 8)
    assert figures["a: goodput in time, RTFx"].passed
    assert not figures["a: p99 of admitted requests, s"].passed
    assert figures["a: clients admitted"].value == 4
    assert not figures["a: clients admitted"].passed
