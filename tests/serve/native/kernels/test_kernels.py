"""Every kernel against its plain torch twin: on a CPU through Triton's interpreter, or on a GPU."""

import dataclasses
import itertools

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.errors import UnavailableError
from serve.contract.manifest import Dims
from serve.native.kernels import reference_ops
from serve.native.kernels.choose import choose
from tests.marks import nightly
from tests.serve.native.kernels.parity import (
    DEVICE,
    DTYPES,
    GELU,
    ON_GPU,
    close,
    matrix_of,
    norm_of,
)

ROWS = [1, 20, 33, 130] if ON_GPU else [1, 33]
# (depth, outputs): tiny, wide, deep enough for a split, and a vocabulary
SHAPES = [(64, 192), (384, 1536), (1536, 384), (128, 8300)]
WORDS = 8300 if ON_GPU else 1300  # of a vocabulary, where its size is not what is tested
PROMPTS = (1816, (1280, 5120)) if ON_GPU else (290, (64, 5500))  # rows of a batch of them
if ON_GPU:
    SHAPES += [(1280, 3840), (1280, 1280), (5120, 1280), (1280, 51866)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "shape", "int8"),
    [
        *((33, SHAPES[0], True), (1, SHAPES[1], False)),
        *nightly(*itertools.product(ROWS, SHAPES, [True, False])),
        *nightly(*((*PROMPTS, int8) for int8 in (True, False))),
    ],
)
def test_linear_layers(ops, random, rows, shape, int8, dtype):
    depth, n_out = shape
    x = random(rows, depth, dtype=dtype) + 3
    norm = norm_of(random, depth)
    matrix = matrix_of(random, n_out, depth, dtype, int8)
    residual = random(rows, n_out, dtype=dtype)
    added = ops.linear_residual(x, matrix, residual)
    close(ops.finish(added), reference_ops.linear_residual(x, matrix, residual))
    bare = dataclasses.replace(matrix, bias=None)
    close(ops.finish(ops.norm_linear(x, norm, bare)), reference_ops.norm_linear(x, norm, bare))
    hidden = ops.norm_linear_gelu(x, norm, matrix)
    close(hidden, reference_ops.norm_linear_gelu(x, norm, matrix), GELU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "shape"),
    [(1, (64, 8300)), *nightly((1, SHAPES[-1]), (33, SHAPES[-1]), (33, (64, 8300)))],
)
@pytest.mark.parametrize("int8", [True, *nightly(False)])
def test_logits(ops, random, rows, shape, int8, dtype):
    depth, n_out = shape
    x, norm = random(rows, depth, dtype=dtype) + 3, norm_of(random, depth)
    matrix = matrix_of(random, n_out, depth, dtype, int8, bias=False)
    close(ops.logits(x, norm, matrix), reference_ops.logits(x, norm, matrix))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "int8"), [(66, True), *nightly((66, False), (130, True), (260, True), (390, True))]
)
def test_weights_that_are_kept_wide(ops, random, rows, int8, dtype):
    """By the tiles of every size, with all that may follow the sums, or none of it."""
    depth, n_out = (1280, 3840) if ON_GPU else (64, 1300)
    x, norm = random(rows, depth, dtype=dtype) + 3, norm_of(random, depth)
    residual = random(rows, n_out, dtype=dtype)
    matrix = matrix_of(random, n_out, depth, dtype, int8)
    kept = dataclasses.replace(matrix, half_weight=matrix.weight.to(dtype))
    close(
        ops.norm_linear_gelu(x, norm, kept), reference_ops.norm_linear_gelu(x, norm, matrix), GELU
    )
    added = ops.linear_residual(x, kept, residual)
    close(ops.finish(added), reference_ops.linear_residual(x, matrix, residual))
    words = matrix_of(random, WORDS, depth, dtype, int8, bias=False)
    kept = dataclasses.replace(words, half_weight=words.weight.to(dtype))
    close(ops.logits(x, norm, kept), reference_ops.logits(x, norm, words))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, *nightly(70)])
def test_logits_of_the_rows_that_are_wanted(ops, random, rows, dtype):
    """Of a tensor, and of a linear layer that the norm finishes."""
    x, norm = random(rows, 64, dtype=dtype), norm_of(random, 64)
    words = matrix_of(random, WORDS, 64, dtype, int8=True, bias=False)
    square = matrix_of(random, 64, 64, dtype, int8=True)
    wanted = torch.tensor([rows - 1, 0], device=DEVICE)
    for y in (x, ops.linear_residual(x, square, x)):
        twin = reference_ops.logits(ops.finish(y), norm, words, wanted)
        close(ops.logits(y, norm, words, wanted), twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "int8"),
    [
        (1, False),
        (8, True),
        (65, False),
        *nightly(*itertools.product([1, 5, 8, 20, 64, 65], [True, False])),
    ],
)
def test_layers_that_finish_each_other(ops, random, rows, int8, dtype):
    """The residual stream through a feed-forward block and into the next layer norm."""
    d, wide = (1280, 5120) if ON_GPU else (64, 192)
    x = random(rows, d, dtype=dtype)
    out = matrix_of(random, d, d, dtype, int8)
    fc1, fc2 = matrix_of(random, wide, d, dtype, int8), matrix_of(random, d, wide, dtype, int8)
    norms = [norm_of(random, d) for _ in range(2)]

    def block(ops, finish):
        y = ops.linear_residual(x, out, x)
        y = ops.linear_residual(ops.norm_linear_gelu(y, norms[0], fc1), fc2, y)
        return finish(ops.norm_linear(y, norms[1], out))

    close(block(ops, ops.finish), block(reference_ops, lambda y: y))


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("d", [384, 1280])
def test_a_layer_gives_a_row_the_same_bits_in_any_company(ops, random, d, int8):
    """Unfinished and finished sums, and layer norms of either, through a whole block.

    Where int8 weights are kept in float16 as well, many rows read those.
    """
    most, dtype = 1100, torch.float16
    x = random(most, d, dtype=dtype)
    out = matrix_of(random, d, d, dtype, int8)
    fc1 = matrix_of(random, 4 * d, d, dtype, int8)
    fc2 = matrix_of(random, d, 4 * d, dtype, int8)
    norms = [norm_of(random, d) for _ in range(2)]
    words = matrix_of(random, 8300, d, dtype, int8, bias=False)

    def block(x, out=out, fc1=fc1, fc2=fc2):
        y = ops.linear_residual(x, out, x)
        y = ops.linear_residual(ops.norm_linear_gelu(y, norms[0], fc1), fc2, y)
        return ops.logits(y, norms[1], words)

    everyone = block(x)
    kept = [ops.store(matrix) for matrix in (out, fc1, fc2)]
    bulk_copies = torch.cuda.get_device_capability() >= (9, 0)
    assert all((matrix.half_weight is not None) == bulk_copies for matrix in kept)
    for rows in (65, 128, 300, 600, most):
        assert torch.equal(block(x[:rows], *kept), everyone[:rows])
    for rows in (1, 2, 8, 9, 16, 33, 64, 65, 128, 256, 300):
        for begin in (0, most - rows):
            few = block(x[begin : begin + rows].contiguous())
            assert torch.equal(few, everyone[begin : begin + rows]), rows


VOCAB = Dims(80, 1500, 64, 1, 1, 128, 4100 + 1501, 64, 64, 1, 1, 128)


def test_the_choice_of_kernels_says_why():
    assert choose("auto", torch.device("cpu"), VOCAB, 4).name == "onednn"
    assert choose("torch", torch.device("cpu"), VOCAB, 4).reason == 'runtime.kernels = "torch"'
    with pytest.raises(UnavailableError, match=r'"triton" cannot run here: the device is cpu'):
        choose("triton", torch.device("cpu"), VOCAB, 4)
    assert RuntimeConfig().kernels == "auto"
