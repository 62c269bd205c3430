"""The encoder's operations for NVIDIA GPUs from Hopper on: library products, and kernels between.

A residual connection is the product's own accumulation into the stream. GELU is the epilogue of a
product that fetches its tiles with the bulk copy engine; convolutions are that product too, over
overlapping rows. With FP8 (e4m3), every product's input has a scale per row, found by the kernel
that writes it, and every weight one per output.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import dataclasses

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from serve.native.kernels.definition import FP8_MAX, LAYER_NORM_EPS, Matrix, Norm, Scaled, linear
from serve.native.kernels.launch import launch
from serve.native.kernels.linear import exact_gelu

_BLOCK_M, _BLOCK_N, _BLOCK_K, _GROUP = 128, 256, 64, 8  # of the GELU product; best of 11 timed


@triton.jit
def _gelu_tile(
    acc: tl.tensor, m: tl.tensor, n: tl.tensor, n_out: int, bias: tl.tensor, period: int,
    gap: int, dtype: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    acc += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    return tl.where((m % period < period - gap)[:, None], exact_gelu(acc), 0.0).to(dtype)


@triton.jit(do_not_specialize=("rows", "period", "gap", "shift"))
def linear_gelu_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, bias: tl.tensor, rows: int, period: int,
    gap: int, shift: int, n_out: tl.constexpr, depth: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """out[m + shift] = GELU(x[m] @ weight.T + bias); the last `gap` of each `period` rows are 0.

    Persistent programs; tiles in groups of rows, whose weights stay in the L2 cache.
    """
    tiles_m = tl.cdiv(rows, block_m)
    tiles_n: tl.constexpr = (n_out + block_n - 1) // block_n
    per_group = group * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first = tile // per_group * group
        size = tl.minimum(tiles_m - first, group)
        m0 = (first + tile % per_group % size) * block_m
        n0 = (tile % per_group // size) * block_n
        acc = tl.zeros([block_m, block_n], dtype=tl.float32)
        for k in range(tl.cdiv(depth, block_k)):
            acc = tl.dot(x.load([m0, k * block_k]), weight.load([n0, k * block_k]).T, acc)
        m = m0 + tl.arange(0, block_m)
        half: tl.constexpr = block_n // 2  # stored in two halves, which takes half the memory
        left, right = tl.split(tl.permute(tl.reshape(acc, (block_m, 2, half)), (0, 2, 1)))
        n = n0 + tl.arange(0, half)
        y = _gelu_tile(left, m, n, n_out, bias, period, gap, out.dtype)
        out.store([m0 + shift, n0], y)
        y = _gelu_tile(right, m, n + half, n_out, bias, period, gap, out.dtype)
        out.store([m0 + shift, n0 + half], y)


@triton.jit
def _store_row(
    y: tl.tensor, out: tl.tensor, scale: tl.tensor, at: tl.tensor, inside: tl.tensor, width: int,
    fp8: tl.constexpr, most: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if fp8:
        step = tl.maximum(tl.max(tl.abs(y), 0), 1e-12) / most
        tl.store(scale + row, step)
        y = y / step
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def stream_norm_kernel(
    x: tl.tensor, delta: tl.tensor, shift: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    out: tl.tensor, scale: tl.tensor, eps: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, has_delta: tl.constexpr, has_shift: tl.constexpr, fp8: tl.constexpr,
    most: tl.constexpr,
) -> None:  # fmt: skip
    """One row of the stream: x += delta in place, then layer norm of x + shift, as `out.dtype`."""
    at = tl.arange(0, block)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if has_delta:
        value = value.to(tl.float32) + tl.load(delta + row + at, mask=inside, other=0.0)
        value = value.to(x.dtype.element_ty)
        tl.store(x + row + at, value, mask=inside)
    value = value.to(tl.float32)
    if has_shift:
        value += tl.load(shift + at, mask=inside, other=0.0)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    y = centred * rstd * tl.load(weight + at, mask=inside, other=0.0)
    y += tl.load(bias + at, mask=inside, other=0.0)
    _store_row(y, out, scale, at, inside, width, fp8, most)


@triton.jit
def scale_rows_kernel(
    x: tl.tensor, out: tl.tensor, scale: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    gelu: tl.constexpr, most: tl.constexpr,
) -> None:  # fmt: skip
    """One row, after GELU if `gelu`, as FP8 with a scale."""
    at = tl.arange(0, block)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    y = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if gelu:
        y = exact_gelu(y)
    _store_row(y, out, scale, at, inside, width, True, most)


@dataclasses.dataclass
class _Rows:
    """Rows of a matrix that may overlap, for the bulk copy engine."""

    base: torch.Tensor
    rows: int
    depth: int
    stride: int


class _Convolutions:
    """What both precisions share: convolutions in FP16 by the product that ends in GELU.

    Args:
        device: a CUDA device, or a CPU under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._programs = 3
        if device.type == "cuda":
            self._programs = torch.cuda.get_device_properties(device).multi_processor_count

    def stem(
        self, features: torch.Tensor, conv1: Matrix, conv2: Matrix, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `definition.stem`; each convolution is one product over overlapping rows.

        Windows lie one after the other, each with a row of zeros before and behind it; what is
        computed across their edges is set to zero again, or left out.
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
    ) -> None:
        """Launch `linear_gelu_kernel` into `out`, (rows, n_out)."""
        weight = matrix.weight
        n_out = weight.shape[0]
        tiles = triton.cdiv(x.rows, _BLOCK_M) * triton.cdiv(n_out, _BLOCK_N)
        launch(linear_gelu_kernel, min(tiles, self._programs))(
            TensorDescriptor(x.base, [x.rows, x.depth], [x.stride, 1], [_BLOCK_M, _BLOCK_K]),
            TensorDescriptor(weight, list(weight.shape), [x.depth, 1], [_BLOCK_N, _BLOCK_K]),
            TensorDescriptor(out, list(out.shape), [n_out, 1], [_BLOCK_M, _BLOCK_N // 2]),
            matrix.bias, x.rows, period, gap, shift, n_out, x.depth, _BLOCK_M, _BLOCK_N, _BLOCK_K,
            _GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip


class TritonEncoder(_Convolutions):
    """The encoder's operations in FP16; see the functions of the same names in `definition`."""

    def prepare(self, matrix: Matrix) -> Matrix:
        """See `definition.prepare`."""
        return matrix

    def norm(self, x: torch.Tensor, params: Norm) -> torch.Tensor:
        """See `definition.norm`."""
        return _stream_norm(x, None, None, params)

    def linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """See `definition.linear`."""
        return linear(x, matrix)

    def linear_gelu(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """See `definition.linear_gelu`."""
        depth, n_out = x.shape[-1], len(matrix.weight)
        rows = _Rows(x, x.numel() // depth, depth, depth)
        out = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype, device=x.device)
        self._linear_gelu(rows, matrix, out.view(-1, n_out))
        return out

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        matrix: Matrix,
        shift: torch.Tensor,
        params: Norm,
    ) -> torch.Tensor:
        """See `definition.add_linear_norm`."""
        x.view(-1, x.shape[-1]).addmm_(y.reshape(-1, y.shape[-1]), matrix.weight.t())
        return _stream_norm(x, None, shift, params)

    add_linear_last_norm = add_linear_norm


class Fp8Encoder(_Convolutions):
    """The same with FP8 products, but for the convolutions; what they read is `Scaled`."""

    def prepare(self, matrix: Matrix) -> Matrix:
        """FP8 weights with a scale per output."""
        weight = matrix.weight.float()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / FP8_MAX
        return Matrix((weight / scale[:, None]).to(torch.float8_e4m3fn), matrix.bias, scale)

    def norm(self, x: torch.Tensor, params: Norm) -> Scaled:
        """See `definition.norm`."""
        return _scaled_stream_norm(x, None, None, params)

    def linear(self, x: Scaled, matrix: Matrix) -> torch.Tensor:
        """See `definition.linear`."""
        assert matrix.scale is not None
        out = torch._scaled_mm(
            x.values.view(-1, x.values.shape[-1]), matrix.weight.t(), scale_a=x.scale[:, None],
            scale_b=matrix.scale[None, :], bias=matrix.bias, out_dtype=torch.float16,
            use_fast_accum=True,
        )  # fmt: skip
        return out.view(*x.values.shape[:-1], -1)

    def linear_gelu(self, x: Scaled, matrix: Matrix) -> Scaled:
        """See `definition.linear_gelu`."""
        return _scale_rows(self.linear(x, matrix), gelu=True)

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | Scaled,
        matrix: Matrix,
        shift: torch.Tensor,
        params: Norm,
    ) -> Scaled:
        """See `definition.add_linear_norm`."""
        return _scaled_stream_norm(x, self._scaled_linear(y, matrix), shift, params)

    def add_linear_last_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor | Scaled,
        matrix: Matrix,
        shift: torch.Tensor,
        params: Norm,
    ) -> torch.Tensor:
        """See `definition.add_linear_last_norm`."""
        return _stream_norm(x, self._scaled_linear(y, matrix), shift, params)

    def _scaled_linear(self, x: torch.Tensor | Scaled, matrix: Matrix) -> torch.Tensor:
        return self.linear(_scale_rows(x, False) if isinstance(x, torch.Tensor) else x, matrix)


def _stream_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    shift: torch.Tensor | None,
    params: Norm,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x += delta in place; layer norm of x + shift, in `out` with `scale` if given."""
    assert x.is_contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x) if out is None else out
    launch(stream_norm_kernel, x.numel() // width)(
        x, x if delta is None else delta, x if shift is None else shift, params.weight,
        params.bias, out, x if scale is None else scale, LAYER_NORM_EPS, width,
        triton.next_power_of_2(width), delta is not None, shift is not None,
        scale is not None, FP8_MAX, num_warps=2,
    )  # fmt: skip
    return out


def _scaled_stream_norm(
    x: torch.Tensor, delta: torch.Tensor | None, shift: torch.Tensor | None, params: Norm
) -> Scaled:
    out = _empty_scaled(x)
    _stream_norm(x, delta, shift, params, out.values, out.scale)
    return out


def _empty_scaled(x: torch.Tensor) -> Scaled:
    rows = x.numel() // x.shape[-1]
    return Scaled(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )


def _scale_rows(x: torch.Tensor, gelu: bool) -> Scaled:
    assert x.is_contiguous()
    width = x.shape[-1]
    out = _empty_scaled(x)
    launch(scale_rows_kernel, x.numel() // width)(
        x, out.values, out.scale, width, triton.next_power_of_2(width), gelu, FP8_MAX, num_warps=8,
    )  # fmt: skip
    return out
