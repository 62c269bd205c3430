"""The made-up engine in memory; test_triton opens the same from a disk."""

import dataclasses

import pytest

from eval.bench.engine import RandomEngine, random_engine
from eval.config import load_config
from serve.engine import tensor_specs
from serve.errors import ConfigError


@pytest.mark.parametrize("name", ["large-v3-turbo", "large-v3"])
def test_a_made_up_engine_has_the_tensors_of_its_shape(name):
    config = load_config(f"configs/{name}.toml")
    engine = random_engine(config)
    small = dataclasses.replace(
        engine.manifest,
        dims=dataclasses.replace(
            engine.manifest.dims, n_audio_layer=1, n_text_layer=1, n_audio_ffn=64, n_text_ffn=64,
            n_vocab=99,
        ),
    )  # fmt: skip
    weights = RandomEngine(engine.path, small).load_weights()
    specs = tensor_specs(small.dims, small.precision)
    assert {k: (tuple(v.shape), v.dtype) for k, v in weights.items()} == {
        k: (v.shape, v.dtype) for k, v in specs.items()
    }
    assert engine.manifest.tokenizer.eot in engine.manifest.tokenizer.suppress_tokens


def test_a_config_without_a_published_shape_is_refused():
    with pytest.raises(ConfigError, match="knows the shapes whisper-large-v3-turbo"):
        random_engine(load_config("configs/demo.toml"))
