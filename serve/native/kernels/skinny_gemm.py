"""Multiply up to eight rows by an INT8 matrix, with layer norm and epilogue, in one Gluon kernel.

A program has sixteen outputs, and each warp sums one part of the depth on tensor cores.
A warp requests all its weights before it waits for its input. The program adds the parts in order
(see `linear`) and applies the epilogue. A step of few rows therefore needs one kernel for each
matrix and each attention.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.fragments import like, mma_layout
from serve.native.kernels.launch import launch
from serve.native.kernels.linear import Epilogue, finish
from serve.native.kernels.packed import (
    OUTPUTS,
    TURN,
    PackedConfig,
    operand,
    rows_layout,
    tile_layout,
    weights,
    words_layout,
)
from serve.native.kernels.partial_sums import given
from serve.native.kernels.reference_ops import LAYER_NORM_EPS, Matrix, Norm
from serve.native.kernels.tiles import part_of

THIN_ROWS = 8
_WARPS, _WARPS_AGAIN = 24, 16  # resident warps of a multiprocessor, without and with `again`


class Gains(NamedTuple):
    """A layer norm's weight and bias, float32 (depth,); unused tensors if there is none."""

    weight: torch.Tensor
    bias: torch.Tensor


def normalises(depth: int) -> bool:
    """Return whether a product of one row with this depth can include the layer norm before it."""
    return part_of(depth) <= int(TURN.value)


def multiply_thin(
    x: torch.Tensor,
    matrix: Matrix,
    params: Norm | None,
    residual: torch.Tensor | None,
    gelu: bool,
    out: torch.Tensor,
    processors: int,
    pdl: bool,
) -> None:
    """Launch `thin_kernel`.

    Args:
        x: float16 (rows, in), at most `THIN_ROWS` rows.
        matrix: INT8; `thin` is the result of `pack` as int32.
        params: a layer norm of x; x must then be one row, and `normalises(in)` true.
        residual: float16 (rows, out), added to the result.
        gelu: whether exact GELU follows.
        out: float16 or float32 (rows, out).
        processors: the number of multiprocessors of the device.
        pdl: whether the kernel may begin while the previous kernel ends.
    """
    assert x.is_contiguous() and matrix.thin is not None and matrix.scale is not None
    assert params is None or (len(x) == 1 and normalises(x.shape[1]))
    tiles, parts, _ = matrix.thin.shape
    warps = triton.next_power_of_2(parts)
    # A program of several tiles holds the weights of two, so it needs more registers.
    again = tiles > processors * max(1, _WARPS // warps)
    programs = min(tiles, processors * max(1, _WARPS_AGAIN // warps)) if again else tiles
    shape = PackedConfig(
        depth=x.shape[1],
        part=x.shape[1] // parts,
        warps=warps,
        norm=params is not None,
        eps=LAYER_NORM_EPS,
        has_bias=matrix.bias is not None,
        gelu=gelu,
        has_residual=residual is not None,
        again=again,
        pdl=pdl,
    )
    gains = Gains(x, x) if params is None else Gains(params.weight, params.bias)
    ending = Epilogue(matrix.scale, given(matrix.bias, x), given(residual, x))
    sizes = (len(x), len(matrix.weight), shape)
    launch(thin_kernel, programs)(
        x, gains, matrix.thin, ending, out, *sizes, num_warps=warps, launch_pdl=pdl
    )


@gluon.jit
def _rows(x, turn: gl.constexpr, rows: int, shape: gl.constexpr) -> gl.tensor:
    """Load a turn of x (rows, depth) as a right operand (warps, turn, 8)."""
    layout: gl.constexpr = rows_layout(shape)
    warps: gl.constexpr = shape.warps
    depth: gl.constexpr = shape.turn
    row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    place = gl.expand_dims(gl.arange(0, warps * depth, gl.SliceLayout(0, layout)), 0)
    at = place // depth * shape.part + turn * depth + place % depth
    inside = (row < rows) & (place < shape.parts * depth)
    return operand(gl.load(x + row * shape.depth + at, mask=inside, other=0.0), shape)


@gluon.jit
def _all_rows(x, rows: int, shape: gl.constexpr) -> gl.tuple:
    """Load all turns of x (rows, depth)."""
    turns: gl.constexpr = shape.turns
    operands = ()
    for turn in gl.static_range(turns):
        operands = operands + (_rows(x, turn, rows, shape),)
    return operands


@gluon.jit
def _add_both(a, b, more_a, more_b) -> tuple[gl.tensor, gl.tensor]:
    return a + more_a, b + more_b


@gluon.jit
def _pairs(x) -> gl.tensor:
    """Add each two adjacent numbers of (rows, n)."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)


@gluon.jit
def _eighth(x) -> gl.tensor:
    """Add each eight adjacent numbers of (rows, n) in pairs, an order that no layout changes."""
    return _pairs(_pairs(_pairs(x))).to(gl.float64)


@gluon.jit
def _normed_row(x, norm: Gains, shape: gl.constexpr) -> gl.tensor:
    """Normalise x (depth,) with the bits of `linear.norm_kernel`; return an operand like `_rows`.

    It requests the norm's weights before it waits for x.
    """
    block: gl.constexpr = shape.block
    spread: gl.constexpr = gl.BlockedLayout([1, shape.each], [1, 32], [1, shape.warps], [1, 0])
    at = gl.expand_dims(gl.arange(0, block, gl.SliceLayout(0, spread)), 0)
    inside = at < shape.depth
    gain = gl.load(norm.weight + at, mask=inside, other=0.0)
    shift = gl.load(norm.bias + at, mask=inside, other=0.0)
    if shape.pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = gl.load(x + at, mask=inside, other=0.0).to(gl.float32)
    total, squares = gl.reduce((_eighth(value), _eighth(value * value)), 1, _add_both)
    of_row: gl.constexpr = gl.SliceLayout(1, spread)
    total, squares = gl.convert_layout(total, of_row), gl.convert_layout(squares, of_row)
    mean = total * (1.0 / shape.depth)
    variance = gl.fma(-mean, mean, squares * (1.0 / shape.depth)).to(gl.float32)
    rstd = 1.0 / gl.sqrt(variance + shape.eps)
    factor = (value - gl.expand_dims(mean.to(gl.float32), 1)) * gl.expand_dims(rstd, 1)
    normed = gl.fma(factor, gain, shift).to(gl.float16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = rows_layout(shape)
    row = gl.allocate_shared_memory(gl.float16, [1, block], flat, normed).load(layout)
    # The operand has eight rows. They are all this row, and the caller stores only one result.
    every, _ = gl.broadcast(row, gl.zeros([8, block], gl.float16, layout))
    return operand(every, shape)


@gluon.jit
def _outputs_of(tile: int, shape: gl.constexpr) -> gl.tensor:
    """Return the indices of a tile's outputs, (16, 1)."""
    return tile * OUTPUTS + gl.expand_dims(
        gl.arange(0, 16, gl.SliceLayout(1, tile_layout(shape))), 1
    )


@gluon.jit
def _load_tile(
    weight, ending: Epilogue, tile: int, n_out: int, shape: gl.constexpr
) -> tuple[gl.tuple, gl.tensor, gl.tensor]:
    """Load (weights of each turn, scales, biases) of a tile; no kernel writes them.

    The weights are 0 in warps that do not sum, and if the tile does not exist.
    """
    layout: gl.constexpr = words_layout(shape)
    warp = gl.expand_dims(gl.arange(0, shape.warps, gl.SliceLayout(1, layout)), 1)
    at = gl.expand_dims(gl.arange(0, shape.words, gl.SliceLayout(0, layout)), 0)
    inside = (warp < shape.parts) & (tile * OUTPUTS < n_out)
    begin = weight + tile * (shape.depth * 4)
    turns: gl.constexpr = shape.turns
    words = ()
    for turn in gl.static_range(turns):
        place = warp * (shape.part * 4) + turn * shape.words + at
        words = words + (gl.load(begin + place, mask=inside, other=0),)
    n = _outputs_of(tile, shape)
    scale = gl.load(ending.scale + n, mask=n < n_out, other=0.0).to(gl.float32)
    bias = scale * 0.0
    if shape.has_bias:
        bias = gl.load(ending.bias + n, mask=n < n_out, other=0.0).to(gl.float32)
    return words, scale, bias


@gluon.jit
def _store_tile(
    loaded: gl.tuple,
    operands: gl.tuple,
    ending: Epilogue,
    out,
    tile: int,
    rows: int,
    n_out: int,
    shape: gl.constexpr,
) -> None:
    """Multiply all rows by a tile, add the parts in order, finish and store the outputs."""
    words, scale, bias = loaded
    warps: gl.constexpr = shape.warps
    mma: gl.constexpr = mma_layout(warps)
    parts: gl.constexpr = shape.parts
    turns: gl.constexpr = shape.turns
    lines: gl.constexpr = tile_layout(shape)
    n = _outputs_of(tile, shape)
    m = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, lines)), 0)
    inside = (n < n_out) & (m < rows)
    at = m.to(gl.int64) * n_out + n
    residual = gl.zeros([16, 8], gl.float32, lines)
    if shape.has_residual:
        residual = gl.load(ending.residual + at, mask=inside, other=0.0).to(gl.float32)
    acc = gl.zeros([warps, 16, 8], gl.float32, mma)
    for turn in gl.static_range(turns):
        acc = mma_v2(weights(words[turn], shape), operands[turn], acc)
    every_line: gl.constexpr = [warps * 16, 8]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, every_line, flat, gl.reshape(acc, every_line))
    total = sums.slice(0, 16).load(lines)
    for part in gl.static_range(1, parts):
        total += sums.slice(part * 16, 16).load(lines)
    total = finish(total, like(scale, total), like(bias, total), True, shape.has_bias, shape.gelu)
    if shape.has_residual:
        total += residual
    gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=("rows",))
def thin_kernel(
    x, norm: Gains, weight, ending: Epilogue, out, rows: int, n_out: int, shape: gl.constexpr
) -> None:
    """Multiply x (rows, depth), or its layer norm, by a matrix: out (rows, n_out)."""
    tile = gl.program_id(0)
    loaded = _load_tile(weight, ending, tile, n_out, shape)
    if shape.norm:
        operands = (_normed_row(x, norm, shape),)
    else:
        if shape.pdl:
            gdc_launch_dependents()
            gdc_wait()
        operands = _all_rows(x, rows, shape)
    if shape.again:
        while tile * OUTPUTS < n_out:
            following = tile + gl.num_programs(0)
            then = _load_tile(weight, ending, following, n_out, shape)
            _store_tile(loaded, operands, ending, out, tile, rows, n_out, shape)
            tile, loaded = following, then
    else:
        _store_tile(loaded, operands, ending, out, tile, rows, n_out, shape)
