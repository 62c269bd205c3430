"""Compute layer norms and linear layers with Triton-language kernels.

The depth of a matrix is cut into parts; their size depends on the matrix alone. Tensor cores sum
each part, and the parts are added in order. With many rows one program computes all parts and adds
them. With few rows each part has its own programs, and the next kernel adds the parts. A row's
result therefore has the same bits for any number of rows. Kernels are not specialised for the
number of rows, because prompts have any length.

With `pdl`, a kernel starts while the previous kernel still runs (programmatic dependent launch).
It loads its weights, which no kernel writes, and then waits for the previous kernel's results.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def, assignment"

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Sums(NamedTuple):
    """A linear layer's output as kernels read it, possibly as partial sums."""

    numbers: torch.Tensor  # float32 partial sums (parts, rows, out), or the output (rows, out)
    scale: torch.Tensor  # float32 (out,), unused if the output is finished or not quantized
    bias: torch.Tensor  # (out,), unused if the output is finished or has no bias


class Epilogue(NamedTuple):
    """Operands of the epilogue of a product; a missing operand is an unused tensor."""

    scale: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor


@dataclasses.dataclass(frozen=True)
class EpilogueSteps:
    """The steps of an epilogue, compile-time parameters of kernels."""

    quantized: bool
    has_bias: bool
    gelu: bool
    has_residual: bool


@triton.jit
def to_half(value, dtype: tl.constexpr, packed: tl.constexpr) -> tl.tensor:
    """Convert int8 to `dtype` exactly; `packed` converts four at once, as GPUs have no fast cast.

    For u below 1024 the float16 with the bits 0x6400 | u is 1024 + u. A byte permute and a
    subtraction therefore convert two numbers.
    """
    if packed and value.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 u, a, b, c;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 a, u, 0x64646464, 0x4140;
            prmt.b32 b, u, 0x64646464, 0x4342;
            mov.b32 c, 0x64806480;
            sub.f16x2 $0, a, c;
            sub.f16x2 $1, b, c;
            }
            """,
            "=r,=r,r",
            [value],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return value.to(dtype)


@triton.jit
def exact_gelu(x) -> tl.tensor:
    """Compute exact (erf) GELU: relu(x) - |x| * Phi(-|x|).

    A polynomial gives log2 Phi for |x| up to 5.5; the relative error of Phi is 3e-5. Beyond 5.5
    FP16 cannot distinguish the second term from 0.
    """
    a = tl.minimum(tl.abs(x), 5.5)
    p = 2.63047306e-05 * a - 0.000663731116
    p = p * a + 0.00750743576
    p = p * a - 0.0520332727
    p = p * a - 0.460232544
    p = p * a - 1.15064213
    p = p * a - 1.00002956
    return tl.maximum(x, 0.0) - a * tl.math.exp2(p)


@triton.jit
def finish(
    acc, scale, bias, quantized: tl.constexpr, has_bias: tl.constexpr, gelu: tl.constexpr
) -> tl.tensor:
    """Apply scale, bias and GELU to a sum, with the same operations in every kernel."""
    if quantized and has_bias:
        acc = tl.math.fma(acc, scale, bias)
    elif quantized:
        acc *= scale
    elif has_bias:
        acc += bias
    if gelu:
        acc = exact_gelu(acc)
    return acc


@triton.jit
def _eighth(x) -> tl.tensor:
    """Add each eight adjacent numbers in pairs, an order that no layout changes."""
    for _ in tl.static_range(3):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
    return x


@triton.jit(do_not_specialize=("rows",))
def norm_kernel(
    x,
    delta: Sums,
    total,
    weight,
    bias,
    out,
    rows: int,
    eps: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Normalise one row in float32; with `parts`, first store x + delta in `total`.

    Sums over the row add groups of eight adjacent numbers in float64. Their result is the same in
    any order that a compiled variant or another kernel uses.
    """
    at = tl.arange(0, block)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    shift = tl.load(bias + at, mask=inside, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if parts > 0:
        acc = tl.load(delta.numbers + row + at, mask=inside, other=0.0)
        for part in tl.static_range(1, parts):
            begin = delta.numbers + part * rows * width
            acc += tl.load(begin + row + at, mask=inside, other=0.0)
        factor = tl.load(delta.scale + at, mask=inside, other=0.0) if quantized else 1.0
        plus = tl.load(delta.bias + at, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
        acc = finish(acc, factor, plus, quantized, has_bias, False)
        value = (value.to(tl.float32) + acc).to(total.dtype.element_ty)
        tl.store(total + row + at, value, mask=inside)
    value = value.to(tl.float32)
    mean = tl.sum(_eighth(value).to(tl.float64), 0) * (1.0 / width)
    squares = tl.sum(_eighth(value * value).to(tl.float64), 0) * (1.0 / width)
    rstd = 1.0 / tl.sqrt(tl.math.fma(-mean, mean, squares).to(tl.float32) + eps)
    normed = tl.math.fma((value - mean.to(tl.float32)) * rstd, gain, shift)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def finish_kernel(
    sums: Sums,
    out,
    rows: int,
    n_out: int,
    parts: tl.constexpr,
    quantized: tl.constexpr,
    has_bias: tl.constexpr,
    gelu: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Add the partial sums of `block` outputs of one row, and finish them."""
    n = tl.program_id(1) * block + tl.arange(0, block)
    inside = n < n_out
    factor = tl.load(sums.scale + n, mask=inside, other=0.0) if quantized else 1.0
    plus = tl.load(sums.bias + n, mask=inside, other=0.0).to(tl.float32) if has_bias else 0.0
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * n_out + n
    acc = tl.load(sums.numbers + at, mask=inside, other=0.0)
    for part in tl.static_range(1, parts):
        acc += tl.load(sums.numbers + part * rows * n_out + at, mask=inside, other=0.0)
    acc = finish(acc, factor, plus, quantized, has_bias, gelu)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _halves(pairs) -> tl.tensor:
    """Convert int16 (n, k) of two int8 each to float16 (n, 2 * k), faster here than `to_half`."""
    low, high = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, a, b, c;
        xor.b32 u, $2, 0x80808080;
        prmt.b32 a, u, 0x64646464, 0x4240;
        prmt.b32 b, u, 0x64646464, 0x4341;
        mov.b32 c, 0x64806480;
        sub.f16x2 $0, a, c;
        sub.f16x2 $1, b, c;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return tl.reshape(tl.join(low, high), (pairs.shape[0], pairs.shape[1] * 2))


@triton.jit(do_not_specialize=("rows",))
def few_rows_kernel(
    x,
    weight,
    out,
    rows: int,
    n_out: int,
    depth: tl.constexpr,
    part: tl.constexpr,
    turn: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Compute one part of `block_n` outputs for all rows: out is (parts, rows, n_out).

    A program requests all its weights before it waits for its input. `packed` weights are int16
    that hold two int8 each.
    """
    each: tl.constexpr = 2 if packed else 1
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    column = tl.where(n < n_out, n, 0)
    begin = tl.program_id(1) * part
    k = begin // each + tl.arange(0, turn // each)
    w_at = weight + column[:, None].to(tl.int64) * (depth // each) + k[None, :]
    weights = ()
    for step in tl.static_range(part // turn):
        weights = weights + (tl.load(w_at + step * turn // each),)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.arange(0, block_m)
    x_at = x + m[None, :] * depth + begin + tl.arange(0, turn)[:, None]
    there = (m < rows)[None, :]
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for step in tl.static_range(part // turn):
        value = tl.load(x_at + step * turn, mask=there, other=0.0)
        half = _halves(weights[step]) if packed else weights[step].to(value.dtype)
        acc = tl.dot(half, value, acc, input_precision="ieee")
    at = (tl.program_id(1) * rows + m[None, :]) * n_out + n[:, None]
    tl.store(out + at, acc, mask=(n < n_out)[:, None] & there)


@triton.jit
def _store_tile(
    total, ending: Epilogue, out, rows: int, n_out: int, m, n, steps: tl.constexpr
) -> None:
    """Finish the sums (n, m) of outputs n for rows m, and store them in `out` (rows, n_out)."""
    column = tl.where(n < n_out, n, 0)
    factor = tl.load(ending.scale + column)[:, None] if steps.quantized else 1.0
    plus = tl.load(ending.bias + column).to(tl.float32)[:, None] if steps.has_bias else 0.0
    total = finish(total, factor, plus, steps.quantized, steps.has_bias, steps.gelu)
    at = m[None, :].to(tl.int64) * n_out + n[:, None]
    inside = (n < n_out)[:, None] & (m < rows)[None, :]
    if steps.has_residual:
        total += tl.load(ending.residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def many_rows_kernel(
    x,
    weight,
    ending: Epilogue,
    out,
    rows: int,
    n_out: int,
    depth: tl.constexpr,
    part: tl.constexpr,
    steps: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    turn: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Compute and finish `block_n` outputs of `block_m` rows, one part after the other.

    out.T = weight @ x.T: outputs, not rows, are on the wide side of the matrix instruction.
    """
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    row = tl.where(m < rows, m, 0)  # beyond the edge, read row 0 and store nothing
    column = tl.where(n < n_out, n, 0)
    k = tl.arange(0, turn)
    w_at = weight + column[:, None].to(tl.int64) * depth + k[None, :]
    x_at = x + row[None, :] * depth + k[:, None]
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([block_n, block_m], dtype=tl.float32)
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for begin in range(0, depth, turn):
        values = tl.load(x_at)
        w = to_half(tl.load(w_at), values.dtype, packed)
        acc = tl.dot(w, values, acc, input_precision="ieee")
        ends = (begin + turn) % part == 0
        total += tl.where(ends, acc, 0.0)
        acc = tl.where(ends, 0.0, acc)
        w_at += turn
        x_at += turn
    _store_tile(total, ending, out, rows, n_out, m, n, steps)


@triton.jit(do_not_specialize=("rows",))
def wide_rows_kernel(
    x,
    weight,
    ending: Epilogue,
    out,
    rows: int,
    n_out: int,
    depth: tl.constexpr,
    part: tl.constexpr,
    steps: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    turn: tl.constexpr,
) -> None:
    """Compute `many_rows_kernel` for float16 weights with bulk copies of x and weight descriptors.

    This kernel adds the partial sum to the total once per part. `many_rows_kernel` does it with a
    select in every iteration, which can cost a third of the time of a compute-bound product.
    """
    m0 = tl.program_id(0) * block_m
    n0 = tl.program_id(1) * block_n
    total = tl.zeros([block_n, block_m], dtype=tl.float32)
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for begin in range(0, depth, turn):
        acc = tl.dot(weight.load([n0, begin]), x.load([m0, begin]).T, acc)
        if (begin + turn) % part == 0:
            total += acc
            acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    m, n = m0 + tl.arange(0, block_m), n0 + tl.arange(0, block_n)
    _store_tile(total, ending, out, rows, n_out, m, n, steps)
