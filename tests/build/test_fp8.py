"""build.verify: FP8 is taken if it changes no more of the text than INT8 weights do."""

import dataclasses

import pytest
import torch

from build import verify
from build.checkpoint import open_checkpoint
from build.clips import load_clips
from build.decoding import agreement
from serve.contract.config import RuntimeConfig
from serve.native.kernels import choose
from serve.native.runtime import NativeRuntime
from tests.checkpoints import write_engine

CLIPS = "tests/data/demo.jsonl"
PROOF = choose.Fp8Proof(agreement=0.98, int8_agreement=0.95, windows=30, device="a GPU")
GPU = torch.device("cuda")


def test_agreement_is_the_mean_over_windows_of_what_is_equal():
    assert agreement([(1, 2, 3, 4)], [(1, 2, 3, 4)]) == 1.0
    assert agreement([(1, 2, 3, 4), (5, 6)], [(1, 2, 9, 4), (7, 8)]) == pytest.approx(0.375)


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize(
    ("precision", "proof", "expected", "why"),
    [
        ("auto", PROOF, True, "FP8 leaves 98.0% of the text unchanged, INT8 95.0%"),
        (
            "auto",
            dataclasses.replace(PROOF, agreement=0.9),
            False,
            "in full precision: FP8 leaves 90.0%",
        ),
        ("auto", None, False, "FP8 is not verified; run `python -m build verify`"),
        ("full", PROOF, False, "full"),
    ],
)
def test_auto_takes_what_is_proved_on_what_has_it(
    precision, proof, expected, why, hopper, monkeypatch
):
    capability = (9, 0) if hopper else (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    taken, reason = choose.takes_fp8(precision, GPU, proof)
    assert taken == (expected and hopper)
    assert (why if hopper or precision == "full" else "this GPU has no FP8") in reason


@pytest.mark.nightly
def test_an_engine_is_held_against_itself_and_against_the_other_precision(
    checkpoint, tmp_path, monkeypatch
):
    """On a CPU, with an FP8 that is played by zeros for one of the encoder's matrices."""
    engine, runs = write_engine(checkpoint, tmp_path / "engine"), []

    class Damaged(type(engine)):
        def load_weights(self, device="cpu"):
            weights = super().load_weights(device)
            weights["encoder.layers.0.mlp.fc2.weight"].zero_()
            return weights

    def opened(engine, config):
        runs.append((engine.manifest.precision, config.encoder_precision))
        if config.encoder_precision == "fp8":
            engine = Damaged(engine.path, engine.manifest)
        return NativeRuntime(engine, dataclasses.replace(config, encoder_precision="full"))

    monkeypatch.setattr(verify, "NativeRuntime", opened)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    proof = verify.prove_fp8(engine, checkpoint, CLIPS, RuntimeConfig(threads=1))
    assert runs == [("int8", "full"), ("int8", "fp8"), ("fp16", "full")]
    assert proof.agreement < proof.int8_agreement <= 1.0 and not proof.holds
    chosen = [clip for clip in load_clips(CLIPS) if clip.half == "choose"]
    assert (proof.windows, proof.device) == (len(chosen), "a GPU")


@pytest.mark.gpu
def test_a_gpu_proves_it_and_takes_what_holds(tmp_path):
    demo = open_checkpoint("tests/fixture/checkpoint")
    engine = write_engine(demo, tmp_path / "engine")
    config = RuntimeConfig(device="cuda", encoder_precision="auto")
    proof = verify.prove_fp8(engine, demo, "tests/data/manifest.jsonl", config)
    assert 0.5 < proof.agreement <= 1.0 and 0.5 < proof.int8_agreement <= 1.0
    for share in (0.0, 1.0):
        proved = dataclasses.replace(proof, agreement=share)
        manifest = dataclasses.replace(engine.manifest, fp8=proved)
        runtime = NativeRuntime(dataclasses.replace(engine, manifest=manifest), config)
        assert runtime.fp8 == proved.holds == (share > proof.int8_agreement or share == 1.0)
        runtime.close()
