"""Compute layer norms and linear layers with Triton-language kernels.

The depth of a matrix (its number of inputs) is cut into parts; their size depends on the matrix
alone. Tensor cores sum each part, and the parts are added in order. With many rows one program
computes and adds all parts of its outputs. With few rows each part has its own programs (split-K),
and the next kernel adds the parts. A row's result therefore has the same bits for any number of
rows. Kernels are not specialised for the number of rows, because prompts have any length.

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
    """A linear layer's output as kernels read it, possibly as partial sums.

    No field may be called `values` or `type`, as Triton's tuples have these attributes themselves.
    """

    data: torch.Tensor  # float32 partial sums (parts, rows, out), or the output (rows, out)
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
def apply_epilogue(
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
def _sum_eights(x) -> tl.tensor:
    """Sum every eight adjacent numbers pairwise; no layout changes this order."""
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

    The sums of eight adjacent numbers are added in float64. This result does not depend on the
    order of additions, so every compiled variant, and `skinny_gemm`, gets the same bits.
    """
    column = tl.arange(0, block)
    mask = column < width
    gain = tl.load(weight + column, mask=mask, other=0.0)
    shift = tl.load(bias + column, mask=mask, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + column, mask=mask, other=0.0)
    if parts > 0:
        acc = tl.load(delta.data + row + column, mask=mask, other=0.0)
        for part in tl.static_range(1, parts):
            part_sums = delta.data + part * rows * width
            acc += tl.load(part_sums + row + column, mask=mask, other=0.0)
        delta_scale = tl.load(delta.scale + column, mask=mask, other=0.0) if quantized else 1.0
        delta_bias = (
            tl.load(delta.bias + column, mask=mask, other=0.0).to(tl.float32) if has_bias else 0.0
        )
        acc = apply_epilogue(acc, delta_scale, delta_bias, quantized, has_bias, False)
        value = (value.to(tl.float32) + acc).to(total.dtype.element_ty)
        tl.store(total + row + column, value, mask=mask)
    value = value.to(tl.float32)
    mean = tl.sum(_sum_eights(value).to(tl.float64), 0) * (1.0 / width)
    squares = tl.sum(_sum_eights(value * value).to(tl.float64), 0) * (1.0 / width)
    rstd = 1.0 / tl.sqrt(tl.math.fma(-mean, mean, squares).to(tl.float32) + eps)
    normed = tl.math.fma((value - mean.to(tl.float32)) * rstd, gain, shift)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=mask)


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
    """Add the partial sums of `block` outputs of one row, and apply the epilogue."""
    n = tl.program_id(1) * block + tl.arange(0, block)
    mask = n < n_out
    scale = tl.load(sums.scale + n, mask=mask, other=0.0) if quantized else 1.0
    bias = tl.load(sums.bias + n, mask=mask, other=0.0).to(tl.float32) if has_bias else 0.0
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * n_out + n
    acc = tl.load(sums.data + offsets, mask=mask, other=0.0)
    for part in tl.static_range(1, parts):
        acc += tl.load(sums.data + part * rows * n_out + offsets, mask=mask, other=0.0)
    acc = apply_epilogue(acc, scale, bias, quantized, has_bias, gelu)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_int8(pairs) -> tl.tensor:
    """Convert int16 (n, k), two int8 each, to float16 (n, 2 * k); faster here than `to_half`."""
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
    block_k: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Compute one part of `block_n` outputs for all rows: out is (parts, rows, n_out).

    A program requests all its weights before it waits for its input. `packed` weights are int16
    that hold two int8 each.
    """
    numbers_per_word: tl.constexpr = 2 if packed else 1
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    clamped_n = tl.where(n < n_out, n, 0)
    part_begin = tl.program_id(1) * part
    k = part_begin // numbers_per_word + tl.arange(0, block_k // numbers_per_word)
    w_pointers = weight + clamped_n[:, None].to(tl.int64) * (depth // numbers_per_word) + k[None, :]
    weights = ()
    for step in tl.static_range(part // block_k):
        weights = weights + (tl.load(w_pointers + step * block_k // numbers_per_word),)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.arange(0, block_m)
    x_pointers = x + m[None, :] * depth + part_begin + tl.arange(0, block_k)[:, None]
    row_mask = (m < rows)[None, :]
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for step in tl.static_range(part // block_k):
        value = tl.load(x_pointers + step * block_k, mask=row_mask, other=0.0)
        w = _unpack_int8(weights[step]) if packed else weights[step].to(value.dtype)
        acc = tl.dot(w, value, acc, input_precision="ieee")
    offsets = (tl.program_id(1) * rows + m[None, :]) * n_out + n[:, None]
    tl.store(out + offsets, acc, mask=(n < n_out)[:, None] & row_mask)


@triton.jit
def _store_tile(
    total, epilogue: Epilogue, out, rows: int, n_out: int, m, n, steps: tl.constexpr
) -> None:
    """Apply the epilogue to sums (n, m) of outputs n for rows m; store them in `out` (m, n)."""
    clamped_n = tl.where(n < n_out, n, 0)
    scale = tl.load(epilogue.scale + clamped_n)[:, None] if steps.quantized else 1.0
    bias = tl.load(epilogue.bias + clamped_n).to(tl.float32)[:, None] if steps.has_bias else 0.0
    total = apply_epilogue(total, scale, bias, steps.quantized, steps.has_bias, steps.gelu)
    offsets = m[None, :].to(tl.int64) * n_out + n[:, None]
    mask = (n < n_out)[:, None] & (m < rows)[None, :]
    if steps.has_residual:
        total += tl.load(epilogue.residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def many_rows_kernel(
    x,
    weight,
    epilogue: Epilogue,
    out,
    rows: int,
    n_out: int,
    depth: tl.constexpr,
    part: tl.constexpr,
    steps: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    packed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Compute `block_n` outputs of `block_m` rows with their epilogue, part after part.

    out.T = weight @ x.T: outputs, not rows, are on the wide side of the matrix instruction.
    """
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    clamped_m = tl.where(m < rows, m, 0)  # beyond the edge, read row 0 and store nothing
    clamped_n = tl.where(n < n_out, n, 0)
    k = tl.arange(0, block_k)
    w_pointers = weight + clamped_n[:, None].to(tl.int64) * depth + k[None, :]
    x_pointers = x + clamped_m[None, :] * depth + k[:, None]
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([block_n, block_m], dtype=tl.float32)
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for k0 in range(0, depth, block_k):
        values = tl.load(x_pointers)
        w = to_half(tl.load(w_pointers), values.dtype, packed)
        acc = tl.dot(w, values, acc, input_precision="ieee")
        ends_part = (k0 + block_k) % part == 0
        total += tl.where(ends_part, acc, 0.0)
        acc = tl.where(ends_part, 0.0, acc)
        w_pointers += block_k
        x_pointers += block_k
    _store_tile(total, epilogue, out, rows, n_out, m, n, steps)


@triton.jit(do_not_specialize=("rows",))
def wide_rows_kernel(
    x,
    weight,
    epilogue: Epilogue,
    out,
    rows: int,
    n_out: int,
    depth: tl.constexpr,
    part: tl.constexpr,
    steps: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute `many_rows_kernel` for float16 weights; x and weight are descriptors (bulk copies).

    This kernel adds the partial sum to the total once per part. `many_rows_kernel` does so in every
    iteration with a select, which can cost a third of the time of a compute-bound product.
    """
    m0 = tl.program_id(0) * block_m
    n0 = tl.program_id(1) * block_n
    total = tl.zeros([block_n, block_m], dtype=tl.float32)
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for k0 in range(0, depth, block_k):
        acc = tl.dot(weight.load([n0, k0]), x.load([m0, k0]).T, acc)
        if (k0 + block_k) % part == 0:
            total += acc
            acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    m, n = m0 + tl.arange(0, block_m), n0 + tl.arange(0, block_n)
    _store_tile(total, epilogue, out, rows, n_out, m, n, steps)
