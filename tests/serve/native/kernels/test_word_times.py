"""Kernels of words' times against their definitions; without a GPU in Triton's interpreter."""

import importlib

import numpy as np
import pytest
import torch

from serve.native.alignment import MIN_DIVISOR, smoothed
from serve.native.kernels import reference_ops
from serve.speech.words import monotonic_path
from tests.serve.native.kernels.parity import DEVICE, ON_GPU


def compiled(module):
    """A module of kernels, imported once the fixture has chosen where they run."""
    return importlib.import_module(f"serve.native.kernels.{module}")


def compare(scores, sizes):
    """Windows of so many (tokens, frames)."""
    smooth = compiled("smooth").smooth
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*sizes, strict=True)]
    for one, (tokens, _) in zip(scores, sizes, strict=True):
        one[:, tokens:] = one[:, tokens - 1 : tokens]
    expected = smoothed(scores.to(DEVICE), *columns).mean(dim=1)
    found = smooth(scores.to(DEVICE, copy=True), *columns, MIN_DIVISOR)
    for mine, theirs, (tokens, frames) in zip(found, expected, sizes, strict=True):
        mine, theirs = mine[:tokens, :frames], theirs[:tokens, :frames]
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


def test_smoothing_is_the_definitions(kernels):
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 40), (9, 61), (2, 3), (9, 4), (3, 2), (4, 7)]
    compare(torch.randn(len(sizes), 3, 9, 61, generator=generator) * 4, sizes)


def test_of_one_frame_there_are_numbers(kernels):
    """All tokens attend to it alike: what a kernel makes of that is up to rounding."""
    smooth = compiled("smooth").smooth
    size = [torch.tensor([count], device=DEVICE) for count in (3, 1)]
    found = smooth(torch.randn(1, 2, 3, 5, device=DEVICE), *size, MIN_DIVISOR)
    assert found[0, :, 0].isfinite().all()


@pytest.mark.nightly
def test_several_programs_share_a_windows_frames(kernels):
    generator = torch.Generator().manual_seed(1)
    compare(torch.randn(1, 2, 6, 1030, generator=generator) * 4, [(6, 1029)])


def test_warping_is_the_definitions(kernels):
    warp = compiled("warp").warp
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 6, 33), (0, 9, 40), (3, 1, 7), (1, 2, 1), (4, 5, 3)]  # first row, rows, frames
    smooth = torch.randn(5, 9, 40, generator=generator)
    whole = torch.randint(-2, 3, (5, 9, 40), generator=generator).float()  # equals everywhere
    for matrix in (smooth, whole):
        columns = (torch.tensor(column, device=DEVICE) for column in zip(*sizes, strict=True))
        found = warp(matrix.to(DEVICE), *columns).cpu().numpy()
        for one, mine, (first, rows, frames) in zip(matrix, found, sizes, strict=True):
            expected = monotonic_path(one[first : first + rows, :frames].numpy())
            np.testing.assert_array_equal(mine[:rows], expected)


@pytest.mark.parametrize("spread", [1, 60])
def test_token_probability(kernels, random, spread):
    probability = compiled("probability").token_probability
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
