"""Cross-attention, of one feed a slot or several, and its INT8 store as Triton-language kernels.

The keys of a slot and head are cut into a fixed number of splits, whatever the number of slots;
whoever arrives last adds them up in order (Flash-Decoding with one split count). So a feed's result
depends on its own numbers alone.

Which feeds share a slot (`Groups`) stands in tensors that no kernel of a step writes, and nor do
the slots' keys and values: they are read before the kernel before has ended (`pdl`, see `linear`).
Every program waits for it all the same, one without work too, for the next kernel relies on that.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.attention import finished
from serve.native.kernels.linear import to_half


@triton.jit
def _group(
    slots: tl.tensor, first: tl.tensor, count: tl.tensor, alone: tl.tensor, group: int, begin: int,
    end: int, tiles: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(slot, low, high): the group's feeds [low, high) among [begin, end).

    None, of slot 0, if the group is not for the kernel that asks: `tiles` takes those of several
    feeds that need not be alone, the other kernel the rest.
    """
    size = tl.load(count + group).to(tl.int32)
    low = tl.load(first + group).to(tl.int32)
    together = (size > 1) & (tl.load(alone + group) == 0)
    high = tl.minimum(tl.where(together == tiles, low + size, low), end)
    low = tl.maximum(low, begin)
    return tl.load(slots + group, mask=low < high, other=0).to(tl.int32), low, high


@triton.jit
def _keys_and_values(
    k_cache: tl.tensor, v_cache: tl.tensor, k_scale: tl.tensor, row: tl.tensor, t: tl.tensor,
    n_keys: int, wanted: tl.tensor, head_dim: tl.constexpr, quantized: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Keys and values `t` of a slot's head (`row`) as stored, where wanted, and the keys' scale."""
    d = tl.arange(0, head_dim)
    at = row.to(tl.int64) * n_keys * head_dim + t[:, None] * head_dim + d[None, :]
    keys = tl.load(k_cache + at, mask=wanted[:, None], other=0)
    values = tl.load(v_cache + at, mask=wanted[:, None], other=0)
    factor = tl.full([head_dim], 1.0, tl.float32)
    if quantized:
        factor = tl.load(k_scale + row * head_dim + d)
    return keys, values, factor


@triton.jit
def _attend_alone(
    feed: int, q: tl.tensor, q_scale: tl.tensor, q_bias: tl.tensor, keys: tl.tensor,
    values: tl.tensor, k_factor: tl.tensor, v_scale: tl.tensor, out: tl.tensor, partial: tl.tensor,
    stats: tl.tensor, arrived: tl.tensor, counted: int, feeds: int, heads: int, head: int,
    split: int, exists: tl.tensor, head_dim: tl.constexpr, splits: tl.constexpr,
    splits_padded: tl.constexpr, parts: tl.constexpr, q_quantized: tl.constexpr,
    quantized: tl.constexpr, packed: tl.constexpr, again: tl.constexpr,
) -> None:  # fmt: skip
    """One feed, one head and one split of the keys; v_scale is of this slot and head."""
    d = tl.arange(0, head_dim)
    dtype: tl.constexpr = out.dtype.element_ty
    n = head * head_dim + d
    row = counted * heads + head  # of the workspace
    width = heads * head_dim
    query = finished(
        q, feed * width + n, feeds * width, q_scale, q_bias, n, parts, q_quantized, dtype
    ).to(tl.float32)
    if quantized:
        query *= k_factor
    score = tl.sum(to_half(keys, dtype, packed, again).to(tl.float32) * query[None, :], 1)
    score = tl.where(exists, score, -1e30)  # finite: a split may have no key at all
    peak = tl.max(score, 0)
    p = tl.where(exists, tl.exp(score - peak), 0.0)
    total = tl.sum(p, 0)
    acc = tl.sum(p[:, None] * to_half(values, dtype, packed, again).to(tl.float32), 0)
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
            mixed *= tl.load(v_scale + d)
        tl.store(out + feed * width + n, mixed.to(dtype))
        tl.store(arrived + row, 0)


@triton.jit(do_not_specialize=("feeds", "begin", "end"))
def cross_attention_kernel(
    q: tl.tensor, q_scale: tl.tensor, q_bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    k_scale: tl.tensor, v_scale: tl.tensor, slots: tl.tensor, first: tl.tensor, count: tl.tensor,
    alone: tl.tensor, out: tl.tensor, partial: tl.tensor, stats: tl.tensor, arrived: tl.tensor,
    feeds: int, begin: int, end: int, heads: int, n_keys: int, head_dim: tl.constexpr,
    parts: tl.constexpr, q_quantized: tl.constexpr, quantized: tl.constexpr, packed: tl.constexpr,
    pdl: tl.constexpr, keys_here: tl.constexpr, splits: tl.constexpr, splits_padded: tl.constexpr,
    several: tl.constexpr, direct: tl.constexpr,
) -> None:  # fmt: skip
    """One (group, head) and one split of the keys, feed by feed, each as if it were alone.

    Without `several` no group has more than one feed; `direct`: group i is feed i of slot i. INT8
    keys and values have a scale per slot, head and channel, which goes into the query and into the
    result.
    """
    split = tl.program_id(0)
    group = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    t = split * keys_here + tl.arange(0, keys_here)
    exists = t < n_keys
    if direct:  # nothing to look up before the keys and values are asked for
        slot, low, high = group, group, group + 1
        wanted = exists
    else:
        slot, low, high = _group(slots, first, count, alone, group, begin, end, False)
        wanted = exists & (low < high)
    row = slot * heads + head
    keys, values, k_factor = _keys_and_values(
        k_cache, v_cache, k_scale, row, t, n_keys, wanted, head_dim, quantized
    )
    if pdl:  # the step's first kernel, which does not overlap, waited for whoever wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    if several:
        for feed in range(low, high):
            _attend_alone(
                feed, q, q_scale, q_bias, keys, values, k_factor, v_scale + row * head_dim, out,
                partial, stats, arrived, feed - begin, feeds, heads, head, split, exists, head_dim,
                splits, splits_padded, parts, q_quantized, quantized, packed, True,
            )  # fmt: skip
    elif low < high:
        _attend_alone(
            low, q, q_scale, q_bias, keys, values, k_factor, v_scale + row * head_dim, out,
            partial, stats, arrived, low - begin, feeds, heads, head, split, exists, head_dim,
            splits, splits_padded, parts, q_quantized, quantized, packed, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=("feeds", "begin", "end"))
def cross_tiles_kernel(
    q: tl.tensor, q_scale: tl.tensor, q_bias: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor,
    k_scale: tl.tensor, v_scale: tl.tensor, slots: tl.tensor, first: tl.tensor, count: tl.tensor,
    alone: tl.tensor, out: tl.tensor, partial: tl.tensor, stats: tl.tensor, arrived: tl.tensor,
    feeds: int, begin: int, end: int, heads: int, n_keys: int, head_dim: tl.constexpr,
    parts: tl.constexpr, q_quantized: tl.constexpr, quantized: tl.constexpr, packed: tl.constexpr,
    pdl: tl.constexpr, keys_here: tl.constexpr, splits: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """One (group, head) and one split of the keys, by the matrix unit, `tile` feeds at a time.

    A tile is always whole, its last feeds copies of its first: so what a feed gets is the same
    wherever it stands and however many the group has. Several programs (the grid's last axis) take
    turns with a large group's tiles.
    """
    split = tl.program_id(0)
    group = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    slot, low, high = _group(slots, first, count, alone, group, begin, end, True)
    d = tl.arange(0, head_dim)
    dtype: tl.constexpr = out.dtype.element_ty
    n = head * head_dim + d
    width = heads * head_dim
    row = slot * heads + head
    t = split * keys_here + tl.arange(0, keys_here)
    mine = low + tl.program_id(2) * tile
    exists = t < n_keys
    keys, values, k_factor = _keys_and_values(
        k_cache, v_cache, k_scale, row, t, n_keys, exists & (mine < high), head_dim, quantized
    )
    if pdl:
        gdc_launch_dependents()
    turned = tl.trans(to_half(keys, dtype, packed, True))
    values = to_half(values, dtype, packed, True)
    if pdl:
        gdc_wait()
    for start in range(mine, high, tl.num_programs(2) * tile):
        feed = start + tl.arange(0, tile)
        real = feed < high
        feed = tl.where(real, feed, start)
        query = finished(
            q, feed[:, None] * width + n[None, :], feeds * width, q_scale, q_bias, n[None, :],
            parts, q_quantized, dtype,
        )  # fmt: skip
        if quantized:
            query = (query.to(tl.float32) * k_factor[None, :]).to(dtype)
        score = tl.dot(_settled(query, packed), turned, input_precision="ieee")
        score = tl.where(exists[None, :], score, -1e30)
        peak = tl.max(score, 1)
        p = tl.where(exists[None, :], tl.exp(score - peak[:, None]), 0.0)
        acc = tl.dot(p.to(dtype), values, input_precision="ieee")
        rows = (feed - begin) * heads + head  # of the workspace
        here = rows * splits + split
        tl.store(partial + here[:, None] * head_dim + d[None, :], acc, mask=real[:, None])
        tl.store(stats + here * 2, peak, mask=real)
        tl.store(stats + here * 2 + 1, tl.sum(p, 1), mask=real)
        tl.debug_barrier()  # every thread's part is stored before the count says so
        counter = arrived + (start - begin) * heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            mixed = _sum_of_splits(rows, partial, stats, head_dim, splits)
            if quantized:
                mixed *= tl.load(v_scale + row * head_dim + d)[None, :]
            target = out + feed[:, None] * width + n[None, :]
            tl.store(target, mixed.to(dtype), mask=real[:, None])
            tl.store(counter, 0)


@triton.jit
def _settled(x: tl.tensor, packed: tl.constexpr) -> tl.tensor:
    """x as it is, in a way that the compiler does not look behind.

    It would carry each number that x is computed from into the matrix unit's layout by itself, by
    way of shared memory, in place of x alone.
    """
    if packed:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2
        )
    return x


@triton.jit
def _sum_of_splits(
    rows: tl.tensor, partial: tl.tensor, stats: tl.tensor, head_dim: tl.constexpr,
    splits: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The result (rows, head_dim) of some rows of the workspace, their splits added in order."""
    first = rows * splits
    top = tl.load(stats + first * 2, cache_modifier=".cg")
    for split in tl.static_range(1, splits):
        top = tl.maximum(top, tl.load(stats + (first + split) * 2, cache_modifier=".cg"))
    mixed = tl.zeros([rows.shape[0], head_dim], dtype=tl.float32)
    total = tl.zeros([rows.shape[0]], dtype=tl.float32)
    for split in tl.static_range(splits):
        one = first + split
        weight = tl.exp(tl.load(stats + one * 2, cache_modifier=".cg") - top)
        total += weight * tl.load(stats + one * 2 + 1, cache_modifier=".cg")
        at = one[:, None] * head_dim + tl.arange(0, head_dim)[None, :]
        mixed += weight[:, None] * tl.load(partial + at, cache_modifier=".cg")
    return mixed / total[:, None]


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
