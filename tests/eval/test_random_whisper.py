"""Published shapes, and engines of them with random weights."""

import dataclasses

import pytest

from eval.random_whisper import PUBLISHED, published_shape, random_engine
from serve.contract.engine import Dims, tensor_specs
from serve.contract.errors import ConfigError


@pytest.mark.parametrize("name", ["large-v3-turbo", "large-v3", "tiny"])
def test_a_random_engine_has_the_tensors_of_its_shape(name):
    engine = random_engine(PUBLISHED[name], "int8")
    dims = dataclasses.replace(
        engine.manifest.dims,
        n_audio_layer=1,
        n_text_layer=1,
        n_audio_ffn=64,
        n_text_ffn=64,
        n_vocab=99,
    )
    small = dataclasses.replace(engine, manifest=dataclasses.replace(engine.manifest, dims=dims))
    weights = small.load_weights()
    specs = tensor_specs(dims, "int8")
    assert {k: (tuple(v.shape), v.dtype) for k, v in weights.items()} == {
        k: (v.shape, v.dtype) for k, v in specs.items()
    }


def test_special_tokens_are_those_of_every_published_large_v3():
    facts = random_engine(PUBLISHED["large-v3"], "int8").manifest.tokenizer
    assert (facts.eot, facts.sot, facts.languages) == (50257, 50258, {"en": 50259})
    assert (facts.translate, facts.transcribe, facts.sot_prev) == (50359, 50360, 50362)
    assert (facts.no_speech, facts.no_timestamps, facts.timestamp_begin) == (50363, 50364, 50365)
    assert facts.suppress_tokens == (*range(50257, 50365), *range(50416, 51866))


def test_a_hub_id_names_its_shape():
    assert published_shape("openai/whisper-large-v3-turbo").dims == Dims(
        128, 1500, 1280, 20, 32, 5120, 51866, 448, 1280, 20, 4, 5120
    )
    assert published_shape("distil-whisper/distil-large-v3") == PUBLISHED["distil-large-v3"]
    for unknown in ("tests/fixture/checkpoint", "openai/whisper-tiny.en"):
        with pytest.raises(ConfigError, match=f"knows the shapes .*, not .* = '{unknown}'"):
            published_shape(unknown)
