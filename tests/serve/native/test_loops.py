"""Loops that the runtime ends: what company, drafts and samples have to do with it."""

import dataclasses

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.engine import open_engine
from serve.native.runtime import NativeRuntime
from tests.runtimes import mel_job, run

NEED = 12


@pytest.fixture(scope="module")
def nano(nano_engine):
    """Random weights: greedily they say one thing for ever."""
    return open_engine(nano_engine)


@pytest.fixture(scope="module")
def runtime(nano):
    runtime = NativeRuntime(nano, RuntimeConfig(slots=3, rows=6, encoder_batch=3, threads=1))
    yield runtime
    runtime.close()


@pytest.fixture
def job(nano):
    """A maker of jobs that end on loops."""
    make = mel_job(nano)

    def looping(id, **options):
        made = make(id, max_tokens=60, timestamps=False, **options)
        return dataclasses.replace(made, loop_tokens=NEED)

    return looping


def test_a_loop_ends_alike_whether_its_tokens_were_guessed_or_not(runtime, job):
    whole = run(runtime, [dataclasses.replace(job(1), loop_tokens=0)])[1]
    plain = run(runtime, [job(1)])[1]
    assert (plain.last.finished, whole.last.finished) == ("loop", "length")
    for draft in (whole.tokens, whole.tokens[:7], (*whole.tokens[:15], 3, 4)):
        found = run(runtime, [dataclasses.replace(job(1), draft=draft)])[1]
        assert found.result == plain.result
        scores = found.last.scores.avg_logprob
        assert scores == pytest.approx(plain.last.scores.avg_logprob, abs=1e-4)
