"""The warping kernel against its definition; without a GPU in Triton's interpreter."""

import importlib

import numpy as np
import torch

from serve.speech.words import monotonic_path
from tests.serve.native.kernels.parity import ON_GPU

DEVICE = "cuda" if ON_GPU else "cpu"


def test_it_is_the_definitions(kernels):
    warp = importlib.import_module("serve.native.kernels.warp").warp
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
