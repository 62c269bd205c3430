"""Guesses are right as often as asked for, whatever the weights say."""

import dataclasses

import pytest

from eval.bench.plan import Plan, configured
from eval.bench.workloads import Session
from eval.random_whisper.engine import random_engine
from serve.native.drafting import Pace
from tests.serve.native.kernels.parity import nightly


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0.75, 0.5, 0.65), *nightly((0.0, 0, 0), (1.0, 1, 1))]
)
def test_so_many_guesses_are_right(share, least, most, tiny, config, ceilings, quiet, monkeypatch):
    """Of three in a row that are right with 3 in 4 each, 0.75 + 0.56 + 0.42 are: 58 %."""
    monkeypatch.setattr(Pace, "drafts", lambda self, busy: True)
    asked = configured(config, Plan(draft_acceptance=share)).runtime
    assert asked.draft_tokens == 3
    session = Session(random_engine(tiny, "int8", 1), asked, ceilings, quiet, share)
    load = session._load()
    load.submit([120, 100])
    load.drain()
    gauges = session.runtime.gauges()
    assert gauges.drafted > 60
    assert least <= gauges.drafted_right / gauges.drafted <= most
    row = session.throughput(0.01)
    assert row.system.endswith(f"drafts of 3 with {100 * share:g} % right")


def test_drafts_have_the_usual_length_where_none_is_set(config):
    assert configured(config, Plan()).runtime.draft_tokens == 0
    drafted = dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, draft_tokens=5)
    )
    assert configured(drafted, Plan(draft_acceptance=0.5)).runtime.draft_tokens == 5
