"""build.calibrate: what a checkpoint's matrices read, and engines that are rounded by it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from build import calibrate, native
from build.__main__ import main
from build.builders import build_engine, up_to_date
from build.calibrate import calibration_of, clip_windows, second_moments
from build.config import BuildConfig, BuildProduct
from build.native import convert
from build.recordings import VerificationAudio
from build.reference import features_of
from build.summary import summary
from serve.contract.engine import open_engine, tensor_kinds
from serve.native.network import Whisper
from serve.speech.features import SAMPLE_RATE

CLIPS = "tests/data/human/calibration.jsonl"


@pytest.fixture
def manifest(tmp_path):
    """A manifest of two short clips of the bundled ones, in a separate folder."""
    lines = Path("tests/data/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    clips = sorted(map(json.loads, lines), key=lambda clip: clip["duration"])
    return write_manifest(tmp_path, [clip for clip in clips if clip["text"]][:2])


def write_manifest(folder, clips):
    for clip in clips:
        shutil.copyfile(Path("tests/data") / clip["file"], folder / clip["file"])
    path = folder / "clips.jsonl"
    path.write_text("\n".join(map(json.dumps, clips)), encoding="utf-8")
    return path


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibrate, "MAX_TOKENS", 12)


@pytest.fixture
def windows():
    rng = np.random.default_rng(1)
    speech = [(0.1 * rng.standard_normal(8 * SAMPLE_RATE)).astype(np.float32) for _ in range(3)]
    return [VerificationAudio(f"noise {i}", samples) for i, samples in enumerate(speech)]


@pytest.fixture
def config_of(monkeypatch):
    def config_of(target, manifest, **changes):
        monkeypatch.setattr(native, "CALIBRATE_CLIPS", str(manifest))
        return BuildProduct(engine=str(target), build=BuildConfig(calibrate=True, **changes))

    return config_of


def test_every_quantised_matrix_has_a_moment(checkpoint, windows, few_tokens):
    moments = second_moments(checkpoint, windows[:1])
    kinds = {name: shape for name, shape, k in tensor_kinds(checkpoint.dims) if k == "quantized"}
    assert {name: (shape[1], shape[1]) for name, shape in kinds.items()} == {
        name: tuple(moment.shape) for name, moment in moments.items()
    }
    for moment in moments.values():
        assert torch.linalg.eigvalsh(moment.double())[0] > 0
    packed = [moments[f"encoder.layers.0.attn.{part}.weight"] for part in "qkv"]
    assert packed[0] is packed[1] is packed[2]
    cross = [moments[f"decoder.layers.0.cross.{part}.weight"] for part in "kv"]
    assert cross[0] is cross[1] and cross[0] is not moments["decoder.layers.0.cross.q.weight"]


def test_a_moment_is_of_the_inputs(checkpoint, windows, few_tokens):
    """The encoder's output is what cross-attention's keys are made of."""
    found = second_moments(checkpoint, windows)["decoder.layers.0.cross.k.weight"]
    tensors, _ = convert(checkpoint, "fp16")
    network = Whisper(checkpoint.dims, tensors, torch.device("cpu"))
    filters = calibrate.mel_filters(checkpoint.dims.n_mels)
    encoded = torch.cat([network.encode(features_of(w, filters))[0] for w in windows])
    expected = encoded.T @ encoded
    expected.diagonal().add_(0.01 * expected.diagonal().mean())
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_an_engine_says_how_it_was_calibrated(
    checkpoint, manifest, tmp_path, few_tokens, config_of
):
    config = config_of(tmp_path / "engine", manifest)
    engine = build_engine(checkpoint, config, print)
    assert engine.manifest.calibration == calibration_of(manifest)
    assert engine.manifest.calibration.clips == 2
    assert "calibrated" in summary(engine) and "on 2 clips" in summary(engine)
    assert up_to_date(checkpoint, config, verified=False)
    plain = dataclasses.replace(config.build, calibrate=False)
    assert not up_to_date(checkpoint, dataclasses.replace(config, build=plain), verified=False)
    clips = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    write_manifest(manifest.parent, clips[:1])
    assert not up_to_date(checkpoint, config, verified=False)


def test_the_same_clips_make_the_same_engine(checkpoint, manifest, tmp_path, few_tokens, config_of):
    for name in "ab":
        build_engine(checkpoint, config_of(tmp_path / name, manifest), print)
    first, second = (open_engine(tmp_path / name).manifest.files for name in "ab")
    assert first == second


def test_float16_engines_hear_nothing(checkpoint, tmp_path, config_of):
    config = config_of(tmp_path / "engine", tmp_path / "nothing.jsonl", precision="fp16")
    assert build_engine(checkpoint, config, print).manifest.calibration is None
    assert up_to_date(checkpoint, config, verified=False)


@pytest.mark.nightly
def test_neighbours_of_one_language_are_joined_as_long_as_they_fit():
    windows = clip_windows(CLIPS)
    assert len(windows) == 16
    assert all(20 < window.samples.size / SAMPLE_RATE <= 30 for window in windows[:4])
    assert len({window.language for window in windows}) == 6


def test_no_clip_that_figures_are_reported_on_is_heard():
    folder = Path(CLIPS).parent
    halves = {}
    for line in (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines():
        clip = json.loads(line)
        halves[clip["file"]] = clip["half"]
    lines = Path(CLIPS).read_text(encoding="utf-8").splitlines()
    assert {halves[json.loads(line)["file"]] for line in lines} == {"choose"}


def test_the_flag_orders_it(nano_folder, tmp_path, monkeypatch, capsys):
    config = tmp_path / "nano.toml"
    config.write_text(f'engine = "{tmp_path}/e"\n[build]\ncheckpoint = "{nano_folder}"\n')
    monkeypatch.setattr(native, "CALIBRATE_CLIPS", f"{tmp_path}/nothing.jsonl")
    command = ["engine", "--config", str(config), "--no-verify"]
    assert main([*command, "--calibrate"]) != 0
    assert "nothing.jsonl" in capsys.readouterr().err
    assert main(command) == 0
    assert open_engine(tmp_path / "e").manifest.calibration is None
