"""Published shapes, and engines of them with random weights."""

import pytest

from eval.random_whisper import PUBLISHED, published_shape, random_engine
from serve.contract.errors import ConfigError
from serve.contract.manifest import Dims


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
