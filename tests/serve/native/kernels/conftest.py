"""The kernels, on a GPU or in Triton's interpreter, and random numbers for them."""

import importlib
import importlib.util
import os
import sys

import pytest
import torch

from tests.serve.native.kernels.parity import DEVICE, ON_GPU

# NumPy's own words about what kernels do knowingly, when the interpreter runs them.
NUMPY_WARNINGS = (
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)


def pytest_itemcollected(item):
    for warning in NUMPY_WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="module")
def kernels():
    """The kernels' module; without a GPU they run in Triton's interpreter, which is slow."""
    if importlib.util.find_spec("triton") is None:
        pytest.fail(
            "triton is not installed; on a machine without a GPU: pip install triton==3.6.0"
        )
    if not ON_GPU:  # triton reads this when it is imported, and transformers imports it
        os.environ["TRITON_INTERPRET"] = "1"
        loaded = [n for n in sys.modules if n.split(".")[0] == "triton" and "._C" not in n]
        for name in loaded:
            del sys.modules[name]
    names = ("kernels.decoder", "rules.kernel", "kernels.encoder")
    return tuple(importlib.import_module(f"serve.native.{name}") for name in names)


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(5)

    def random(*shape, dtype=torch.float32, spread=1.0):
        return (torch.randn(shape, generator=generator) * spread).to(DEVICE, dtype)

    return random
