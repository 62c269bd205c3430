"""From an engine to its runtime: what a runtime would pass over is refused by name."""

import dataclasses

import pytest

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, open_engine
from serve.contract.errors import ConfigError
from serve.contract.runtimes import TrtllmConfig
from serve.runtime import loader as opening


@pytest.fixture
def engine_for(nano_engine):
    engine = open_engine(nano_engine)

    def engine_for(runtime):
        return Engine(engine.path, dataclasses.replace(engine.manifest, runtime=runtime))

    return engine_for


CHANGED = [
    ("native", {"tensorrt_llm": TrtllmConfig(beam_width=3)}, r"tensorrt_llm is set, but"),
    ("tensorrt_llm", {"cuda_graph": True}, r"cuda_graph = True is set, but .* 'tensorrt_llm'"),
    ("tensorrt_llm", {"kernels": "torch"}, r"kernels = 'torch' is set, .* does not have it; "),
    ("tensorrt_llm_api", {"draft_tokens": 4}, r"draft_tokens = 4 is set, but"),
]


@pytest.mark.parametrize("runtime, changes, words", CHANGED)
def test_a_key_that_a_runtime_would_pass_over_is_refused(engine_for, runtime, changes, words):
    engine, config = engine_for(runtime), RuntimeConfig(**changes)
    with pytest.raises(ConfigError, match=rf"^runtime\.{words}"):
        opening.open_runtime(engine, config)


@pytest.mark.parametrize(
    ("device", "opened"), [("cuda:1,2", "apart"), ("cuda", "apart"), ("cpu", "here")]
)
def test_a_gpus_runtime_has_a_separate_process(engine_for, monkeypatch, device, opened):
    monkeypatch.setattr("serve.native.process.NativeRuntime", lambda engine, config: "here")
    monkeypatch.setattr("serve.native.process.ProcessRuntime", lambda engine, config: "apart")
    assert opening.open_runtime(engine_for("native"), RuntimeConfig(device=device)) == opened
