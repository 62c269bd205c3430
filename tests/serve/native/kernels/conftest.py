"""Random numbers for kernels."""

import pytest
import torch

from tests.serve.native.kernels.parity import DEVICE, HEADS, KEYS


@pytest.fixture
def ops(kernels, monkeypatch):
    """The decoder's operations; what they allocate holds NaN, so that a gap in it is seen."""
    made = kernels[0].TritonOps(DEVICE, 256, HEADS, KEYS)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    return made


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(5)

    def random(*shape, dtype=torch.float32, spread=1.0):
        return (torch.randn(shape, generator=generator) * spread).to(DEVICE, dtype)

    return random
