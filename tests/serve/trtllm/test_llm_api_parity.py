"""The LLM API says what the native runtime says, and serves behind the same transcriber.

On the stand-in; or, where TensorRT-LLM 1.3 or later and a GPU are, on the real library.
"""

import dataclasses

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import mel_filters
from serve.native.runtime import NativeRuntime
from serve.runtime.loader import open_runtime
from serve.speech.features import WINDOW_SAMPLES, log_mel
from tests.checkpoints import NANO
from tests.runtimes import LLM_API, SLOTS, api_engine, opener, run, samples_job


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    """The checkpoint as an engine for the LLM API."""
    with api_engine(checkpoint, tmp_path_factory.mktemp("api")) as engine:
        yield engine


@pytest.fixture
def runtime(engine):
    config = dataclasses.replace(LLM_API.runtime, compute_type="float32")
    with opener(lambda: open_runtime(engine, config)) as opened:
        yield opened()


def test_it_says_what_the_native_runtime_says(runtime, engine, native_engine):
    """Samples to tokens: log-mel, network and suppression by the library and by us are the same."""
    native, job = (
        NativeRuntime(native_engine, RuntimeConfig(slots=SLOTS, threads=1, compute_type="float32")),
        samples_job(engine),
    )
    jobs = [job(id, language="es" if id % 2 else "en", max_tokens=20) for id in range(6)]
    ours = run(runtime, jobs)
    theirs = run(native, [dataclasses.replace(each, features=mel(each.features)) for each in jobs])
    native.close()
    assert len({entry.tokens for entry in theirs.values()}) > 3, "the jobs all say the same"
    for each in jobs:
        assert ours[each.id].result == theirs[each.id].result
        found, expected = (e[each.id].last.scores.avg_logprob for e in (ours, theirs))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)


def mel(samples):
    padded = torch.zeros(1, WINDOW_SAMPLES)
    padded[0, : len(samples)] = samples
    return log_mel(padded, mel_filters(NANO.n_mels))[0]
