"""Multiply up to eight rows by an INT8 matrix, with layer norm and epilogue, in one Gluon kernel.

A program computes sixteen outputs, and each of its warps sums one part of the depth on tensor
cores. A warp requests all its weights before it waits for its input. The program adds the parts in
order (see `linear`) and applies the epilogue. A step of few rows therefore needs one kernel for
each matrix and each attention.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.fragments import broadcast_like, mma_layout
from serve.native.kernels.launch import launch
from serve.native.kernels.linear import Epilogue, apply_epilogue
from serve.native.kernels.packed import (
    MAX_BLOCK_K,
    OUTPUTS,
    PackedConfig,
    rows_layout,
    rows_operand,
    tile_layout,
    weights_operand,
    words_layout,
)
from serve.native.kernels.partial_sums import or_unused
from serve.native.kernels.reference_ops import LAYER_NORM_EPS, Matrix, Norm
from serve.native.kernels.tiles import split_depth

SKINNY_ROWS = 8
_WARPS, _PERSISTENT_WARPS = 24, 16  # resident warps of a multiprocessor


class NormWeights(NamedTuple):
    """A layer norm's weight and bias, float32 (depth,); unused tensors if there is none."""

    weight: torch.Tensor
    bias: torch.Tensor


def can_normalise(depth: int) -> bool:
    """Return whether the kernel can compute the layer norm before it, of one row of this depth."""
    return split_depth(depth) <= int(MAX_BLOCK_K.value)


def multiply_skinny(
    x: torch.Tensor,
    matrix: Matrix,
    params: Norm | None,
    residual: torch.Tensor | None,
    gelu: bool,
    out: torch.Tensor,
    processors: int,
    pdl: bool,
) -> None:
    """Launch `skinny_gemm_kernel`.

    Args:
        x: float16 (rows, in), at most `SKINNY_ROWS` rows.
        matrix: INT8; `packed_weight` is the result of `pack` as int32.
        params: a layer norm of x; x must then be one row, and `can_normalise(in)` true.
        residual: float16 (rows, out), added to the result.
        gelu: whether exact GELU follows.
        out: float16 or float32 (rows, out).
        processors: the number of multiprocessors of the device.
        pdl: whether the kernel may begin while the previous kernel ends.
    """
    assert x.is_contiguous() and matrix.packed_weight is not None and matrix.scale is not None
    assert params is None or (len(x) == 1 and can_normalise(x.shape[1]))
    tiles, parts, _ = matrix.packed_weight.shape
    warps = triton.next_power_of_2(parts)
    # A program of several tiles holds the weights of two, so it needs more registers.
    persistent = tiles > processors * max(1, _WARPS // warps)
    programs = min(tiles, processors * max(1, _PERSISTENT_WARPS // warps)) if persistent else tiles
    config = PackedConfig(
        depth=x.shape[1],
        part=x.shape[1] // parts,
        warps=warps,
        norm=params is not None,
        eps=LAYER_NORM_EPS,
        has_bias=matrix.bias is not None,
        gelu=gelu,
        has_residual=residual is not None,
        persistent=persistent,
        pdl=pdl,
    )
    norm = NormWeights(x, x) if params is None else NormWeights(params.weight, params.bias)
    epilogue = Epilogue(matrix.scale, or_unused(matrix.bias, x), or_unused(residual, x))
    sizes = (len(x), len(matrix.weight), config)
    launch(skinny_gemm_kernel, programs)(
        x, norm, matrix.packed_weight, epilogue, out, *sizes, num_warps=warps, launch_pdl=pdl
    )


@gluon.jit
def _load_rows(x, k_block: gl.constexpr, rows: int, config: gl.constexpr) -> gl.tensor:
    """Load one block of each warp's part of x, (rows, depth), as a right operand."""
    layout: gl.constexpr = rows_layout(config)
    warps: gl.constexpr = config.warps
    block_k: gl.constexpr = config.block_k
    row = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
    index = gl.expand_dims(gl.arange(0, warps * block_k, gl.SliceLayout(0, layout)), 0)
    column = index // block_k * config.part + k_block * block_k + index % block_k
    mask = (row < rows) & (index < config.parts * block_k)
    return rows_operand(gl.load(x + row * config.depth + column, mask=mask, other=0.0), config)


@gluon.jit
def _load_all_rows(x, rows: int, config: gl.constexpr) -> gl.tuple:
    """Load all blocks of x, (rows, depth), as right operands."""
    k_blocks: gl.constexpr = config.k_blocks
    operands = ()
    for k_block in gl.static_range(k_blocks):
        operands = operands + (_load_rows(x, k_block, rows, config),)
    return operands


@gluon.jit
def _add_both(a, b, more_a, more_b) -> tuple[gl.tensor, gl.tensor]:
    return a + more_a, b + more_b


@gluon.jit
def _sum_pairs(x) -> gl.tensor:
    """Sum every two adjacent numbers of (rows, n)."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)


@gluon.jit
def _sum_eights(x) -> gl.tensor:
    """Sum every eight adjacent numbers of (rows, n) pairwise; no layout changes this order."""
    return _sum_pairs(_sum_pairs(_sum_pairs(x))).to(gl.float64)


@gluon.jit
def _normed_row(x, norm: NormWeights, config: gl.constexpr) -> gl.tensor:
    """Apply a layer norm to x (depth,), as a right operand; bit-identical to `linear.norm_kernel`.

    The program requests the norm's weights before it waits for x.
    """
    block: gl.constexpr = config.block
    warps: gl.constexpr = config.warps
    layout: gl.constexpr = gl.BlockedLayout([1, config.per_thread], [1, 32], [1, warps], [1, 0])
    column = gl.expand_dims(gl.arange(0, block, gl.SliceLayout(0, layout)), 0)
    mask = column < config.depth
    gain = gl.load(norm.weight + column, mask=mask, other=0.0)
    shift = gl.load(norm.bias + column, mask=mask, other=0.0)
    if config.pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = gl.load(x + column, mask=mask, other=0.0).to(gl.float32)
    total, squares = gl.reduce((_sum_eights(value), _sum_eights(value * value)), 1, _add_both)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    total, squares = gl.convert_layout(total, row_layout), gl.convert_layout(squares, row_layout)
    mean = total * (1.0 / config.depth)
    variance = gl.fma(-mean, mean, squares * (1.0 / config.depth)).to(gl.float32)
    rstd = 1.0 / gl.sqrt(variance + config.eps)
    normalised = (value - gl.expand_dims(mean.to(gl.float32), 1)) * gl.expand_dims(rstd, 1)
    normed = gl.fma(normalised, gain, shift).to(gl.float16)
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    operand_layout: gl.constexpr = rows_layout(config)
    shared = gl.allocate_shared_memory(gl.float16, [1, block], shared_layout, normed)
    row = shared.load(operand_layout)
    # The operand has eight rows. They are all this row, and the caller stores only one result.
    repeated, _ = gl.broadcast(row, gl.zeros([8, block], gl.float16, operand_layout))
    return rows_operand(repeated, config)


@gluon.jit
def _output_index(tile: int, config: gl.constexpr) -> gl.tensor:
    """Return the indices of a tile's outputs, (16, 1)."""
    index = gl.arange(0, 16, gl.SliceLayout(1, tile_layout(config)))
    return tile * OUTPUTS + gl.expand_dims(index, 1)


@gluon.jit
def _load_tile(
    weight, epilogue: Epilogue, tile: int, n_out: int, config: gl.constexpr
) -> tuple[gl.tuple, gl.tensor, gl.tensor]:
    """Load a tile's weights by block, its scales and its biases; no kernel writes them.

    The weights are 0 in warps without a part, and if the tile does not exist.
    """
    layout: gl.constexpr = words_layout(config)
    warp = gl.expand_dims(gl.arange(0, config.warps, gl.SliceLayout(1, layout)), 1)
    word = gl.expand_dims(gl.arange(0, config.words, gl.SliceLayout(0, layout)), 0)
    mask = (warp < config.parts) & (tile * OUTPUTS < n_out)
    tile_begin = weight + tile * (config.depth * 4)
    k_blocks: gl.constexpr = config.k_blocks
    words = ()
    for k_block in gl.static_range(k_blocks):
        offsets = warp * (config.part * 4) + k_block * config.words + word
        words = words + (gl.load(tile_begin + offsets, mask=mask, other=0),)
    n = _output_index(tile, config)
    scale = gl.load(epilogue.scale + n, mask=n < n_out, other=0.0).to(gl.float32)
    bias = scale * 0.0
    if config.has_bias:
        bias = gl.load(epilogue.bias + n, mask=n < n_out, other=0.0).to(gl.float32)
    return words, scale, bias


@gluon.jit
def _store_tile(
    loaded: gl.tuple,
    operands: gl.tuple,
    epilogue: Epilogue,
    out,
    tile: int,
    rows: int,
    n_out: int,
    config: gl.constexpr,
) -> None:
    """Multiply all rows by a tile, add the parts in order, apply the epilogue and store."""
    words, scale, bias = loaded
    warps: gl.constexpr = config.warps
    mma: gl.constexpr = mma_layout(warps)
    parts: gl.constexpr = config.parts
    k_blocks: gl.constexpr = config.k_blocks
    layout: gl.constexpr = tile_layout(config)
    n = _output_index(tile, config)
    m = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
    mask = (n < n_out) & (m < rows)
    offsets = m.to(gl.int64) * n_out + n
    residual = gl.zeros([16, 8], gl.float32, layout)
    if config.has_residual:
        residual = gl.load(epilogue.residual + offsets, mask=mask, other=0.0).to(gl.float32)
    acc = gl.zeros([warps, 16, 8], gl.float32, mma)
    for k_block in gl.static_range(k_blocks):
        acc = mma_v2(weights_operand(words[k_block], config), operands[k_block], acc)
    sums_shape: gl.constexpr = [warps * 16, 8]
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(
        gl.float32, sums_shape, shared_layout, gl.reshape(acc, sums_shape)
    )
    total = sums.slice(0, 16).load(layout)
    for part in gl.static_range(1, parts):
        total += sums.slice(part * 16, 16).load(layout)
    scale, bias = broadcast_like(scale, total), broadcast_like(bias, total)
    total = apply_epilogue(total, scale, bias, True, config.has_bias, config.gelu)
    if config.has_residual:
        total += residual
    gl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=("rows",))
def skinny_gemm_kernel(
    x,
    norm: NormWeights,
    weight,
    epilogue: Epilogue,
    out,
    rows: int,
    n_out: int,
    config: gl.constexpr,
) -> None:
    """Multiply x (rows, depth), or its layer norm, by a matrix: out (rows, n_out)."""
    tile = gl.program_id(0)
    loaded = _load_tile(weight, epilogue, tile, n_out, config)
    if config.norm:
        operands = (_normed_row(x, norm, config),)
    else:
        if config.pdl:
            gdc_launch_dependents()
            gdc_wait()
        operands = _load_all_rows(x, rows, config)
    if config.persistent:
        while tile * OUTPUTS < n_out:
            next_tile = tile + gl.num_programs(0)
            next_loaded = _load_tile(weight, epilogue, next_tile, n_out, config)
            _store_tile(loaded, operands, epilogue, out, tile, rows, n_out, config)
            tile, loaded = next_tile, next_loaded
    else:
        _store_tile(loaded, operands, epilogue, out, tile, rows, n_out, config)
