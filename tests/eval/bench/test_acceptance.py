"""Guesses are right as often as asked for, whatever the weights say."""

import dataclasses

import pytest

from eval.bench import BenchPlan
from eval.bench.run import configured
from eval.bench.workloads import RuntimeSession
from eval.random_whisper import random_engine
from serve.native.speculative import SpeculationPolicy
from tests.serve.native.kernels.parity import nightly


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0.75, 0.5, 0.65), *nightly((0.0, 0, 0), (1.0, 1, 1))]
)
def test_so_many_guesses_are_right(share, least, most, tiny, config, ceilings, monkeypatch):
    """Of three in a row that are right with 3 in 4 each, 0.75 + 0.56 + 0.42 are: 58 %."""
    monkeypatch.setattr(SpeculationPolicy, "should_draft", lambda self, busy: True)
    plan = BenchPlan(draft_acceptance=share, seconds=0.01)
    asked = configured(config, plan)
    assert asked.runtime.draft_tokens == 3
    session = RuntimeSession(random_engine(tiny, "int8", 1), asked, plan, ceilings)
    load = session.load()
    load.submit([120, 100])
    load.drain()
    gauges = session.runtime.gauges()
    assert gauges.drafted > 60
    assert least <= gauges.drafted_right / gauges.drafted <= most
    (row,) = session.throughput()
    assert row.system.endswith(f"drafts of 3 with {100 * share:g} % right")


def test_drafts_have_the_usual_length_where_none_is_set(config):
    assert configured(config, BenchPlan()).runtime.draft_tokens == 0
    drafted = dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, draft_tokens=5)
    )
    assert configured(drafted, BenchPlan(draft_acceptance=0.5)).runtime.draft_tokens == 5
