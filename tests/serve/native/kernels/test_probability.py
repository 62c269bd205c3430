"""Tokens' probabilities against the definition; without a GPU in Triton's interpreter."""

import importlib

import pytest
import torch

from serve.native.kernels import reference_ops
from tests.serve.native.kernels.parity import DEVICE, ON_GPU


@pytest.mark.parametrize("spread", [1, 60])
def test_token_probability(kernels, random, spread):
    probability = importlib.import_module("serve.native.kernels.probability").token_probability
    below = 50257 if ON_GPU else 5000
    logits = random(7, below + 1601, spread=spread)
    logits[3] = -1000.0  # of all alike
    logits[4, below + 5] = 1e4  # what does not count
    text = torch.tensor([0, 1, below - 1, 3, 4, 77, 4100], device=DEVICE)
    logits[5, 77] = 5 * spread
    found = probability(logits, text, below)
    torch.testing.assert_close(
        found, reference_ops.token_probability(logits, text, below), rtol=1e-4, atol=1e-12
    )
    assert float(found[3]) == pytest.approx(1 / below, rel=1e-4)
