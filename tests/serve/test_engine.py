"""The engine folder's mel filters: kept in a file, checked, and made anew for older engines."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import WhisperFeatureExtractor

from serve.engine import MEL_FILTERS_FILE, Engine, mel_filters, open_engine, write_mel_filters
from serve.errors import EngineError, UnavailableError
from tests.tiny_engine import make_engine


@pytest.fixture
def engine(tmp_path):
    engine = make_engine(tmp_path)
    write_mel_filters(tmp_path, engine.manifest.dims.n_mels)
    return engine


def without_mel_filters(engine):
    """As engines were before they kept their filters."""
    return Engine(engine.path, dataclasses.replace(engine.manifest, files={}))


@pytest.mark.parametrize("n_mels", [80, 128])
def test_mel_filters_equal_those_of_transformers_to_the_bit(n_mels):
    expected = WhisperFeatureExtractor(feature_size=n_mels).mel_filters.T.astype(np.float32)
    filters = mel_filters(n_mels)
    assert (filters.dtype, filters.is_contiguous()) == (torch.float32, True)
    np.testing.assert_array_equal(filters.numpy(), expected)


def test_a_built_engine_is_read_without_transformers(nano_engine, monkeypatch):
    expected = mel_filters(80)
    monkeypatch.setitem(sys.modules, "transformers.audio_utils", None)
    engine = open_engine(nano_engine)
    assert MEL_FILTERS_FILE in engine.manifest.files
    assert torch.equal(engine.load_mel_filters(), expected)


def test_an_engine_from_before_gets_its_filters_from_transformers(engine):
    (engine.path / MEL_FILTERS_FILE).unlink()
    assert torch.equal(without_mel_filters(engine).load_mel_filters(), mel_filters(80))


def test_without_transformers_an_engine_from_before_has_to_be_built_again(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.audio_utils", None)
    with pytest.raises(EngineError, match="build the engine again"):
        without_mel_filters(engine).load_mel_filters()
    with pytest.raises(UnavailableError, match="transformers, which is not installed"):
        mel_filters(80)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"mel_filters": torch.zeros(128, 201)}, r"shape=\(128, 201\).* expected .*\(80, 201\)"),
        ({"mel_filters": torch.zeros(80, 201).half()}, r"float16\), expected .*float32"),
        ({"other": torch.zeros(80, 201)}, "cannot read .*mel_filters"),
        (None, "cannot read .*safetensors"),
    ],
    ids=["another shape", "another dtype", "another name", "no safetensors"],
)
def test_a_file_that_holds_something_else(engine, tensors, message):
    path = engine.path / MEL_FILTERS_FILE
    if tensors is None:
        path.write_bytes(b"mel")
    else:
        save_file(tensors, path)
    with pytest.raises(EngineError, match=message):
        engine.load_mel_filters()
