"""The engine folder: its manifest, the tensor list, and what is refused on opening."""

import dataclasses
import json
import shutil
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import serve.contract.engine
from serve.contract.engine import (
    MEL_FILTERS_FILE,
    checked_meanwhile,
    mel_filters,
    open_engine,
    scale_name,
    tensor_specs,
)
from serve.contract.errors import EngineError, UnavailableError
from serve.contract.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    CheckpointSource,
    Dims,
    Draft,
    manifest_to_json,
    read_manifest,
)
from tests.tiny_engine import make_engine

DIMS = Dims(80, 1500, 128, 2, 1, 256, 51865, 448, 64, 1, 2, 512)


def test_a_manifest_comes_back_whole(nano_engine, tmp_path):
    manifest = dataclasses.replace(
        open_engine(nano_engine).manifest,
        runtime_options={"gpu": "H200", "sizes": [1, 2], "deep": {"x": None}},
        draft=Draft(CheckpointSource("a/möhre", "ef" * 32), n_text_layer=1, n_text_ffn=256),
    )
    (tmp_path / MANIFEST_FILE).write_text(manifest_to_json(manifest))
    assert read_manifest(tmp_path) == manifest
    assert manifest.tokenizer.multilingual
    assert not dataclasses.replace(manifest.tokenizer, languages={}).multilingual


def test_tensors_of_an_int8_engine_have_a_scale_for_each_row():
    plain, specs = tensor_specs(DIMS, "fp16"), tensor_specs(DIMS, "int8")
    quantised = {name for name, spec in specs.items() if spec.dtype == torch.int8}
    assert quantised < plain.keys()
    assert (specs["decoder.tokens"].shape, specs["decoder.tokens"].dtype) == (
        (51865, 64),
        torch.int8,
    )
    for name in quantised:
        scale = specs[scale_name(name)]
        assert (scale.shape, scale.dtype) == (specs[name].shape[:1], torch.float16)
    assert len(specs) == len(plain) + len(quantised)
    # q, k, v and out of three attentions, two matrices of three feed-forwards, the vocabulary
    layers = 1 * (4 + 2) + 2 * (8 + 2)
    assert len(quantised) == layers + 1


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_drafts_tensors_are_those_of_a_decoder_of_its_sizes(precision):
    draft = Draft(CheckpointSource("", ""), n_text_layer=1, n_text_ffn=256)
    small = tensor_specs(dataclasses.replace(DIMS, n_text_layer=1, n_text_ffn=256), precision)
    specs = tensor_specs(DIMS, precision, draft)
    plain = tensor_specs(DIMS, precision)
    assert {name: specs[name] for name in plain} == plain
    assert {name: specs[name] for name in specs.keys() - plain.keys()} == {
        name.replace("decoder.", "draft.", 1): spec
        for name, spec in small.items()
        if name.startswith("decoder.")
    }


@pytest.fixture
def folder(nano_engine, tmp_path):
    """A copy of an engine that a test may damage."""
    return shutil.copytree(nano_engine, tmp_path, dirs_exist_ok=True)


def test_a_missing_engine_is_named_with_what_to_do(tmp_path):
    with pytest.raises(EngineError, match=r"no engine at .*nowhere .*No such file.*make build-eng"):
        open_engine(tmp_path / "nowhere")


def test_a_missing_file_is_named(folder):
    (folder / TOKENIZER_FILE).unlink()
    with pytest.raises(EngineError, match=rf"{TOKENIZER_FILE} is missing; build the engine again"):
        open_engine(folder)


def test_a_file_of_another_size_is_named(folder):
    path = folder / TOKENIZER_FILE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(
        EngineError, match=rf"has {size + 1} bytes; expected {size}, from the manifest"
    ):
        open_engine(folder)


def damage(folder):
    """Change a bit of the weights; what is said of it."""
    path = folder / WEIGHTS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return rf"{WEIGHTS_FILE} fails its SHA-256"


def test_a_file_is_checked_while_it_is_read(folder):
    with checked_meanwhile(folder) as engine:
        weights = engine.load_weights()
    assert set(weights) == set(tensor_specs(engine.manifest.dims, "int8"))
    message = damage(folder)
    with pytest.raises(EngineError, match=message):
        open_engine(folder)
    with pytest.raises(EngineError, match=message), checked_meanwhile(folder) as engine:
        assert engine.load_weights()


def test_what_came_of_a_damaged_file_does_not_hide_that_it_is_damaged(folder):
    with pytest.raises(ValueError, match="of its own"), checked_meanwhile(folder):
        raise ValueError("of its own")
    message = damage(folder)
    with pytest.raises(EngineError, match=message), checked_meanwhile(folder):
        raise ValueError("of the damage")


def test_ctrl_c_is_not_made_to_wait_for_the_check(folder, monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def endless(path):
        begun.set()
        assert end.wait(60)
        return ""

    monkeypatch.setattr(serve.contract.engine, "sha256_of", endless)
    try:
        with pytest.raises(KeyboardInterrupt), checked_meanwhile(folder):
            assert begun.wait(60)
            raise KeyboardInterrupt
    finally:
        end.set()


def test_a_compiled_engine_is_checked_before_anything_reads_it(folder):
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["runtime"] = "tensorrt_llm_api"
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    message = damage(folder)
    with pytest.raises(EngineError, match=message), checked_meanwhile(folder):
        pytest.fail("it was handed out")


def test_missing_and_surplus_tensors_are_named(folder):
    engine = open_engine(folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors["encoder.norm.bias"]
    save_file(tensors | {"b": torch.zeros(1), "a": torch.zeros(1)}, folder / WEIGHTS_FILE)
    message = "missing tensors: encoder.norm.bias; unexpected tensors: a, b"
    with pytest.raises(EngineError, match=rf"{WEIGHTS_FILE}: {message}$"):
        engine.load_weights()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, dtype=torch.float16), torch.zeros(1, dtype=torch.float32)]
)
def test_a_tensor_of_another_shape_or_type_is_named(folder, wrong):
    engine = open_engine(folder)
    save_file(
        load_file(folder / WEIGHTS_FILE) | {"encoder.norm.bias": wrong}, folder / WEIGHTS_FILE
    )
    with pytest.raises(
        EngineError, match=r"encoder\.norm\.bias is .*; expected WeightSpec\(shape="
    ):
        engine.load_weights()


def test_weights_that_are_no_safetensors_are_named(folder):
    engine = open_engine(folder)
    (folder / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(
        EngineError, match=rf"cannot read .*{WEIGHTS_FILE}: .*build the engine again"
    ):
        engine.load_weights()


@pytest.mark.parametrize("n_mels", [80, 128])
def test_mel_filters_equal_those_of_transformers_to_the_bit(n_mels):
    from transformers import WhisperFeatureExtractor

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


def test_without_transformers_no_filters_are_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.audio_utils", None)
    with pytest.raises(UnavailableError, match="transformers, which is not installed"):
        mel_filters(80)


def test_filters_that_cannot_be_read_are_named(tmp_path):
    engine, path = make_engine(tmp_path), tmp_path / MEL_FILTERS_FILE
    for spoil in (lambda: path.write_bytes(b"mel"), path.unlink):
        spoil()
        with pytest.raises(EngineError, match=r"cannot read .*safetensors.*build the engine again"):
            engine.load_mel_filters()
