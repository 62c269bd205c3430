"""The smoothing kernels against their definition; without a GPU in Triton's interpreter."""

import importlib

import pytest
import torch

from serve.native.alignment import LEAST, smoothed
from tests.serve.native.kernels.parity import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"


def compare(scores, sizes):
    """Windows of so many (tokens, frames)."""
    smooth = importlib.import_module("serve.native.kernels.smooth").smooth
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*sizes, strict=True)]
    for one, (tokens, _) in zip(scores, sizes, strict=True):
        one[:, tokens:] = one[:, tokens - 1 : tokens]
    expected = smoothed(scores.to(DEVICE), *columns).mean(dim=1)
    found = smooth(scores.to(DEVICE, copy=True), *columns, LEAST)
    for mine, theirs, (tokens, frames) in zip(found, expected, sizes, strict=True):
        mine, theirs = mine[:tokens, :frames], theirs[:tokens, :frames]
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


def test_they_are_the_definitions(kernels):
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 40), (9, 61), (2, 3), (9, 4), (3, 2), (4, 7)]
    compare(torch.randn(len(sizes), 3, 9, 61, generator=generator) * 4, sizes)


def test_of_one_frame_there_are_numbers(kernels):
    """All tokens attend to it alike: what a kernel makes of that is up to rounding."""
    smooth = importlib.import_module("serve.native.kernels.smooth").smooth
    size = [torch.tensor([count], device=DEVICE) for count in (3, 1)]
    found = smooth(torch.randn(1, 2, 3, 5, device=DEVICE), *size, LEAST)
    assert found[0, :, 0].isfinite().all()


@pytest.mark.nightly
def test_several_programs_share_a_windows_frames(kernels):
    generator = torch.Generator().manual_seed(1)
    compare(torch.randn(1, 2, 6, 1030, generator=generator) * 4, [(6, 1029)])


def test_frames_that_nobody_attends_to_tell_nothing(kernels):
    scores = torch.zeros(1, 1, 3, 20)
    scores[..., 10:] = -400.0
    scores[0, 0, 1, 4] = 3.0
    compare(scores, [(3, 20)])
