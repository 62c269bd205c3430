"""The executor says what the native runtime says, and serves behind the same transcriber.

On the stand-in; or, where TensorRT-LLM 1.2 and a GPU are, on the real library.
"""

import dataclasses

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.native.runtime import NativeRuntime
from serve.runtime.loader import open_runtime
from tests.runtimes import SLOTS, TRTLLM, mel_job, opener, run


@pytest.fixture
def runtime(compiled):
    with opener(lambda: open_runtime(compiled, TRTLLM.runtime)) as opened:
        yield opened()


def test_it_says_what_the_native_runtime_says(runtime, native_engine):
    """Same weights, same rules, another way: equal tokens, languages and log-probabilities."""
    native = NativeRuntime(native_engine, RuntimeConfig(slots=SLOTS, threads=1))
    job = mel_job(native_engine)
    jobs = [
        job(id, language=None if id % 2 else "es", timestamps=id < 4, max_tokens=20)
        for id in range(6)
    ]
    jobs += [  # with prompts that hold their text's beginning
        dataclasses.replace(each, id=each.id + 6, prompt=(*each.prompt, 7, 8), prefix=2)
        for each in jobs[2:5]
    ]
    ours, theirs = run(runtime, jobs), run(native, jobs)
    native.close()
    for each in jobs:
        assert ours[each.id].result == theirs[each.id].result
        found, expected = (ended[each.id].last.scores.avg_logprob for ended in (ours, theirs))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-2)
