"""Products of the fewest rows: how their weights lie; their bits are those of other products."""

import dataclasses

import pytest
import torch

from serve.native.kernels import reference_ops
from serve.native.kernels.packed import pack
from tests.serve.native.kernels.parity import GELU, close, matrix_of, norm_of

SHAPES = [(64, 192), (384, 1152), (1536, 384), (512, 8300), (1280, 3840), (5120, 1280)]
HALF = torch.float16
ROWS = 8  # at most


def fragments(weight):
    """What `mma.sync` m16n8k16 has in its left operand's registers, as PTX tells it.

    weight: (16, 16) -> (32 lanes, 8 numbers).
    """
    lanes = []
    for lane in range(32):
        group, place = divmod(lane, 4)
        at = [(group + 8 * (i // 2 % 2), 2 * place + i % 2 + 8 * (i // 4)) for i in range(8)]
        lanes.append([int(weight[row, column]) for row, column in at])
    return torch.tensor(lanes)


@pytest.mark.parametrize(("n_out", "depth", "part"), [(32, 128, 64), (16, 512, 256), (20, 192, 64)])
def test_a_thread_finds_what_it_multiplies_in_sixteen_bytes_of_its_own(n_out, depth, part):
    weight = torch.randint(-127, 128, (n_out, depth), dtype=torch.int8)
    packed = pack(weight, part)
    tiles = -(-n_out // 16)
    assert packed.shape == (tiles, depth // part, 16 * part) and packed.dtype == torch.int8
    whole = torch.zeros(tiles * 16, depth, dtype=torch.int8)
    whole[:n_out] = weight
    # (tile, part, chunk, upper, lane, i, odd, outer, hi): see `pack`
    split = packed.view(tiles, depth // part, part // 64, 2, 32, 2, 2, 2, 2)
    for tile in range(tiles):
        for group in range(depth // 16):
            expected = fragments(whole[16 * tile :, 16 * group :])
            piece, rest = divmod(group, part // 16)
            chunk, i, outer = rest // 4, rest // 2 % 2, rest % 2
            found = split[tile, piece, chunk, :, :, i, :, outer]  # (upper, lane, odd, hi)
            assert torch.equal(found.permute(1, 3, 0, 2).reshape(32, 8).long(), expected)


@pytest.fixture(params=SHAPES, ids=str)
def products(request, ops, random):
    """(x of the most rows, norm, matrix, residual), where the kernels are chosen."""
    depth, n_out = request.param
    x = random(ROWS, depth, dtype=HALF) + 3
    matrix = ops.store(matrix_of(random, n_out, depth, HALF, int8=True))
    assert matrix.packed_weight is not None
    return x, norm_of(random, depth), matrix, random(ROWS, n_out, dtype=HALF)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, ROWS])
def test_they_are_the_twins_and_to_the_bit_those_of_more_rows(ops, products, rows):
    x, norm, matrix, residual = products
    others = dataclasses.replace(matrix, packed_weight=None)
    some, beside = x[:rows], residual[:rows]
    got = ops.norm_linear(some, norm, matrix)
    close(got, reference_ops.norm_linear(some, norm, matrix))
    assert torch.equal(got, ops.finish(ops.norm_linear(x, norm, others))[:rows])
    got = ops.norm_linear_gelu(some, norm, matrix)
    close(got, reference_ops.norm_linear_gelu(some, norm, matrix), GELU)
    assert torch.equal(got, ops.norm_linear_gelu(x, norm, others)[:rows])
    got = ops.linear_residual(some, matrix, beside)
    close(got, reference_ops.linear_residual(some, matrix, beside))
    many = x.repeat(9, 1), residual.repeat(9, 1)  # more than end unfinished
    assert torch.equal(got, ops.linear_residual(many[0], others, many[1])[:rows])
    words = dataclasses.replace(matrix, bias=None)
    got = ops.logits(some, norm, words)
    close(got, reference_ops.logits(some, norm, words))
    assert torch.equal(
        got, ops.logits(x, norm, dataclasses.replace(words, packed_weight=None))[:rows]
    )
