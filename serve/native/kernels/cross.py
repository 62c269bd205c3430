"""Compute cross-attention with Gluon kernels: one tensor-core path for one or many tokens a slot.

The keys of a slot and head are cut into splits of 256 keys (FP16: 128), and a split into four runs.
Each run computes its part of the softmax. A split adds its runs in order. The program that
finishes last adds the splits in order (Flash-Decoding with a fixed number of splits).

Two kernels compute this, with the same bits. If there is much to read, `cross_stream_kernel` runs
programs of one warp that iterate over splits and prefetch the next keys. If there is little, or
many tokens share a slot, `cross_kernel` has one warp per run. A token is one of sixteen rows of
the matrix instruction. Rows are independent, so a result does not depend on the other tokens.

No kernel of a step writes the groups of tokens by slot (`SlotGroups`) or the slots' keys and
values. They are read before the previous kernel has ended (`pdl`, see `linear`). Every program
still waits for that kernel, even without work, since the next kernel relies on it.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.fragments import (
    along,
    barrier,
    keys_layout,
    keys_operand,
    load_run,
    mma_layout,
    rows_layout,
    top_rows,
    values_layout,
)
from serve.native.kernels.linear import Sums
from serve.native.kernels.splits import (
    RAISED,
    RUNS,
    SUBNORMAL,
    CrossCache,
    SplitGroups,
    Workspace,
    add_run,
    group_of,
    mix,
    queries_of,
    sum_of_splits,
    weights_of,
)


@gluon.jit(do_not_specialize=("n_tokens", "begin", "end"))
def cross_kernel(
    q: Sums,
    cache: CrossCache,
    groups: SplitGroups,
    out,
    workspace: Workspace,
    n_tokens: int,
    begin: int,
    end: int,
    heads: int,
    n_keys: int,
    form: gl.constexpr,
    rows: gl.constexpr,
) -> None:
    """Compute one split of one group and head with a warp per run.

    Programs along the last grid axis share the group's tiles of 16 tokens.
    """
    mma: gl.constexpr = mma_layout(RUNS)
    run: gl.constexpr = form.run
    splits: gl.constexpr = form.splits
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [RUNS, 1], [1, 0])
    split, group, head = gl.program_id(0), gl.program_id(1) // heads, gl.program_id(1) % heads
    if form.direct:
        slot, low, high = group, group, group + 1
    else:
        slot, low, high = group_of(groups, group, begin, end)
    first_token = low + gl.program_id(2) * 16
    row = slot * heads + head
    keys_left = n_keys - split * (run * RUNS)
    wanted = gl.where(first_token < high, keys_left, 0)
    first_key = row.to(gl.int64) * n_keys + split * (run * RUNS)
    keys = load_run(cache.k, first_key, wanted, keys_layout(RUNS, run, form.int8), "")
    values = load_run(cache.v, first_key, wanted, values_layout(RUNS, run, form.int8), "")
    if form.pdl:  # safe: the step's first kernel waited for the kernel that wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    for start in range(first_token, high, gl.num_programs(2) * 16):
        query = queries_of(q, cache.k_scale, start, high, n_tokens, heads, head, row, mma, form)
        no_scores = gl.zeros([RUNS, 16, run], gl.float32, mma)
        score = mma_v2(query, keys_operand(keys, mma), no_scores)
        weights, peaks = weights_of(top_rows(score, rows), keys_left, form.int8)
        accs, totals = mix(weights, values, mma, rows)
        peak, total, acc = _sum_of_runs(peaks, totals, accs, layout)
        if form.int8:
            acc = acc * SUBNORMAL - total[:, None] * RAISED
        token = start + gl.arange(0, rows, gl.SliceLayout(1, layout))
        place = ((token - begin) * heads + head) * splits + split
        d = gl.arange(0, 64, gl.SliceLayout(0, layout))
        is_token = token < high
        gl.store(workspace.partial + place[:, None] * 64 + d[None, :], acc, mask=is_token[:, None])
        gl.store(workspace.stats + place * 2, peak, mask=is_token)
        gl.store(workspace.stats + place * 2 + 1, total, mask=is_token)
        barrier()  # all threads store their part before the program counts as finished
        counter = workspace.arrived + (start - begin) * heads + head
        if gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            last, v_scale = gl.minimum(start + 16, high), cache.v_scale + row * 64
            sum_of_splits(
                workspace, out, v_scale, begin, start, last, heads, head, rows, form, layout
            )
            gl.store(counter, 0)


@gluon.jit
def _sum_of_runs(
    peaks, totals, accs, layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Add the warps' runs in shared memory; return (rows,), (rows,) and (rows, 64)."""
    rows: gl.constexpr = peaks.shape[1]
    lines: gl.constexpr = RUNS * rows
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
    for run in gl.static_range(RUNS):
        new_peak = peaks.slice(run * rows, rows).load(line)
        new_total = totals.slice(run * rows, rows).load(line)
        new = accs.slice(run * rows, rows).load(layout)
        peak, total, acc = add_run(peak, total, acc, new_peak, new_total, new)
    return peak, total, acc


@gluon.jit
def _next_split(
    groups: SplitGroups,
    item: int,
    items: int,
    begin: int,
    end: int,
    heads: int,
    n_keys: int,
    form: gl.constexpr,
) -> tuple[int, int, int, int, int, int]:
    """Find the program's next split with tokens, from `item` on.

    Returns (item, low, high, row of the slot and head, row of the first key, number of keys). If
    no split is left, there are no tokens and no keys.
    """
    splits: gl.constexpr = form.splits
    keys: gl.constexpr = form.run * RUNS
    slot, low, high = item // splits // heads, item // splits // heads, 0
    if form.direct:
        high = low + gl.where(item < items, 1, 0)
    else:
        low = 0
        while (item < items) & (low >= high):
            slot, low, high = group_of(groups, item // splits // heads, begin, end)
            item = gl.where(low < high, item, item + gl.num_programs(0))
        high = gl.where(item < items, high, low)
    row = slot * heads + item // splits % heads
    keys_left = gl.where(item < items, n_keys - item % splits * keys, 0)
    return item, low, high, row, row.to(gl.int64) * n_keys + item % splits * keys, keys_left


@gluon.jit
def _attend(
    query,
    keys,
    values,
    cache: CrossCache,
    first_key,
    keys_left: int,
    next_key,
    next_left: int,
    mma: gl.constexpr,
    form: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return (peak, total, acc) of a split, and the keys and values of the next split's first run.

    The keys and values of the next run are loaded as soon as their registers are free.
    """
    layout: gl.constexpr = rows_layout(1, 8, 64)
    line: gl.constexpr = gl.SliceLayout(2, layout)
    run: gl.constexpr = form.run
    k_layout: gl.constexpr = keys_layout(1, run, form.int8)
    v_layout: gl.constexpr = values_layout(1, run, form.int8)
    peak = gl.full([1, 8], -1e35, gl.float32, line)
    total = gl.zeros([1, 8], gl.float32, line)
    acc = gl.zeros([1, 8, 64], gl.float32, layout)
    for turn in range(RUNS):
        score = mma_v2(query, keys_operand(keys, mma), gl.zeros([1, 16, run], gl.float32, mma))
        last = turn + 1 == RUNS
        upcoming = gl.where(last, next_key, first_key + (turn + 1) * run)
        wanted = gl.where(last, next_left, keys_left - (turn + 1) * run)
        keys = load_run(cache.k, upcoming, wanted, k_layout, "evict_first")
        weights, new_peak = weights_of(top_rows(score, 8), keys_left - turn * run, form.int8)
        new, new_total = mix(weights, values, mma, 8)
        values = load_run(cache.v, upcoming, wanted, v_layout, "evict_first")
        new_peak = gl.convert_layout(new_peak, line, assert_trivial=True)
        new_total = gl.convert_layout(new_total, line, assert_trivial=True)
        peak, total, acc = add_run(peak, total, acc, new_peak, new_total, new)
    if form.int8:
        acc = acc * SUBNORMAL - gl.expand_dims(total, 2) * RAISED
    return peak, total, acc, keys, values


@gluon.jit
def _store_part(
    workspace: Workspace,
    peak,
    total,
    acc,
    low: int,
    high: int,
    begin: int,
    heads: int,
    item: int,
    splits: gl.constexpr,
) -> None:
    """Store a split's sums, (1, rows) and (1, rows, 64), in the workspace."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = acc.shape[1]
    first = item // splits % heads * splits + item % splits
    token = low + along(rows, 1, layout)
    place = (token - begin) * heads * splits + first
    gl.store(workspace.partial + place * 64 + along(64, 2, layout), acc, mask=token < high)
    token = low + gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, peak.type.layout)), 0)
    place = (token - begin) * heads * splits + first
    gl.store(workspace.stats + place * 2, peak, mask=token < high)
    gl.store(workspace.stats + place * 2 + 1, total, mask=token < high)
    barrier()  # all threads store their part before the program counts as finished


@gluon.jit(do_not_specialize=("n_tokens", "begin", "end", "items"))
def cross_stream_kernel(
    q: Sums,
    cache: CrossCache,
    groups: SplitGroups,
    out,
    workspace: Workspace,
    n_tokens: int,
    begin: int,
    end: int,
    heads: int,
    n_keys: int,
    items: int,
    form: gl.constexpr,
) -> None:
    """Compute `items` splits of all groups and heads. A group has at most 8 tokens.

    A program is one warp. It computes every `num_programs`-th split.
    """
    mma: gl.constexpr = mma_layout(1)
    narrow: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    item, low, high, row, first_key, keys_left = _next_split(
        groups, gl.program_id(0), items, begin, end, heads, n_keys, form
    )
    keys = load_run(
        cache.k, first_key, keys_left, keys_layout(1, form.run, form.int8), "evict_first"
    )
    values = load_run(
        cache.v, first_key, keys_left, values_layout(1, form.run, form.int8), "evict_first"
    )
    if form.pdl:  # safe: the step's first kernel waited for the kernel that wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    head = item // form.splits % heads
    query = queries_of(q, cache.k_scale, low, high, n_tokens, heads, head, row, mma, form)
    while item < items:
        next_item, next_low, next_high, next_row, next_key, next_left = _next_split(
            groups, item + gl.num_programs(0), items, begin, end, heads, n_keys, form
        )
        peak, total, acc, keys, values = _attend(
            query, keys, values, cache, first_key, keys_left, next_key, next_left, mma, form
        )
        head = item // form.splits % heads
        _store_part(workspace, peak, total, acc, low, high, begin, heads, item, form.splits)
        counter = workspace.arrived + (low - begin) * heads + head
        arrived = gl.atomic_add(counter, 1, sem="acq_rel")
        next_head = next_item // form.splits % heads
        query = queries_of(
            q, cache.k_scale, next_low, next_high, n_tokens, heads, next_head, next_row, mma, form
        )
        if arrived == form.splits - 1:
            v_scale = cache.v_scale + row * 64
            sum_of_splits(workspace, out, v_scale, begin, low, high, heads, head, 1, form, narrow)
            gl.store(counter, 0)
        item, low, high, row = next_item, next_low, next_high, next_row
        first_key, keys_left = next_key, next_left
