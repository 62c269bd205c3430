"""Run the encoder on NVIDIA GPUs from Hopper on, with library products and Triton kernels.

A library product adds to the residual stream in place. GELU is the epilogue of a Triton product
that fetches its tiles with bulk copies. Convolutions use this product too, over overlapping rows.

With FP8 (e4m3), weights have a scale per output and inputs a scale per row. The kernel that writes
a row computes its scale. GELU's outputs are the exception: their scale follows from the weights.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import dataclasses
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from serve.native.kernels import reference_ops
from serve.native.kernels.flash import flash_attention
from serve.native.kernels.launch import launch
from serve.native.kernels.linear import exact_gelu
from serve.native.kernels.reference_ops import FP8_MAX, Matrix, Norm, Scaled
from serve.native.kernels.stream import empty_scaled, scale_rows, scaled_stream_norm, stream_norm

_MIN_STEP = 1e-5  # minimum scale of GELU's outputs: 0.5 / step must fit into a float16


@dataclasses.dataclass(frozen=True)
class _GeluTile:
    """A tile of the product that ends in GELU; the fastest that was timed on an H200."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    programs: int  # resident programs per multiprocessor


_FP16 = _GeluTile(128, 256, 64, 8, 3, 1)
_FP8 = _GeluTile(128, 128, 128, 4, 3, 2)  # one program multiplies while the other stores its tile
_GROUP = 8  # adjacent tiles of rows that share weights in the L2 cache


@triton.jit
def _rough_gelu(x, half) -> tl.tensor:
    """Compute 2 * half * GELU(x) in float16, by the tanh form, two numbers per instruction.

    The tanh form differs from the exact one by at most 5e-4; FP8 keeps four bits.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 least, cubic, linear, x, half, u;
        mov.b32 least, 0xC900C900;  // -10: from there on GELU is 0
        mov.b32 cubic, 0x28912891;  // 0.044715 * sqrt(2 / pi)
        mov.b32 linear, 0x3A623A62;  // sqrt(2 / pi)
        max.f16x2 x, $1, least;
        mul.rn.f16x2 half, x, $2;
        mul.rn.f16x2 u, x, x;
        fma.rn.f16x2 u, u, cubic, linear;
        mul.rn.f16x2 u, u, x;
        tanh.approx.f16x2 u, u;
        fma.rn.f16x2 $0, half, u, half;
        }
        """,
        "=r,r,r",
        [x, half],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _gelu_tile(
    acc,
    m,
    n,
    n_out: int,
    x_scale,
    w_scale,
    bias,
    step,
    period: int,
    gap: tl.constexpr,
    fp8: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    column_bias = tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    if fp8:
        column_scale = tl.load(w_scale + n, mask=n < n_out, other=0.0)
        y = tl.math.fma(acc * tl.load(x_scale + m)[:, None], column_scale[None, :], column_bias)
        half = tl.zeros_like(y) + 0.5 / tl.load(step)
        return _rough_gelu(y.to(tl.float16), half.to(tl.float16)).to(dtype)
    y = exact_gelu(acc + column_bias)
    if gap > 0:
        y = tl.where((m % period < period - gap)[:, None], y, 0.0)
    return y.to(dtype)


@triton.jit(do_not_specialize=("rows", "period", "shift"))
def linear_gelu_kernel(
    x,
    weight,
    out,
    x_scale,
    w_scale,
    bias,
    step,
    scale,
    rows: int,
    period: int,
    shift: int,
    gap: tl.constexpr,
    n_out: tl.constexpr,
    depth: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
    fp8: tl.constexpr,
) -> None:
    """Store GELU(x[m] @ weight.T + bias) in out[m + shift].

    The last `gap` of every `period` rows are set to 0. Programs are persistent, and groups of row
    tiles share weights in the L2 cache. FP8 outputs are divided by `step`, which is stored in
    `scale` for every row.
    """
    tiles_m = tl.cdiv(rows, block_m)
    tiles_n: tl.constexpr = (n_out + block_n - 1) // block_n
    tiles_per_group = group * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        group_begin = tile // tiles_per_group * group
        group_tiles = tl.minimum(tiles_m - group_begin, group)
        m0 = (group_begin + tile % tiles_per_group % group_tiles) * block_m
        n0 = (tile % tiles_per_group // group_tiles) * block_n
        acc = tl.zeros([block_m, block_n], dtype=tl.float32)
        for k in range(tl.cdiv(depth, block_k)):
            acc = tl.dot(x.load([m0, k * block_k]), weight.load([n0, k * block_k]).T, acc)
        m = m0 + tl.arange(0, block_m)
        if fp8:
            if n0 == 0:
                tl.store(scale + m, tl.zeros([block_m], tl.float32) + tl.load(step), mask=m < rows)
            m = tl.where(m < rows, m, 0)
        n = n0 + tl.arange(0, block_n)
        y = _gelu_tile(acc, m, n, n_out, x_scale, w_scale, bias, step, period, gap, fp8, out.dtype)
        out.store([m0 + shift, n0], y)


@dataclasses.dataclass
class _Rows:
    """The rows of a matrix, which may overlap, for bulk copies."""

    base: torch.Tensor
    rows: int
    depth: int
    stride: int

    @staticmethod
    def of(x: torch.Tensor) -> "_Rows":
        """Return the rows of a tensor (..., depth)."""
        depth = x.shape[-1]
        return _Rows(x, x.numel() // depth, depth, depth)


class _EncoderKernels:
    """The operations that both precisions share: attention and convolutions.

    Args:
        device: a CUDA device, or a CPU under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._processors, self._is_hopper = 3, False
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._is_hopper = torch.cuda.get_device_capability(device) == (9, 0)

    def encoder_attention(self, qkv: torch.Tensor, n_head: int) -> torch.Tensor:
        if not self._is_hopper:
            return reference_ops.encoder_attention(qkv, n_head)
        return flash_attention(qkv, n_head, self._processors)

    def stem(
        self, features: torch.Tensor, conv1: Matrix, conv2: Matrix, positions: torch.Tensor
    ) -> torch.Tensor:
        """Compute `reference_ops.stem`; each convolution is one product over overlapping rows.

        Windows are concatenated, with a row of zeros before and after each. Output rows that span
        two windows are set to zero or not read.
        """
        batch, n_mels, time = features.shape
        d, device = len(conv1.weight), conv1.weight.device
        padded = time + 2
        x = torch.zeros((batch, padded, n_mels), dtype=conv1.weight.dtype, device=device)
        x[:, 1:-1] = features.transpose(1, 2)
        y = torch.empty((batch, padded, d), dtype=x.dtype, device=device)
        y[0, 0] = 0
        rows = _Rows(x, batch * padded - 2, 3 * n_mels, n_mels)
        self._linear_gelu(rows, conv1, y.view(-1, d), padded, 2, shift=1)
        z = torch.empty((batch, padded // 2, d), dtype=x.dtype, device=device)
        rows = _Rows(y, batch * padded // 2 - 1, 3 * d, 2 * d)
        self._linear_gelu(rows, conv2, z.view(-1, d))
        return z[:, : time // 2] + positions

    def _linear_gelu(
        self,
        x: _Rows,
        matrix: Matrix,
        out: torch.Tensor,
        period: int = 1,
        gap: int = 0,
        shift: int = 0,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Launch `linear_gelu_kernel`.

        Args:
            x, matrix: the operands of the product.
            out: (rows, n_out).
            period, gap, shift: see the kernel.
            scales: for FP8, the scales of x's rows, and those of `out`, which are written.
        """
        weight, fp8 = matrix.weight, scales is not None
        n_out, tile = len(weight), _FP8 if fp8 else _FP16
        block = (size_m, size_n, size_k) = (tile.block_m, tile.block_n, tile.block_k)
        tiles = triton.cdiv(x.rows, size_m) * triton.cdiv(n_out, size_n)
        x_scale, scale = scales or (out, out)
        w_scale, step = (matrix.scale, matrix.step) if fp8 else (out, out)
        launch(linear_gelu_kernel, min(tiles, tile.programs * self._processors))(
            TensorDescriptor(x.base, [x.rows, x.depth], [x.stride, 1], [size_m, size_k]),
            TensorDescriptor(weight, list(weight.shape), [x.depth, 1], [size_n, size_k]),
            TensorDescriptor(out, list(out.shape), [n_out, 1], [size_m, size_n]),
            *(x_scale, w_scale, matrix.bias, step, scale),
            *(x.rows, period, shift, gap, n_out, x.depth),
            *block,
            group=_GROUP,
            fp8=fp8,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


class TritonEncoder(_EncoderKernels):
    """The encoder's operations in FP16; `reference_ops` documents them."""

    prepare = staticmethod(reference_ops.prepare)
    linear = staticmethod(reference_ops.linear)

    def norm(self, x: torch.Tensor, params: Norm) -> torch.Tensor:
        return stream_norm(x, None, None, params)

    def linear_gelu(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        n_out = len(matrix.weight)
        out = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype, device=x.device)
        self._linear_gelu(_Rows.of(x), matrix, out.view(-1, n_out))
        return out

    def add_linear_norm(
        self, x: torch.Tensor, y: torch.Tensor, matrix: Matrix, shift: torch.Tensor, params: Norm
    ) -> torch.Tensor:
        x.view(-1, x.shape[-1]).addmm_(y.reshape(-1, y.shape[-1]), matrix.weight.t())
        return stream_norm(x, None, shift, params)

    add_linear_last_norm = add_linear_norm


class Fp8Encoder(_EncoderKernels):
    """The encoder's operations with FP8 products of `Scaled` rows; convolutions are FP16."""

    def prepare(self, matrix: Matrix, norm: Norm | None = None) -> Matrix:
        """Quantize weights to FP8 with a scale per output; with `norm`, add a step for GELU."""
        weight = matrix.weight.float()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / FP8_MAX
        stored = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        step = None if norm is None else (reach(matrix, norm) / FP8_MAX).clamp_min(_MIN_STEP)
        return Matrix(stored, matrix.bias, scale, step=step)

    def norm(self, x: torch.Tensor, params: Norm) -> Scaled:
        return scaled_stream_norm(x, None, None, params)

    def linear(self, x: Scaled, matrix: Matrix) -> torch.Tensor:
        assert matrix.scale is not None
        out = torch._scaled_mm(
            x.values.view(-1, x.values.shape[-1]),
            matrix.weight.t(),
            scale_a=x.scale[:, None],
            scale_b=matrix.scale[None, :],
            bias=matrix.bias,
            out_dtype=torch.float16,
            use_fast_accum=True,
        )
        return out.view(*x.values.shape[:-1], -1)

    def linear_gelu(self, x: Scaled, matrix: Matrix) -> Scaled:
        """Compute `reference_ops.linear_gelu`; all rows get the same scale, an upper bound.

        A scale that is too large costs FP8 no precision: its exponents cover 15 powers of two.
        """
        n_out = len(matrix.weight)
        out = empty_scaled(torch.Size((*x.values.shape[:-1], n_out)), x.scale.device)
        rows, scales = _Rows.of(x.values), (x.scale, out.scale)
        self._linear_gelu(rows, matrix, out.values.view(-1, n_out), scales=scales)
        return out

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | Scaled,
        matrix: Matrix,
        shift: torch.Tensor,
        params: Norm,
    ) -> Scaled:
        return scaled_stream_norm(x, self._scaled_linear(y, matrix), shift, params)

    def add_linear_last_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | Scaled,
        matrix: Matrix,
        shift: torch.Tensor,
        params: Norm,
    ) -> torch.Tensor:
        return stream_norm(x, self._scaled_linear(y, matrix), shift, params)

    def _scaled_linear(self, x: torch.Tensor | Scaled, matrix: Matrix) -> torch.Tensor:
        return self.linear(scale_rows(x) if isinstance(x, torch.Tensor) else x, matrix)


def reach(matrix: Matrix, norm: Norm) -> torch.Tensor:
    """Return an upper bound of the outputs of a linear layer after a layer norm: float32 ().

    A normalised row of width d has at most length sqrt(d), and mean 0. By Cauchy-Schwarz it adds
    at most sqrt(d) times the length of the output's centred weights to the bias. FP8 rounds each
    factor by at most a sixteenth.
    """
    weight = matrix.weight.float()
    centred = weight * norm.weight
    centred = centred - centred.mean(dim=1, keepdim=True)
    offset = weight @ norm.bias
    if matrix.bias is not None:
        offset = offset + matrix.bias.float()
    bounds: torch.Tensor = centred.norm(dim=1) * math.sqrt(weight.shape[1]) + offset.abs()
    return bounds.max() * (1 + 1 / 16) ** 2
