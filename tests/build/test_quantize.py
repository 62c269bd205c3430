"""build.quantize: what INT8 does to every matrix, extreme ones included."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from build.quantize import layer_error, quantize_rows
from serve.contract.manifest import LayerError

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


# ---------------------------------------------------------------- compensated rounding


def correlated(count, columns, seed):
    """Inputs (count, columns) that go together, as a network's do, some of much more power."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=torch.Generator().manual_seed(0))
    power = torch.logspace(0, 1.5, columns)
    return torch.randn(count, columns // 4, generator=generator) @ mixed[: columns // 4] * power


def moment_of(inputs):
    moment = inputs.T @ inputs
    moment.diagonal().add_(0.01 * moment.diagonal().mean())
    return moment


def output_error(weight, codes, scale, inputs):
    return float((inputs @ (weight - codes.float() * scale.float()[:, None]).T).norm())


def test_compensated_products_are_closer_on_inputs_that_were_not_seen():
    weight = torch.randn(24, 160, generator=torch.Generator().manual_seed(3))  # two blocks
    codes, scale = quantize_rows(weight, moment_of(correlated(2000, 160, 1)))
    unseen, nearest = correlated(500, 160, 2), quantize_rows(weight)
    assert output_error(weight, codes, scale, unseen) < 0.5 * output_error(weight, *nearest, unseen)
    assert torch.equal(scale, nearest[1])
    assert codes.dtype == torch.int8 and codes.is_contiguous()


def test_compensation_is_what_its_definition_says():
    """The plain twin inverts what is left of the moment anew for every column."""
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(5)).double()
    moment = moment_of(correlated(300, 20, 6)).double()
    scale = quantize_rows(weight)[1].double()
    codes, rest = torch.empty_like(weight), weight.clone()
    left = moment.diagonal().argsort(descending=True).tolist()
    while left:
        column, *others = left
        codes[:, column] = (rest[:, column] / scale).round().clamp(-127, 127)
        error = rest[:, column] - codes[:, column] * scale
        inverse = torch.linalg.inv(moment[left][:, left])
        rest[:, others] -= torch.outer(error, inverse[0, 1:] / inverse[0, 0])
        left = others
    assert torch.equal(quantize_rows(weight, moment.float())[0].double(), codes)


def test_compensated_rows_of_zeros_stay_zero_and_no_code_leaves_its_range():
    weight = torch.randn(8, 40)
    weight[3] = 0
    codes, scale = quantize_rows(weight, moment_of(correlated(60, 40, 7)))
    assert not codes[3].any() and scale[3] == 0
    assert int(codes.abs().max()) <= 127
