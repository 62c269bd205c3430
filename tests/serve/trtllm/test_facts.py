"""Our calls of the library, as they stand in the source, against the facts about the real one."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from serve.runtime.open import open_runtime
from serve.trtllm import executor, worker
from tests.fake_trtllm import facts
from tests.fake_trtllm.install import make_config
from tests.fake_trtllm.jobs import PLAIN, make_job, run


def calls(module):
    """Every call of something whose name begins with a capital, or of the library's executor."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if owner in ("api", "self._api"):
            yield node.func.attr, node
        elif owner == "self._executor":
            yield f"Executor.{node.func.attr}", node


def test_calls_of_the_bindings_have_the_real_arguments():
    found = set()
    for name, call in calls(executor):
        signature, _ = facts.BINDINGS[name].parse()
        options = {keyword.arg: ... for keyword in call.keywords if keyword.arg}
        signature.bind(*call.args, **options)
        found.add(name)
    assert found == facts.BINDINGS.keys(), "a fact about what we do not call is of no use"


def test_calls_of_the_llm_api_are_those_that_its_own_tests_make():
    found = set()
    for name, call in calls(worker):
        if name in facts.LLM_API:
            signature, _ = facts.LLM_API[name].parse()
            options = {keyword.arg: ... for keyword in call.keywords if keyword.arg}
            signature.bind(*call.args, **options)
            found.add(name)
    assert found == facts.LLM_API.keys()


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
