"""build.draft: which second checkpoint fits a first one, and how an engine holds its decoder."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from build.builders import build_engine, up_to_date
from build.checkpoint import open_checkpoint
from build.config import BuildProduct
from build.draft import with_draft
from build.quantize import quantize_rows
from eval.random_whisper import random_weights, write_checkpoint
from serve.contract.engine import scale_name, tensor_specs
from serve.contract.errors import CheckpointError
from serve.contract.manifest import Draft
from tests.checkpoints import NANO, refused, write_engine

TOKENS = "model.decoder.embed_tokens.weight"
MAIN = dataclasses.replace(NANO, decoder_layers=2)


@pytest.fixture(scope="module")
def main_folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("main"), MAIN, random_weights(MAIN))


@pytest.fixture(scope="module")
def main(main_folder):
    return open_checkpoint(str(main_folder))


@pytest.fixture(scope="module")
def stored(main_folder):
    """A draft's tensors by Hugging Face's names: its own decoder, the encoder of MAIN."""
    encoder = {n: t for n, t in random_weights(MAIN).items() if n.startswith("model.encoder.")}
    return random_weights(NANO, seed=1) | encoder


@pytest.fixture
def folder(tmp_path, stored):
    return write_checkpoint(tmp_path / "draft", NANO, stored)


def decoder_alone(folder, stored):
    """Leave config.json and the decoder's tensors, and nothing else."""
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    kept = {name: tensor for name, tensor in stored.items() if ".decoder." in name}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("alone", [False, True])
def test_an_engine_holds_the_drafts_decoder_beside_the_other(
    main, folder, stored, tmp_path, precision, alone
):
    if alone:
        decoder_alone(folder, stored)
    both = with_draft(main, str(folder))
    engine = write_engine(both, tmp_path / "engine", precision)
    weights = engine.load_weights()
    draft = Draft(both.draft.source, NANO.decoder_layers, NANO.width * 4)
    assert engine.manifest.draft == draft
    assert set(weights) == set(tensor_specs(main.dims, precision, draft))
    positions = stored["model.decoder.embed_positions.weight"]
    assert torch.equal(weights["draft.positions"], positions)
    assert torch.equal(weights["decoder.positions"], main.tensors["decoder.positions"])
    value = stored["model.decoder.layers.0.encoder_attn.v_proj.weight"]
    for name, matrix in (("layers.0.cross.v.weight", value), ("tokens", stored[TOKENS])):
        if precision == "fp16":
            assert torch.equal(weights[f"draft.{name}"], matrix)
        else:
            codes, scale = quantize_rows(matrix)
            assert torch.equal(weights[f"draft.{name}"], codes)
            assert torch.equal(weights[scale_name(f"draft.{name}")], scale)
    if precision == "int8":
        assert "draft.layers.0.cross.v.weight" in engine.manifest.quantization


def test_a_draft_of_another_encoder_is_refused(main, folder, stored):
    name = "model.encoder.layers.1.fc1.weight"
    changed = stored[name].clone()
    changed[0, 0] += 0.5
    save_file(stored | {name: changed}, folder / "model.safetensors")
    message = refused(with_draft, main, str(folder))
    assert str(folder) in message and "leave `draft` out" in message
    assert "its encoder has another encoder.layers.1.mlp.fc1.weight" in message


def test_a_draft_with_half_an_encoder_is_refused(main, folder, stored):
    name = "model.encoder.conv1.bias"
    save_file({n: t for n, t in stored.items() if n != name}, folder / "model.safetensors")
    assert f"missing tensors: {name}" in refused(with_draft, main, str(folder))


def test_only_a_draft_may_be_a_decoder_alone(folder, stored):
    save_file({n: t for n, t in stored.items() if ".decoder." in n}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.encoder\.conv1\.bias"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("shape", "difference"),
    [
        (dataclasses.replace(NANO, encoder_layers=1), "its n_audio_layer is 1, the checkpoint's 2"),
        (dataclasses.replace(NANO, width=128), "its n_audio_state is 128, the checkpoint's 64"),
    ],
)
def test_a_draft_of_other_sizes_is_refused(main, tmp_path, shape, difference):
    folder = write_checkpoint(tmp_path / "other", shape, random_weights(shape))
    assert difference in refused(with_draft, main, str(folder))


def test_a_changed_draft_makes_an_engine_stale(main, folder, stored, tmp_path):
    both = with_draft(main, str(folder))
    config = BuildProduct(engine=str(tmp_path / "engine"))
    build_engine(both, config, log=print)
    assert up_to_date(both, config, verified=False)
    assert not up_to_date(main, config, verified=False)
    save_file(stored | {TOKENS: stored[TOKENS] * 2}, folder / "model.safetensors")
    assert not up_to_date(with_draft(main, str(folder)), config, verified=False)
