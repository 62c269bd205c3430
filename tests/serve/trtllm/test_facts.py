"""Our calls of the library, as they stand in the source, against the facts about the real one."""

import ast
import inspect
import types
import typing
from pathlib import Path

import pytest

from serve.trtllm import executor, worker
from tests.fake_trtllm import facts
from tests.fake_trtllm.install import install_api


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


@pytest.mark.parametrize("name", facts.LLM_API)
def test_the_stand_in_of_the_llm_api_takes_the_real_kinds_alone(monkeypatch, name):
    api = install_api(monkeypatch)
    declared = typing.get_type_hints(api.LlmArgs if name == "LLM" else getattr(api, name))
    for argument, (kind, takes_none) in facts.LLM_API[name].parse()[1].items():
        kinds = typing.get_args(declared[argument]) or (declared[argument],)
        assert kind in {known.__name__ for known in kinds}, argument
        assert takes_none == (types.NoneType in kinds), argument


def test_the_callback_takes_its_arguments_in_the_real_order():
    parameters = list(inspect.signature(executor.RulesCallback.__call__).parameters)
    assert parameters[1:] == facts.POST_PROCESSOR
