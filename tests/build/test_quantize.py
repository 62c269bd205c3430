"""build.quantize: what INT8 does to every matrix, extreme ones included."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from build.quantize import layer_error, quantize_rows
from serve.engine import LayerError

FLOAT16_TINY = 2.0**-24  # the smallest subnormal

matrices = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.floats(-60_000, 60_000, width=32),
)


@settings(max_examples=300, deadline=None, database=None)
@given(matrices, st.integers(-40, 0))
def test_every_element_is_within_half_a_scale(values, exponent):
    weight = torch.from_numpy(values) * 2.0**exponent
    quantized = quantize_rows(weight)
    scale = quantized.scale.double()[:, None]
    error = (quantized.codes.double() * scale - weight.double()).abs()
    # Float32 division may round an exact half the other way.
    assert bool((error <= scale / 2 * (1 + 1e-5)).all())
    assert int(quantized.codes.abs().max()) <= 127


@settings(max_examples=100, deadline=None, database=None)
@given(matrices)
def test_scale_is_the_smallest_float16_that_reaches_the_largest(values):
    weight = torch.from_numpy(values)
    quantized = quantize_rows(weight)
    largest = weight.abs().amax(dim=1)
    assert bool((quantized.scale.double() * 127 >= largest.double() * (1 - 1e-7)).all())
    below = torch.nextafter(quantized.scale, torch.zeros_like(quantized.scale)).double()
    assert bool(((below * 127 < largest.double()) | (quantized.scale == 0)).all())


def test_shapes_and_dtypes():
    quantized = quantize_rows(torch.randn(5, 3).half())
    assert quantized.codes.shape == (5, 3) and quantized.codes.dtype == torch.int8
    assert quantized.scale.shape == (5,) and quantized.scale.dtype == torch.float16
    assert quantized.dequantized().dtype == torch.float32


def test_rows_have_scales_of_their_own():
    row = torch.linspace(-1, 1, 64)
    quantized = quantize_rows(torch.stack([row, row * 1024]))
    assert torch.equal(quantized.codes[0], quantized.codes[1])
    assert quantized.scale[1] == quantized.scale[0] * 1024


def test_zero_rows_stay_zero():
    weight = torch.randn(3, 8)
    weight[1] = 0
    quantized = quantize_rows(weight)
    assert quantized.scale[1] == 0
    assert bool((quantized.dequantized()[1] == 0).all())
    assert layer_error(torch.zeros(2, 2), quantize_rows(torch.zeros(2, 2))) == LayerError(0.0, 0.0)


def test_rows_below_a_subnormal_scale_keep_their_size():
    weight = torch.tensor([[FLOAT16_TINY * 40, -FLOAT16_TINY * 3]])
    quantized = quantize_rows(weight)
    assert float(quantized.scale[0]) == FLOAT16_TINY
    assert quantized.codes.tolist() == [[40, -3]]


def test_a_scale_that_rounds_down_does_not_clip():
    """Rounded to the nearest float16, a scale of 1.4 subnormal steps would clip 127 at 178."""
    weight = torch.tensor([[FLOAT16_TINY * 1.4 * 127]])
    quantized = quantize_rows(weight)
    assert float(quantized.dequantized()) == pytest.approx(float(weight), rel=0.01)


def test_quantizing_again_changes_nothing():
    """Values on the grid stay there: codes depend on the scale that is stored."""
    once = quantize_rows(torch.randn(16, 64))
    twice = quantize_rows(once.dequantized())
    assert torch.equal(once.dequantized(), twice.dequantized())


def test_layer_error_is_what_it_says():
    weight = torch.tensor([[3.0, 4.0]])
    quantized = quantize_rows(weight)
    difference = (weight - quantized.dequantized()).double()
    error = layer_error(weight, quantized)
    assert error.relative == pytest.approx(float(difference.norm()) / 5.0, rel=1e-5)
    assert error.max_abs == pytest.approx(float(difference.abs().max()), rel=1e-5)
    assert 0 < error.relative < 0.005


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e8])
def test_values_beyond_float16_show_in_the_scale(bad):
    assert not bool(quantize_rows(torch.tensor([[1.0, bad]])).scale.isfinite().all())
