"""build.native: what an engine for our own runtime holds."""

import dataclasses
import os

import pytest
import torch

from build.native import convert
from build.quantize import quantize_rows
from serve.contract.engine import tensor_specs
from serve.contract.errors import CheckpointError
from tests.checkpoints import write_engine


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_engine_holds_what_the_contract_lists(checkpoint, target, precision):
    engine = write_engine(checkpoint, target, precision)
    weights = engine.load_weights()
    assert set(weights) == set(tensor_specs(checkpoint.dims, precision))
    manifest = engine.manifest
    assert (manifest.runtime, manifest.precision) == ("native", precision)
    assert (manifest.dims, manifest.tokenizer) == (checkpoint.dims, checkpoint.facts)
    assert (manifest.source, manifest.verification) == (checkpoint.source, None)
    assert manifest.checkpoint_bytes == checkpoint.weight_bytes
    assert set(manifest.versions) == {"earshot", "python", "torch", "safetensors", "transformers"}
    assert (target / "tokenizer.json").read_bytes() == checkpoint.tokenizer_json
    matrices = {name for name, tensor in weights.items() if tensor.dtype == torch.int8}
    assert set(manifest.quantization) == matrices
    assert bool(matrices) == (precision == "int8")


def test_int8_weights_are_close_and_plain_ones_equal(checkpoint, target):
    engine = write_engine(checkpoint, target)
    weights = engine.load_weights()
    for name, tensor in checkpoint.tensors.items():
        if name in engine.manifest.quantization:
            scale = weights[name.removesuffix(".weight") + ".scale"].float()[:, None]
            error = (weights[name] * scale - tensor.float()).abs().max()
            assert float(error) == pytest.approx(engine.manifest.quantization[name].max_abs)
            assert 0 < engine.manifest.quantization[name].relative < 0.01
        else:
            assert torch.equal(weights[name], tensor)
    codes, scale = quantize_rows(checkpoint.tensors["decoder.tokens"])
    assert torch.equal(weights["decoder.tokens"], codes)
    assert torch.equal(weights["decoder.tokens.scale"], scale)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 1e6])
@pytest.mark.parametrize("name", ["encoder.norm.bias", "decoder.layers.0.mlp.fc1.weight"])
def test_values_that_float16_cannot_hold_are_refused(checkpoint, bad, name):
    broken = checkpoint.tensors[name].float()
    broken.view(-1)[3] = bad * 127
    damaged = dataclasses.replace(checkpoint, tensors=dict(checkpoint.tensors) | {name: broken})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN, infinity or values beyond"):
        convert(damaged, "int8")


def test_other_users_can_read_the_engine(checkpoint, target):
    old = os.umask(0o022)
    try:
        write_engine(checkpoint, target)
    finally:
        os.umask(old)
    assert target.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}
