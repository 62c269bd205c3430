"""build.quantize: what INT8 does to every matrix, extreme ones included."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from build.quantize import layer_error, quantize_rows
from serve.contract.engine import LayerError

matrices = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.floats(-60_000, 60_000, width=32),
)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(matrices, st.integers(-40, 0))
def test_every_element_is_within_half_a_scale(values, exponent):
    weight = torch.from_numpy(values) * 2.0**exponent
    codes, scale = quantize_rows(weight)
    scale = scale.double()[:, None]
    error = (codes.double() * scale - weight.double()).abs()
    # Float32 division may round an exact half the other way.
    assert bool((error <= scale / 2 * (1 + 1e-5)).all())
    assert int(codes.abs().max()) <= 127


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(matrices)
def test_scale_is_the_smallest_float16_that_reaches_the_largest(values):
    weight = torch.from_numpy(values)
    _, scale = quantize_rows(weight)
    largest = weight.abs().amax(dim=1)
    assert bool((scale.double() * 127 >= largest.double() * (1 - 1e-7)).all())
    below = torch.nextafter(scale, torch.zeros_like(scale)).double()
    assert bool(((below * 127 < largest.double()) | (scale == 0)).all())


def test_zero_rows_stay_zero():
    weight = torch.randn(3, 8)
    weight[1] = 0
    codes, scale = quantize_rows(weight)
    assert scale[1] == 0 and not codes[1].any()
    assert layer_error(weight[1:2], codes[1:2], scale[1:2]) == LayerError(0.0, 0.0)
