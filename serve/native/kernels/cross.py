"""Cross-attention as Gluon kernels: the matrix unit for one feed of a slot as for many.

The keys of a slot and head are cut into splits of 256 (of FP16 keys 128), a split into four runs.
A run's part of softmax is computed by itself, runs are added up in order within their split, and
splits in order at the end, by whoever arrives last (Flash-Decoding with one split count). Two
kernels do that, and give the same bits. Where there is much to read, `cross_stream_kernel` has
programs of one warp that go from split to split, the next keys always on their way; where there is
little, or feeds are many, `cross_kernel` has a warp for each run. A feed takes one of sixteen rows
of the matrix unit, which do not know of each other: so what it gets depends on its own numbers
alone, in whatever company.

Which feeds share a slot (`Groups`) stands in tensors that no kernel of a step writes, and nor do
the slots' keys and values: they are read before the kernel before has ended (`pdl`, see `linear`).
Every program waits for it all the same, one without work too, for the next kernel relies on that.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.fragments import (
    along,
    barrier,
    channel_at,
    key_at,
    keys_layout,
    keys_operand,
    left_operand,
    mma_layout,
    power,
    query_layout,
    query_operand,
    rows_layout,
    top_rows,
    values_layout,
    values_operand,
)

RUNS = 4  # of a split
_RUNS = gl.constexpr(RUNS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LARGER = gl.constexpr(16.0)  # queries of INT8 keys: neither too small nor too large for float16
# What INT8 is as float16, see `fragments`: too small by 2 ** 24, and raised by 128.
_SUBNORMAL, _RAISED = gl.constexpr(16777216.0), gl.constexpr(128.0)


@gluon.jit
def _load(
    at: gl.tensor, row: gl.tensor, there: int, layout: gl.constexpr, eviction: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Keys or values from a row on, a run for every warp; zeros beyond those that are there."""
    warps: gl.constexpr = layout.shape[0]
    run: gl.constexpr = layout.shape[1]
    step: gl.constexpr = layout.shape[2]
    key = along(warps, 0, layout) * run + key_at(along(run, 1, layout))
    at = (at + row * step) + (key * step + along(step, 2, layout))
    return gl.load(at, mask=key < there, other=0, eviction_policy=eviction)


@gluon.jit
def _query(
    q: gl.tensor, q_scale: gl.tensor, q_bias: gl.tensor, k_scale: gl.tensor, feed: int, end: int,
    feeds: int, heads: int, head: int, row: int, mma: gl.constexpr,
    parts: gl.constexpr, quantized: gl.constexpr, int8: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The queries of feeds `feed` to `end`, finished if they are unfinished sums of `parts`.

    They take on the keys' scales, `k_scale` of slot and head `row`, and a factor for `power`.
    """
    warps: gl.constexpr = mma.warps_per_cta[0]
    layout: gl.constexpr = query_layout(warps)
    d = along(64, 2, layout)
    mine = feed + along(16, 1, layout) + along(warps, 0, layout) * 0
    n = head * 64 + d
    at = mine * (heads * 64) + n
    value = gl.load(q + at, mask=mine < end, other=0.0)
    if parts > 0:
        for part in gl.static_range(1, parts):
            value += gl.load(q + part * feeds * heads * 64 + at, mask=mine < end, other=0.0)
        offset = gl.load(q_bias + n).to(gl.float32)
        if quantized:
            value = gl.fma(value, _like(gl.load(q_scale + n), value), _like(offset, value))
        else:
            value = value + offset
        value = value.to(gl.float16)
    value = value.to(gl.float32)
    if int8:
        value = value * (gl.load(k_scale + row * 64 + d) * (_LARGER * _LOG2_E))
    else:
        value = value * _LOG2_E
    return query_operand(value.to(gl.float16), int8, mma)


@gluon.jit
def _like(x: gl.tensor, other: gl.tensor) -> gl.tensor:
    """x, broadcast to the shape of the other."""
    return x + gl.zeros_like(other).to(x.dtype)


@gluon.jit
def _weights(
    score: gl.tensor, missing: int, int8: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """(softmax's numerators as float16, the largest scores), of scores (warps, rows, keys).

    Keys from `missing` on, by their places in the run, do not exist.
    """
    unit: gl.constexpr = _SUBNORMAL / _LARGER if int8 else 1.0
    layout: gl.constexpr = score.type.layout
    keys: gl.constexpr = score.shape[2]
    warps: gl.constexpr = score.shape[0]
    place = key_at(along(keys, 2, layout)) + along(warps, 0, layout) * keys
    if missing < keys * warps:
        score = gl.where(place < missing, score, -1e30)
    peak = gl.max(score, 2) * unit
    factor = gl.full(score.shape, unit, gl.float32, layout)
    return power(gl.fma(score, factor, _like(-gl.expand_dims(peak, 2), score))).to(gl.float16), peak


@gluon.jit
def _mix(
    weights: gl.tensor, raw: gl.tensor, mma: gl.constexpr, rows: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """(weighted values (warps, rows, 64), sums of weights (warps, rows)), INT8 as it is."""
    warps: gl.constexpr = raw.shape[0]
    keys: gl.constexpr = raw.shape[1]
    left = left_operand(weights, mma)
    mixed = mma_v2(left, values_operand(raw, mma), gl.zeros([warps, 16, 64], gl.float32, mma))
    ones = gl.full([warps, keys, 8], 1.0, gl.float16, gl.DotOperandLayout(1, mma, 2))
    sums = mma_v2(left, ones, gl.zeros([warps, 16, 8], gl.float32, mma))
    return top_rows(mixed, rows), gl.max(top_rows(sums, rows), 2)


@gluon.jit
def _add_run(
    peak: gl.tensor, total: gl.tensor, acc: gl.tensor, new_peak: gl.tensor, new_total: gl.tensor,
    new: gl.tensor,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """What some runs gave and what the next one gives; every operation said, for equal bits."""
    top = gl.maximum(peak, new_peak)
    kept = power(peak - top)
    weight = power(new_peak - top)
    last: gl.constexpr = len(acc.shape) - 1
    total = gl.fma(new_total, weight, total * kept)
    acc = gl.fma(new, _like(gl.expand_dims(weight, last), new), acc * gl.expand_dims(kept, last))
    return top, total, acc


@gluon.jit
def _group(
    slots: gl.tensor, first: gl.tensor, count: gl.tensor, group: int, begin: int, end: int,
) -> tuple[int, int, int]:  # fmt: skip
    """(slot, low, high): the group's feeds [low, high) among [begin, end)."""
    size = gl.load(count + group).to(gl.int32)
    low = gl.load(first + group).to(gl.int32)
    high = gl.minimum(low + size, end)
    return gl.load(slots + group).to(gl.int32), gl.maximum(low, begin), high


@gluon.jit
def _sum_of_splits(
    partial: gl.tensor, stats: gl.tensor, out: gl.tensor, v_scale: gl.tensor, begin: int,
    low: int, high: int, heads: int, head: int, some: gl.constexpr, splits: gl.constexpr,
    int8: gl.constexpr, layout: gl.constexpr,
) -> None:  # fmt: skip
    """Add up the splits of feeds [low, high), `some` at a time, in order."""
    d = gl.arange(0, 64, gl.SliceLayout(0, layout))
    channel = channel_at(d)
    for start in range(low, high, some):
        feed = start + gl.arange(0, some, gl.SliceLayout(1, layout))
        real = feed < high
        line = ((feed - begin) * heads + head) * splits
        top = gl.load(stats + line * 2, mask=real, other=0.0, cache_modifier=".cg")
        for split in gl.static_range(1, splits):
            at = stats + (line + split) * 2
            top = gl.maximum(top, gl.load(at, mask=real, other=0.0, cache_modifier=".cg"))
        mixed = gl.zeros([some, 64], gl.float32, layout)
        total = gl.zeros([some], gl.float32, gl.SliceLayout(1, layout))
        for split in gl.static_range(splits):
            at = stats + (line + split) * 2
            weight = power(gl.load(at, mask=real, other=0.0, cache_modifier=".cg") - top)
            sums = gl.load(at + 1, mask=real, other=1.0, cache_modifier=".cg")
            total = gl.fma(weight, sums, total)
            at = partial + (line + split)[:, None] * 64 + d[None, :]
            part = gl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
            mixed = gl.fma(_like(weight[:, None], part), part, mixed)
        mixed = mixed / total[:, None]
        if int8:
            mixed = mixed * gl.load(v_scale + channel)[None, :]
        target = out + feed[:, None] * (heads * 64) + head * 64 + channel[None, :]
        gl.store(target, mixed.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit(do_not_specialize=("feeds", "begin", "end"))
def cross_kernel(
    q: gl.tensor, q_scale: gl.tensor, q_bias: gl.tensor, k_cache: gl.tensor, v_cache: gl.tensor,
    k_scale: gl.tensor, v_scale: gl.tensor, slots: gl.tensor, first: gl.tensor, count: gl.tensor,
    out: gl.tensor, partial: gl.tensor, stats: gl.tensor, arrived: gl.tensor, feeds: int,
    begin: int, end: int, heads: int, n_keys: int, parts: gl.constexpr, q_quantized: gl.constexpr,
    int8: gl.constexpr, pdl: gl.constexpr, direct: gl.constexpr, run: gl.constexpr,
    splits: gl.constexpr, rows: gl.constexpr,
) -> None:  # fmt: skip
    """One split of one group and head, a warp for each run; the last axis takes turns with tiles.

    `direct`: group i is feed i of slot i.
    """
    mma: gl.constexpr = mma_layout(_RUNS)
    split = gl.program_id(0)
    group = gl.program_id(1) // heads
    head = gl.program_id(1) % heads
    if direct:
        slot, low, high = group, group, group + 1
    else:
        slot, low, high = _group(slots, first, count, group, begin, end)
    mine = low + gl.program_id(2) * 16
    row = slot * heads + head
    there = n_keys - split * (run * _RUNS)
    wanted = gl.where(mine < high, there, 0)
    at = row.to(gl.int64) * n_keys + split * (run * _RUNS)
    keys = _load(k_cache, at, wanted, keys_layout(_RUNS, run, int8), "")
    values = _load(v_cache, at, wanted, values_layout(_RUNS, run, int8), "")
    if pdl:  # the step's first kernel, which does not overlap, waited for whoever wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    for start in range(mine, high, gl.num_programs(2) * 16):
        query = _query(
            q, q_scale, q_bias, k_scale, start, high, feeds, heads, head, row, mma, parts,
            q_quantized, int8,
        )  # fmt: skip
        score = mma_v2(query, keys_operand(keys, mma), gl.zeros([_RUNS, 16, run], gl.float32, mma))
        weights, peaks = _weights(top_rows(score, rows), there, int8)
        accs, totals = _mix(weights, values, mma, rows)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [_RUNS, 1], [1, 0])
        peak, total, acc = _sum_of_runs(peaks, totals, accs, layout)
        if int8:
            acc = acc * _SUBNORMAL - total[:, None] * _RAISED
        feed = start + gl.arange(0, rows, gl.SliceLayout(1, layout))
        line = ((feed - begin) * heads + head) * splits + split
        d = gl.arange(0, 64, gl.SliceLayout(0, layout))
        real = feed < high
        gl.store(partial + line[:, None] * 64 + d[None, :], acc, mask=real[:, None])
        gl.store(stats + line * 2, peak, mask=real)
        gl.store(stats + line * 2 + 1, total, mask=real)
        barrier()  # every thread's part is stored before the count says so
        counter = arrived + (start - begin) * heads + head
        if gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            _sum_of_splits(
                partial, stats, out, v_scale + row * 64, begin, start,
                gl.minimum(start + 16, high), heads, head, rows, splits, int8, layout,
            )  # fmt: skip
            gl.store(counter, 0)


@gluon.jit
def _sum_of_runs(
    peaks: gl.tensor, totals: gl.tensor, accs: gl.tensor, layout: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """(rows,), (rows,) and (rows, 64): what all warps' runs give, by way of shared memory."""
    rows: gl.constexpr = peaks.shape[1]
    lines: gl.constexpr = _RUNS * rows
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    peaks = gl.allocate_shared_memory(gl.float32, [lines], flat, gl.reshape(peaks, [lines]))
    totals = gl.allocate_shared_memory(gl.float32, [lines], flat, gl.reshape(totals, [lines]))
    accs = gl.allocate_shared_memory(
        gl.float32, [lines, 64], swizzled, gl.reshape(accs, [lines, 64])
    )
    line: gl.constexpr = gl.SliceLayout(1, layout)
    peak = gl.full([rows], -1e35, gl.float32, line)
    total = gl.zeros([rows], gl.float32, line)
    acc = gl.zeros([rows, 64], gl.float32, layout)
    for run in gl.static_range(_RUNS):
        peak, total, acc = _add_run(
            peak, total, acc, peaks.slice(run * rows, rows).load(line),
            totals.slice(run * rows, rows).load(line), accs.slice(run * rows, rows).load(layout),
        )  # fmt: skip
    return peak, total, acc


@gluon.jit
def _next_split(
    slots: gl.tensor, first: gl.tensor, count: gl.tensor, item: int, items: int, begin: int,
    end: int, heads: int, n_keys: int, keys: gl.constexpr, splits: gl.constexpr,
    direct: gl.constexpr,
) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """The program's next split that has feeds, from `item` on.

    (item, low, high, the slot's and head's row, the first key's row, how many keys there are), with
    neither feeds nor keys if there is none.
    """
    slot, low, high = item // splits // heads, item // splits // heads, 0
    if direct:
        high = low + gl.where(item < items, 1, 0)
    else:
        low = 0
        while (item < items) & (low >= high):
            slot, low, high = _group(slots, first, count, item // splits // heads, begin, end)
            item = gl.where(low < high, item, item + gl.num_programs(0))
        high = gl.where(item < items, high, low)
    row = slot * heads + item // splits % heads
    there = gl.where(item < items, n_keys - item % splits * keys, 0)
    return item, low, high, row, row.to(gl.int64) * n_keys + item % splits * keys, there


@gluon.jit
def _store_part(
    partial: gl.tensor, stats: gl.tensor, peak: gl.tensor, total: gl.tensor, acc: gl.tensor,
    low: int, high: int, begin: int, heads: int, item: int, splits: gl.constexpr,
) -> None:  # fmt: skip
    """What one split gave, (1, rows) and (1, rows, 64), into the workspace."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = acc.shape[1]
    first = item // splits % heads * splits + item % splits
    feed = low + along(rows, 1, layout)
    place = (feed - begin) * heads * splits + first
    gl.store(partial + place * 64 + along(64, 2, layout), acc, mask=feed < high)
    feed = low + gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, peak.type.layout)), 0)
    place = (feed - begin) * heads * splits + first
    gl.store(stats + place * 2, peak, mask=feed < high)
    gl.store(stats + place * 2 + 1, total, mask=feed < high)
    barrier()  # every thread's part is stored before the count says so


@gluon.jit(do_not_specialize=("feeds", "begin", "end", "items"))
def cross_stream_kernel(
    q: gl.tensor, q_scale: gl.tensor, q_bias: gl.tensor, k_cache: gl.tensor, v_cache: gl.tensor,
    k_scale: gl.tensor, v_scale: gl.tensor, slots: gl.tensor, first: gl.tensor, count: gl.tensor,
    out: gl.tensor, partial: gl.tensor, stats: gl.tensor, arrived: gl.tensor, feeds: int,
    begin: int, end: int, heads: int, n_keys: int, items: int, parts: gl.constexpr,
    q_quantized: gl.constexpr, int8: gl.constexpr, pdl: gl.constexpr, direct: gl.constexpr,
    run: gl.constexpr, splits: gl.constexpr,
) -> None:  # fmt: skip
    """Splits of any groups and heads, `items` in all, by programs of a warp; up to 8 feeds each.

    What the next run needs is asked for as soon as its registers are free.
    """
    mma: gl.constexpr = mma_layout(1)
    layout: gl.constexpr = rows_layout(1, 8, 64)
    line: gl.constexpr = gl.SliceLayout(2, layout)
    k_layout: gl.constexpr = keys_layout(1, run, int8)
    v_layout: gl.constexpr = values_layout(1, run, int8)
    item, low, high, row, at, there = _next_split(
        slots, first, count, gl.program_id(0), items, begin, end, heads, n_keys, run * _RUNS,
        splits, direct,
    )  # fmt: skip
    keys = _load(k_cache, at, there, k_layout, "evict_first")
    values = _load(v_cache, at, there, v_layout, "evict_first")
    if pdl:  # the step's first kernel, which does not overlap, waited for whoever wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    query = _query(
        q, q_scale, q_bias, k_scale, low, high, feeds, heads, item // splits % heads, row, mma,
        parts, q_quantized, int8,
    )  # fmt: skip
    while item < items:
        n_item, n_low, n_high, n_row, n_at, n_there = _next_split(
            slots, first, count, item + gl.num_programs(0), items, begin, end, heads, n_keys,
            run * _RUNS, splits, direct,
        )  # fmt: skip
        peak = gl.full([1, 8], -1e35, gl.float32, line)
        total = gl.zeros([1, 8], gl.float32, line)
        acc = gl.zeros([1, 8, 64], gl.float32, layout)
        for turn in range(_RUNS):
            score = mma_v2(query, keys_operand(keys, mma), gl.zeros([1, 16, run], gl.float32, mma))
            last = turn + 1 == _RUNS
            upcoming = gl.where(last, n_at, at + (turn + 1) * run)
            wanted = gl.where(last, n_there, there - (turn + 1) * run)
            keys = _load(k_cache, upcoming, wanted, k_layout, "evict_first")
            weights, new_peak = _weights(top_rows(score, 8), there - turn * run, int8)
            new, new_total = _mix(weights, values, mma, 8)
            values = _load(v_cache, upcoming, wanted, v_layout, "evict_first")
            new_peak = gl.convert_layout(new_peak, line, assert_trivial=True)
            new_total = gl.convert_layout(new_total, line, assert_trivial=True)
            peak, total, acc = _add_run(peak, total, acc, new_peak, new_total, new)
        if int8:
            acc = acc * _SUBNORMAL - gl.expand_dims(total, 2) * _RAISED
        head = item // splits % heads
        _store_part(partial, stats, peak, total, acc, low, high, begin, heads, item, splits)
        counter = arrived + (low - begin) * heads + head
        arrival = gl.atomic_add(counter, 1, sem="acq_rel")
        query = _query(
            q, q_scale, q_bias, k_scale, n_low, n_high, feeds, heads, n_item // splits % heads,
            n_row, mma, parts, q_quantized, int8,
        )  # fmt: skip
        if arrival == splits - 1:
            narrow: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
            _sum_of_splits(
                partial, stats, out, v_scale + row * 64, begin, low, high, heads, head, 1, splits,
                int8, narrow,
            )  # fmt: skip
            gl.store(counter, 0)
        item, low, high, row, at, there = n_item, n_low, n_high, n_row, n_at, n_there
