"""From an engine to its runtime: what a runtime would pass over is refused by name."""

import dataclasses
import pkgutil

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, open_engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import RUNTIMES, TrtllmConfig
from serve.runtime import loader as opening


@pytest.fixture
def engine_for(nano_engine):
    engine = open_engine(nano_engine)

    def engine_for(runtime):
        return Engine(engine.path, dataclasses.replace(engine.manifest, runtime=runtime))

    return engine_for


@pytest.fixture
def opened(monkeypatch):
    """What entries of the table are called with; they answer with their names."""
    calls = []

    def entry(name):
        return lambda *arguments: calls.append((name, arguments)) or name

    monkeypatch.setattr(pkgutil, "resolve_name", entry)
    return calls


CHANGED = [
    ("native", {"tensorrt_llm": TrtllmConfig(beam_width=3)}, r"tensorrt_llm\.beam_width = 3, but"),
    ("tensorrt_llm", {"cuda_graph": True}, r"cuda_graph = True, but .* the runtime 'tensorrt_llm'"),
    ("tensorrt_llm", {"kernels": "torch"}, r"kernels = 'torch', but .*, which does not have it; "),
    ("tensorrt_llm_api", {"draft_tokens": 4}, r"draft_tokens = 4, but"),
]


@pytest.mark.parametrize("runtime, changes, words", CHANGED)
def test_a_key_that_a_runtime_would_pass_over_is_refused(
    engine_for, opened, runtime, changes, words
):
    engine, config = engine_for(runtime), RuntimeConfig(**changes)
    with pytest.raises(ConfigError, match=rf"^runtime\.{words}"):
        opening.open_runtime(engine, config)
    assert opened == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_is_opened_by_its_row(engine_for, opened, runtime):
    engine, row = engine_for(runtime), RUNTIMES[runtime]
    config = RuntimeConfig(**{"slots": 3, "encoder_batch": 2})
    assert opening.open_runtime(engine, config) == row.open
    assert opened == [(row.open, (engine, config))]
