"""The decoder's operations as Triton-language kernels; `torch_ops` says what each must compute.

Every result is a function of its own row alone, bit for bit: how a sum is cut into tiles and splits
depends on the matrix or on the context's length, never on how many rows there are. Partial sums of
a split are added in a fixed order by whichever program arrives last, which a counter decides; the
counters are zero again when a kernel ends, so launches can be captured in a CUDA graph.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl

from serve.engine import HEAD_DIM
from serve.kernels.torch_ops import LAYER_NORM_EPS, Matrix, Norm

_FEW_TILES = 64  # a matrix with no more tiles has its sums split; an H200 has 132 multiprocessors
_MOST_PROGRAMS = 200  # of a split matrix, per tile of rows
_LEAST_DEPTH = 256  # of one split
_VOCABULARY = 8192  # from so many outputs on, tiles are larger
_CROSS_SPLIT = 256  # keys per program of cross-attention
_CROSS_BLOCK = 128  # of them per turn
_SELF_BLOCK = 128  # keys per turn of self-attention


@triton.jit
def _norm_kernel(
    x: tl.tensor, delta: tl.tensor, total: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    out: tl.tensor, eps: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    add: tl.constexpr,
) -> None:  # fmt: skip
    """One row: (x + delta, kept in `total`, if `add`), then layer norm in float32."""
    at = tl.arange(0, block)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if add:
        value = value.to(tl.float32) + tl.load(delta + row + at, mask=inside, other=0.0)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row + at, value, mask=inside)
    value = value.to(tl.float32)
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    offset = tl.load(bias + at, mask=inside, other=0.0)
    tl.store(out + row + at, (centred * rstd * gain + offset).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def _linear_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    out: tl.tensor, partial: tl.tensor, arrived: tl.tensor, rows: int, n_out: int,
    depth: tl.constexpr, quantized: tl.constexpr, has_bias: tl.constexpr, gelu: tl.constexpr,
    has_residual: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, splits: tl.constexpr,
) -> None:  # fmt: skip
    """out.T = weight @ x.T: the wide side of the matrix unit takes the outputs, not the rows."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    split = tl.program_id(2)
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    row = tl.where(m < rows, m, 0)  # beyond the edge, work on row 0 and store nothing
    column = tl.where(n < n_out, n, 0)
    k = split * (depth // splits) + tl.arange(0, block_k)
    w_at = weight + column[:, None].to(tl.int64) * depth + k[None, :]
    x_at = x + row[None, :] * depth + k[:, None]
    acc = tl.zeros([block_n, block_m], dtype=tl.float32)
    for _ in range(0, depth // splits, block_k):
        w = tl.load(w_at)
        values = tl.load(x_at)
        acc = tl.dot(w.to(values.dtype), values, acc, input_precision="ieee")
        w_at += block_k
        x_at += block_k
    last = True
    if splits > 1:
        local = tl.arange(0, block_n)[:, None] * block_m + tl.arange(0, block_m)[None, :]
        here = partial + tile * splits * block_n * block_m + local
        tl.store(here + split * block_n * block_m, acc)
        tl.debug_barrier()  # every thread's part is stored before the count says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if last:
        if splits > 1:
            acc = tl.zeros([block_n, block_m], dtype=tl.float32)
            for part in tl.static_range(splits):
                acc += tl.load(here + part * block_n * block_m, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
        if quantized:
            acc *= tl.load(scale + column)[:, None]
        if has_bias:
            acc += tl.load(bias + column).to(tl.float32)[:, None]
        if gelu:
            acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
        at = m[None, :].to(tl.int64) * n_out + n[:, None]
        inside = (n < n_out)[:, None] & (m < rows)[None, :]
        if has_residual:
            acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _self_attention_kernel(
    qkv: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, positions: tl.tensor, out: tl.tensor,
    heads: int, n_ctx: int, head_dim: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One slot and head: append this step's key and value, attend to all so far."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    d = tl.arange(0, head_dim)
    width = heads * head_dim
    new = qkv + slot * 3 * width + head * head_dim + d
    query = tl.load(new).to(tl.float32)
    new_k = tl.load(new + width)
    new_v = tl.load(new + 2 * width)
    position = tl.load(positions + slot).to(tl.int32)
    cache = (slot * heads + head).to(tl.int64) * n_ctx * head_dim
    tl.store(k_cache + cache + position * head_dim + d, new_k)
    tl.store(v_cache + cache + position * head_dim + d, new_v)
    peak = tl.sum(query * new_k.to(tl.float32), 0)
    total = peak * 0.0 + 1.0
    acc = new_v.to(tl.float32)
    for start in range(0, position, block):
        t = start + tl.arange(0, block)
        older = t < position
        at = cache + t[:, None] * head_dim + d[None, :]
        keys = tl.load(k_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_cache + at, mask=older[:, None], other=0.0).to(tl.float32)
        score = tl.where(older, tl.sum(keys * query[None, :], 1), float("-inf"))
        top = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp(score - top)
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * values, 0)
        peak = top
    tl.store(out + slot * width + head * head_dim + d, (acc / total).to(out.dtype.element_ty))


@triton.jit
def _cross_attention_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, out: tl.tensor, partial: tl.tensor,
    stats: tl.tensor, arrived: tl.tensor, n_keys: int, head_dim: tl.constexpr,
    keys_here: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
    splits_padded: tl.constexpr,
) -> None:  # fmt: skip
    """One (slot, head) and one split of the keys; whoever arrives last adds the splits up."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, head_dim)
    query = tl.load(q + row * head_dim + d).to(tl.float32)
    cache = row.to(tl.int64) * n_keys * head_dim
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([head_dim], dtype=tl.float32)
    for start in tl.static_range(0, keys_here, block):
        t = split * keys_here + start + tl.arange(0, block)
        there = t < n_keys
        at = cache + t[:, None] * head_dim + d[None, :]
        keys = tl.load(k_cache + at, mask=there[:, None], other=0.0)
        values = tl.load(v_cache + at, mask=there[:, None], other=0.0)
        score = tl.sum(keys.to(tl.float32) * query[None, :], 1)
        score = tl.where(there, score, -1e30)  # finite: a block may have no key at all
        top = tl.maximum(peak, tl.max(score, 0))
        p = tl.where(there, tl.exp(score - top), 0.0)
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * values.to(tl.float32), 0)
        peak = top
    here = row * splits + split
    tl.store(partial + here * head_dim + d, acc)
    tl.store(stats + here * 2, peak)
    tl.store(stats + here * 2 + 1, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == splits - 1:
        part = tl.arange(0, splits_padded)
        real = part < splits
        found = row * splits + part
        peaks = tl.load(stats + found * 2, mask=real, other=-1e30, cache_modifier=".cg")
        totals = tl.load(stats + found * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
        weights = tl.where(real, tl.exp(peaks - tl.max(peaks, 0)), 0.0)
        accs = tl.load(
            partial + found[:, None] * head_dim + d[None, :], mask=real[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        mixed = tl.sum(accs * weights[:, None], 0) / tl.sum(totals * weights, 0)
        tl.store(out + row * head_dim + d, mixed.to(out.dtype.element_ty))
        tl.store(arrived + row, 0)


@triton.jit
def _embed_kernel(
    ids: tl.tensor, positions: tl.tensor, tokens: tl.tensor, places: tl.tensor, out: tl.tensor,
    n_ctx: int, width: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    slot = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < width
    position = tl.load(positions + slot)
    token = tl.load(ids + slot * n_ctx + position)
    value = tl.load(tokens + token * width + at, mask=inside)
    place = tl.load(places + position * width + at, mask=inside)
    tl.store(out + slot * width + at, value + place, mask=inside)


class TritonOps:
    """The kernels, with the workspace that they share; launches must be on one stream.

    Args:
        device: a CUDA device, or a CPU under Triton's interpreter.
        rows: the most rows (slots) of any call.
        heads: decoder heads.
        n_keys: the encoder's positions.
    """

    def __init__(self, device: torch.device, rows: int, heads: int, n_keys: int) -> None:
        self._rows = rows
        self._splits = triton.cdiv(n_keys, _CROSS_SPLIT)
        tiles = triton.cdiv(rows, 128) * 128 * 64  # numbers in a program's column of tiles
        cross = rows * heads * self._splits
        self._partial = torch.empty(
            max(_MOST_PROGRAMS * tiles, cross * HEAD_DIM), dtype=torch.float32, device=device
        )
        self._stats = torch.empty(cross * 2, dtype=torch.float32, device=device)
        counters = max(_MOST_PROGRAMS * triton.cdiv(rows, 16), rows * heads)
        self._arrived = torch.zeros(counters, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        return self._partial.nbytes + self._stats.nbytes + self._arrived.nbytes

    def norm(self, x: torch.Tensor, params: Norm) -> torch.Tensor:
        """See `torch_ops.norm`."""
        return self._norm(x, x, x, params, add=False)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, params: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `torch_ops.add_norm`."""
        total = torch.empty_like(x)
        return total, self._norm(x, delta, total, params, add=True)

    def _norm(
        self, x: torch.Tensor, delta: torch.Tensor, total: torch.Tensor, params: Norm, add: bool
    ) -> torch.Tensor:
        assert x.is_contiguous() and delta.is_contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        _norm_kernel[(x.numel() // width,)](
            x, delta, total, params.weight, params.bias, out, LAYER_NORM_EPS, width,
            triton.next_power_of_2(width), add, num_warps=4,
        )  # fmt: skip
        return out

    def norm_linear(self, x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
        """See `torch_ops.norm_linear`; x is (rows, in)."""
        return self._linear(self.norm(x, params), matrix)

    def norm_linear_gelu(self, x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
        """See `torch_ops.norm_linear_gelu`; x is (rows, in)."""
        return self._linear(self.norm(x, params), matrix, gelu=True)

    def linear_residual(
        self, x: torch.Tensor, matrix: Matrix, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `torch_ops.linear_residual`; x is (rows, in)."""
        return self._linear(x, matrix, residual=residual)

    def logits(self, x: torch.Tensor, params: Norm, matrix: Matrix) -> torch.Tensor:
        """See `torch_ops.logits`; x is (rows, in)."""
        return self._linear(self.norm(x, params), matrix, dtype=torch.float32)

    def _linear(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        residual: torch.Tensor | None = None,
        gelu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        rows, depth = x.shape
        n_out = matrix.weight.shape[0]
        assert rows <= self._rows and x.is_contiguous()
        out = torch.empty((rows, n_out), dtype=dtype or x.dtype, device=x.device)
        block_n, block_k, splits, warps = tiling(n_out, depth)
        block_m = min(128 if splits == 1 else 64, max(16, triton.next_power_of_2(rows)))
        grid = (triton.cdiv(rows, block_m), triton.cdiv(n_out, block_n), splits)
        _linear_kernel[grid](
            x, matrix.weight, matrix.weight if matrix.scale is None else matrix.scale,
            x if matrix.bias is None else matrix.bias, x if residual is None else residual, out,
            self._partial, self._arrived, rows, n_out, depth, matrix.scale is not None,
            matrix.bias is not None, gelu, residual is not None, block_m, block_n, block_k,
            splits, num_warps=warps, num_stages=3 if block_m > 64 or n_out >= _VOCABULARY else 4,
        )  # fmt: skip
        return out

    def self_attention(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """See `torch_ops.self_attention`; reads what each slot needs, so `longest` is not used."""
        del longest
        slots, heads, n_ctx, head_dim = k_cache.shape
        assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
        out = torch.empty((slots, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
        _self_attention_kernel[(heads, slots)](
            qkv, k_cache, v_cache, positions, out, heads, n_ctx, head_dim, _SELF_BLOCK,
            num_warps=4,
        )  # fmt: skip
        return out

    def cross_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `torch_ops.cross_attention`."""
        slots, heads, n_keys, head_dim = k.shape
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert slots <= self._rows and triton.cdiv(n_keys, _CROSS_SPLIT) == self._splits
        out = torch.empty_like(q)
        _cross_attention_kernel[(self._splits, slots * heads)](
            q, k, v, out, self._partial, self._stats, self._arrived, n_keys, head_dim,
            _CROSS_SPLIT, _CROSS_BLOCK, self._splits, triton.next_power_of_2(self._splits),
            num_warps=4,
        )  # fmt: skip
        return out

    def embed(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """See `torch_ops.embed`."""
        assert ids.is_contiguous()
        width = tokens.shape[1]
        out = torch.empty((len(positions), width), dtype=tokens.dtype, device=tokens.device)
        _embed_kernel[(len(positions),)](
            ids, positions, tokens, places, out, ids.shape[1], width, triton.next_power_of_2(width),
        )  # fmt: skip
        return out


def tiling(n_out: int, depth: int) -> tuple[int, int, int, int]:
    """(outputs per program, depth per turn, splits of the depth, warps) for a matrix.

    It must not depend on the number of rows, or results would.
    """
    block_k = 128 if depth % 128 == 0 else 64
    if n_out >= _VOCABULARY:
        return 128, block_k, 1, 8
    tiles = triton.cdiv(n_out, 64)
    splits = [
        s
        for s in range(1, 17)
        if depth % (s * block_k) == 0
        and (s == 1 or (depth // s >= _LEAST_DEPTH and tiles * s <= _MOST_PROGRAMS))
        and (s == 1 or tiles <= _FEW_TILES)
    ]
    return 64, block_k, splits[-1], 4
