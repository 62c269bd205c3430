"""Normalise the encoder's residual stream and quantize rows to FP8 with Triton-language kernels.

A program is one warp and handles one row, in pieces; their size divides the row's width. Thousands
of rows keep a GPU busy, and no work is lost by padding a row to a power of two.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import torch
import triton
import triton.language as tl

from serve.native.kernels.launch import launch
from serve.native.kernels.reference_ops import FP8_MAX, LAYER_NORM_EPS, Norm, Scaled

_MAX_PIECE = 256  # maximum numbers per piece


@triton.jit
def _store_row(
    row: tl.tuple,
    out,
    scale,
    width: tl.constexpr,
    piece: tl.constexpr,
    fp8: tl.constexpr,
    fp8_max: tl.constexpr,
) -> None:
    """Store a row's pieces in `out`; with FP8, divide the row by a scale and store that too."""
    pointers = out + tl.program_id(0).to(tl.int64) * width + tl.arange(0, piece)
    factor = 1.0
    if fp8:
        largest = tl.abs(row[0])
        for i in tl.static_range(1, width // piece):
            largest = tl.maximum(largest, tl.abs(row[i]))
        step = tl.maximum(tl.max(largest, 0), 1e-12) / fp8_max
        tl.store(scale + tl.program_id(0), step)
        factor = 1.0 / step
    for i in tl.static_range(width // piece):
        tl.store(pointers + i * piece, (row[i] * factor).to(out.dtype.element_ty))


@triton.jit
def stream_norm_kernel(
    x,
    delta,
    shift,
    weight,
    bias,
    out,
    scale,
    eps: tl.constexpr,
    width: tl.constexpr,
    piece: tl.constexpr,
    has_delta: tl.constexpr,
    has_shift: tl.constexpr,
    fp8: tl.constexpr,
    fp8_max: tl.constexpr,
) -> None:
    """Add delta to a row x of the stream in place; store the layer norm of x + shift in `out`."""
    column = tl.arange(0, piece)
    offsets = tl.program_id(0).to(tl.int64) * width + column
    row = ()
    total = tl.zeros([piece], tl.float32)
    for i in tl.static_range(width // piece):
        value = tl.load(x + offsets + i * piece)
        if has_delta:
            value = value.to(tl.float32) + tl.load(delta + offsets + i * piece)
            value = value.to(x.dtype.element_ty)
            tl.store(x + offsets + i * piece, value)
        value = value.to(tl.float32)
        if has_shift:
            value += tl.load(shift + column + i * piece)
        total += value
        row = row + (value,)
    mean = tl.sum(total, 0) / width
    squares = tl.zeros([piece], tl.float32)
    for i in tl.static_range(width // piece):
        centred = row[i] - mean
        squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    normed = ()
    for i in tl.static_range(width // piece):
        gain = tl.load(weight + column + i * piece)
        y = (row[i] - mean) * rstd * gain + tl.load(bias + column + i * piece)
        normed = normed + (y,)
    _store_row(normed, out, scale, width, piece, fp8, fp8_max)


@triton.jit
def scale_rows_kernel(
    x, out, scale, width: tl.constexpr, piece: tl.constexpr, fp8_max: tl.constexpr
) -> None:
    """Quantize one row to FP8 with a scale."""
    offsets = tl.program_id(0).to(tl.int64) * width + tl.arange(0, piece)
    row = ()
    for i in tl.static_range(width // piece):
        row = row + (tl.load(x + offsets + i * piece).to(tl.float32),)
    _store_row(row, out, scale, width, piece, True, fp8_max)


def stream_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    shift: torch.Tensor | None,
    params: Norm,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add delta to x in place, and return the layer norm of x + shift.

    Args:
        x: the residual stream (..., d).
        delta: (..., d), or None for 0.
        shift: float32 (d,), or None for 0.
        params: the layer norm's weights.
        out: the result's tensor; a new one like x by default.
        scale: float32 (rows,), written if `out` is FP8.
    """
    assert x.is_contiguous() and (delta is None or delta.is_contiguous())
    width = x.shape[-1]
    out = torch.empty_like(x) if out is None else out
    launch(stream_norm_kernel, x.numel() // width)(
        x,
        x if delta is None else delta,
        x if shift is None else shift,
        params.weight,
        params.bias,
        out,
        x if scale is None else scale,
        eps=LAYER_NORM_EPS,
        width=width,
        piece=_piece_of(width),
        has_delta=delta is not None,
        has_shift=shift is not None,
        fp8=scale is not None,
        fp8_max=FP8_MAX,
        num_warps=1,
    )
    return out


def scaled_stream_norm(
    x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor | None, params: Norm
) -> Scaled:
    """Add delta to x in place, and return the layer norm of x + shift in FP8."""
    out = empty_scaled(x.shape, x.device)
    stream_norm(x, delta, shift, params, out.values, out.scale)
    return out


def scale_rows(x: torch.Tensor) -> Scaled:
    assert x.is_contiguous()
    width = x.shape[-1]
    out = empty_scaled(x.shape, x.device)
    launch(scale_rows_kernel, x.numel() // width)(
        x, out.values, out.scale, width, _piece_of(width), FP8_MAX, num_warps=1
    )
    return out


def empty_scaled(shape: torch.Size, device: torch.device) -> Scaled:
    """Allocate FP8 rows and their scales."""
    return Scaled(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(shape.numel() // shape[-1], dtype=torch.float32, device=device),
    )


def _piece_of(width: int) -> int:
    return min(_MAX_PIECE, width & -width)  # the largest power of two that divides the width
