"""The table of published shapes."""

import pytest

from eval.random_whisper.shapes import PUBLISHED, published_shape
from serve.contract.engine import Dims
from serve.contract.errors import ConfigError


def test_a_hub_id_names_its_shape():
    assert published_shape("openai/whisper-large-v3-turbo").dims == Dims(
        128, 1500, 1280, 20, 32, 5120, 51866, 448, 1280, 20, 4, 5120
    )
    assert published_shape("distil-whisper/distil-large-v3") == PUBLISHED["distil-large-v3"]
    for unknown in ("tests/fixture/checkpoint", "openai/whisper-tiny.en"):
        with pytest.raises(ConfigError, match=f"knows the shapes .*, not .* = '{unknown}'"):
            published_shape(unknown)
