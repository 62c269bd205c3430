"""What the library takes of us in memory, against the facts about the real one."""

import inspect

from serve.trtllm import executor
from tests.fake_trtllm import facts


def test_the_callback_takes_its_arguments_in_the_real_order():
    parameters = list(inspect.signature(executor.RulesCallback.__call__).parameters)
    assert parameters[1:] == facts.POST_PROCESSOR
