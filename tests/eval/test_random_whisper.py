"""Published shapes, and engines of them with random weights."""

import dataclasses

import pytest

from eval.random_whisper import PUBLISHED, published_shape, random_engine
from serve.contract.engine import open_engine
from serve.contract.errors import ConfigError
from serve.contract.manifest import Dims


def test_special_tokens_are_those_of_every_published_large_v3():
    small = dataclasses.replace(PUBLISHED["large-v3"], width=64, encoder_layers=1, decoder_layers=3)
    with random_engine(small, "int8", lambda _: None) as engine:
        facts = open_engine(engine.path).manifest.tokenizer
    assert not engine.path.exists()
    assert (facts.eot, facts.sot, facts.languages) == (50257, 50258, {"en": 50259})
    assert (facts.translate, facts.transcribe, facts.sot_prev) == (50359, 50360, 50362)
    assert (facts.no_speech, facts.no_timestamps, facts.timestamp_begin) == (50363, 50364, 50365)
    assert facts.suppress_tokens == (*range(50257, 50365), *range(50416, 51866))
    assert facts.alignment_heads == ((1, 0), (2, 0))


def test_a_hub_id_names_its_shape():
    assert published_shape("openai/whisper-large-v3-turbo").dims == Dims(
        128, 1500, 1280, 20, 32, 5120, 51866, 448, 1280, 20, 4, 5120
    )
    assert published_shape("distil-whisper/distil-large-v3") == PUBLISHED["distil-large-v3"]
    for unknown in ("tests/fixture/checkpoint", "openai/whisper-tiny.en"):
        with pytest.raises(ConfigError, match=f"knows the shapes .*, not .* = '{unknown}'"):
            published_shape(unknown)
