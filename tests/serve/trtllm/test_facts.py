"""What the library takes of us in memory, against the facts about the real one."""

import inspect

import pytest
import torch

from serve.runtime.open import open_runtime
from serve.trtllm import executor
from tests.fake_trtllm import facts
from tests.fake_trtllm.install import make_config
from tests.fake_trtllm.jobs import PLAIN, make_job, run


def test_a_bias_is_of_a_type_that_the_logits_take(fake_executor, small_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "suppression_bias", lambda facts, n: torch.zeros(n).bfloat16())
        runtime = open_runtime(small_engine, make_config(logits_processor=False).runtime)
    _, last = run(runtime, make_job(1, PLAIN))[1]
    assert "Embedding bias data type must be" in str(last.error)
    runtime.close()


def test_the_callback_takes_its_arguments_in_the_real_order():
    parameters = list(inspect.signature(executor.RulesCallback.__call__).parameters)
    assert parameters[1:] == facts.POST_PROCESSOR
