"""The decoder's attention as Triton-language kernels; results depend on a slot's own numbers alone.

Cross-attention cuts the keys of a slot and head into a fixed number of splits, whatever the number
of slots; whoever arrives last adds them up in order (Flash-Decoding with one split count). `pdl` is
explained in `linear`.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.linear import finish, to_half


@triton.jit
def _finished(
    x: tl.tensor, at: tl.tensor, stride: int, scale: tl.tensor, bias: tl.tensor, n: tl.tensor,
    parts: tl.constexpr, quantized: tl.constexpr, dtype: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Numbers of a linear layer's output, which may be unfinished sums of `parts`."""
    value = tl.load(x + at)
    if parts > 0:
        for part in tl.static_range(1, parts):
            value += tl.load(x + part * stride + at)
        factor = tl.load(scale + n) if quantized else 1.0
        value = finish(value, factor, tl.load(bias + n).to(tl.float32), quantized, True, False)
    return value.to(dtype)


@triton.jit
def self_attention_kernel(
    qkv: tl.tensor, scale: tl.tensor, bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    positions: tl.tensor, out: tl.tensor, slots: int, heads: int, n_ctx: int,
    head_dim: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, quantized: tl.constexpr,
    pdl: tl.constexpr,
) -> None:  # fmt: skip
    """One slot and head: append this step's key and value, attend to all so far."""
    head = tl.program_id(0)
    slot = tl.program_id(1)
    d = tl.arange(0, head_dim)
    width = heads * head_dim
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = k_cache.dtype.element_ty
    new = slot * 3 * width + head * head_dim + d
    stride = slots * 3 * width
    n = head * head_dim + d
    query = _finished(qkv, new, stride, scale, bias, n, parts, quantized, dtype).to(tl.float32)
    new_k = _finished(qkv, new + width, stride, scale, bias, n + width, parts, quantized, dtype)
    new_v = _finished(
        qkv, new + 2 * width, stride, scale, bias, n + 2 * width, parts, quantized, dtype
    )
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
    tl.store(out + slot * width + n, (acc / total).to(out.dtype.element_ty))


@triton.jit
def cross_attention_kernel(
    q: tl.tensor, q_scale: tl.tensor, q_bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    k_scale: tl.tensor, v_scale: tl.tensor, out: tl.tensor, partial: tl.tensor, stats: tl.tensor,
    arrived: tl.tensor, slots: int, heads: int, n_keys: int, head_dim: tl.constexpr,
    keys_here: tl.constexpr, splits: tl.constexpr, splits_padded: tl.constexpr, parts: tl.constexpr,
    q_quantized: tl.constexpr, quantized: tl.constexpr, packed: tl.constexpr, pdl: tl.constexpr,
) -> None:  # fmt: skip
    """One (slot, head) and one split of the keys; whoever arrives last adds the splits up.

    INT8 keys and values have a scale per slot, head and channel, which goes into the query and
    into the result.
    """
    split = tl.program_id(0)
    row = tl.program_id(1)  # slot * heads + head
    d = tl.arange(0, head_dim)
    dtype: tl.constexpr = out.dtype.element_ty
    n = (row % heads) * head_dim + d
    t = split * keys_here + tl.arange(0, keys_here)
    there = t < n_keys
    at = row.to(tl.int64) * n_keys * head_dim + t[:, None] * head_dim + d[None, :]
    keys = tl.load(k_cache + at, mask=there[:, None], other=0)
    values = tl.load(v_cache + at, mask=there[:, None], other=0)
    k_factor = tl.load(k_scale + row * head_dim + d) if quantized else 1.0
    if pdl:  # the step's first kernel, which does not overlap, waited for whoever wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    query = _finished(
        q, row * head_dim + d, slots * heads * head_dim, q_scale, q_bias, n, parts, q_quantized,
        dtype,
    ).to(tl.float32)  # fmt: skip
    if quantized:
        query *= k_factor
    score = tl.sum(to_half(keys, dtype, packed).to(tl.float32) * query[None, :], 1)
    score = tl.where(there, score, -1e30)  # finite: a split may have no key at all
    peak = tl.max(score, 0)
    p = tl.where(there, tl.exp(score - peak), 0.0)
    total = tl.sum(p, 0)
    acc = tl.sum(p[:, None] * to_half(values, dtype, packed).to(tl.float32), 0)
    here = row * splits + split
    tl.store(partial + here * head_dim + d, acc)
    tl.store(stats + here * 2, peak)
    tl.store(stats + here * 2 + 1, total)
    tl.debug_barrier()  # every thread's part is stored before the count says so
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
        if quantized:
            mixed *= tl.load(v_scale + row * head_dim + d)
        tl.store(out + row * head_dim + d, mixed.to(dtype))
        tl.store(arrived + row, 0)


@triton.jit
def quantize_kernel(
    x: tl.tensor, slots: tl.tensor, out: tl.tensor, scale: tl.tensor, stack: int, heads: int,
    time: int, head_dim: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one layer's keys or values of one window -> int8 and a scale per channel.

    x is (windows, time, groups * heads, head_dim), out (groups, stack, heads, time, head_dim).
    """
    column = tl.program_id(0)  # group * heads + head
    window = tl.program_id(1)
    wide = tl.num_programs(0) * head_dim
    slot = tl.load(slots + window)
    d = tl.arange(0, head_dim)
    source = x + window.to(tl.int64) * time * wide + column * head_dim + d[None, :]
    largest = tl.zeros([block, head_dim], dtype=tl.float32)
    for start in range(0, time, block):
        t = start + tl.arange(0, block)[:, None]
        value = tl.load(source + t.to(tl.int64) * wide, mask=t < time, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    step = tl.max(largest, 0) / 127.0
    inverse = 1.0 / tl.maximum(step, 1e-30)  # a channel of zeros stays zeros
    place = (column // heads * stack + slot) * heads + column % heads
    tl.store(scale + place * head_dim + d, step)
    target = out + place.to(tl.int64) * time * head_dim + d[None, :]
    for start in range(0, time, block):
        t = start + tl.arange(0, block)[:, None]
        value = tl.load(source + t.to(tl.int64) * wide, mask=t < time, other=0.0).to(tl.float32)
        scaled = value * inverse[None, :]
        rounded = tl.where(scaled >= 0.0, tl.floor(scaled + 0.5), tl.ceil(scaled - 0.5))
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        tl.store(target + t * head_dim, rounded.to(tl.int8), mask=t < time)


@triton.jit
def embed_kernel(
    ids: tl.tensor, positions: tl.tensor, tokens: tl.tensor, places: tl.tensor, out: tl.tensor,
    n_ctx: int, width: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One slot's token at its position, embedded, plus the position's own embedding."""
    slot = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < width
    position = tl.load(positions + slot)
    token = tl.load(ids + slot * n_ctx + position)
    value = tl.load(tokens + token * width + at, mask=inside)
    place = tl.load(places + position * width + at, mask=inside)
    tl.store(out + slot * width + at, value + place, mask=inside)
