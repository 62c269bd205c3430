"""Our calls of the library, as they stand in the source, against the facts about the real one."""

import ast
import inspect
from pathlib import Path

import pytest

from serve.trtllm import executor, llm_api
from tests.fake_trtllm import facts


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


def test_names_that_are_put_together_before_a_call_are_real_ones():
    """`options` of a call are literals with names of arguments."""
    tree = ast.parse(Path(executor.__file__).read_text(encoding="utf-8"))
    stored = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "options"
    }
    known = {name for binding in facts.BINDINGS.values() for name in binding.parse()[1]}
    assert stored and stored <= known


def test_calls_of_the_llm_api_are_those_that_its_own_tests_make():
    for name, call in calls(llm_api):
        if name in facts.LLM_API:
            assert {word.arg for word in call.keywords if word.arg} <= facts.LLM_API[name], name


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("Request", ([1], 5.0), {}),
        ("Request", ([1], 5, True), {}),
        ("Request", ([1, True], 5), {}),
        ("Request", ((1, 2), 5), {}),
        ("Request", ([1], 5), {"end_token": 3}),
        ("Request", ([1], 5), {"sampling_config": None}),
        ("SamplingConfig", (1, 5), {}),
        ("SamplingConfig", (1,), {"temperature": 1}),
        ("KvCacheConfig", (), {"free_gpu_memory_fraction": "0.9"}),
        ("Executor.await_responses", (0.5,), {}),
    ],
)
def test_what_the_bindings_would_refuse_is_refused(name, arguments, options):
    with pytest.raises(TypeError):
        facts.bind(name, arguments, options)


def test_the_callback_takes_its_arguments_in_the_real_order():
    parameters = list(inspect.signature(executor.RulesCallback.__call__).parameters)
    assert parameters[1:] == facts.POST_PROCESSOR
