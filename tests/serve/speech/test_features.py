"""Log-mel against transformers' extractor."""

import numpy as np
import pytest
import torch

from serve.contract.engine import mel_filters
from serve.speech import features


def noise(seconds, seed=0):
    samples = np.zeros(features.WINDOW_SAMPLES, np.float32)
    count = int(seconds * features.SAMPLE_RATE)
    samples[:count] = np.random.default_rng(seed).normal(0, 0.1, count)
    return samples


@pytest.mark.parametrize("n_mels", [80, pytest.param(128, marks=pytest.mark.nightly)])
def test_equals_transformers_for_every_window_of_a_batch(n_mels):
    batch = np.stack([noise(30), noise(3.7, 1), noise(0)])
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=n_mels)
    expected = extractor(list(batch), sampling_rate=16_000, return_tensors="np").input_features
    got = features.log_mel(torch.from_numpy(batch), mel_filters(n_mels))
    assert got.shape == (3, n_mels, features.N_FRAMES)
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [10, 12, 30])
def test_a_window_that_is_replayed_is_the_window_that_is_computed(seconds):
    """One after another, of which the first must not change when the second comes."""
    device, filters, length = torch.device("cuda"), mel_filters(80), seconds * features.SAMPLE_RATE
    recorded = [10 * features.SAMPLE_RATE, 30 * features.SAMPLE_RATE]
    compute = features.LogMel(filters, device, recorded)
    windows = [torch.from_numpy(noise(seconds - i, i)[: length - i]) for i in range(3)]
    pinned = [window.pin_memory() for window in windows]
    made = [compute(window, length) for window in pinned]
    for window, got in zip(windows, made, strict=True):
        padded = torch.nn.functional.pad(window, (0, length - len(window)))
        assert torch.equal(got, features.log_mel(padded[None].to(device), filters.to(device))[0])


@pytest.mark.parametrize("samples", [0, 1, 16_000, 47_999, 48_000])
def test_silence_extends_a_window(samples):
    filters, window = mel_filters(80), torch.from_numpy(noise(3)[:samples])
    padded = torch.nn.functional.pad(window, (0, 48_000 - samples))
    got = features.LogMel(filters, torch.device("cpu"))(window, 48_000)
    assert torch.equal(got, features.log_mel(padded[None], filters)[0])
