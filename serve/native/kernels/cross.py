"""Compute cross-attention on tensor cores with Gluon kernels.

The keys of a slot and head are cut into splits of 256 keys (FP16: 128), and a split into four runs.
Each run computes a partial softmax. The partial results of a split's runs are added in order. The
program that finishes last adds the results of all splits in order (Flash-Decoding with a fixed
number of splits).

Two kernels return the same bits. If there are many keys to read, `cross_stream_kernel` runs
programs of one warp that iterate over splits and prefetch the next keys. If there are few, or many
tokens share a slot, `cross_kernel` has one warp per run. A token is one of sixteen rows of the
matrix instruction. Rows are independent, so a result does not depend on the other tokens.

No kernel of a step writes the groups of tokens by slot (`SlotGroups`) or the slots' keys and
values. Both kernels read them before the previous kernel ends (`pdl`, see `linear`). Every program
waits for the previous kernel, even a program without work, since the next kernel relies on that.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve.native.kernels.fragments import (
    arange_3d,
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
    INT8_OFFSET,
    RUNS,
    SUBNORMAL_SCALE,
    CrossCache,
    SplitGroups,
    Workspace,
    add_run,
    combine_splits,
    load_group,
    load_queries,
    softmax_weights,
    weighted_values,
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
    config: gl.constexpr,
    rows: gl.constexpr,
) -> None:
    """Compute one split of one group and head with a warp per run.

    Programs along the last grid axis share the group's tiles of 16 tokens.
    """
    mma: gl.constexpr = mma_layout(RUNS)
    run: gl.constexpr = config.run
    splits: gl.constexpr = config.splits
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [RUNS, 1], [1, 0])
    split, group, head = gl.program_id(0), gl.program_id(1) // heads, gl.program_id(1) % heads
    if config.direct:
        slot, low, high = group, group, group + 1
    else:
        slot, low, high = load_group(groups, group, begin, end)
    first_token = low + gl.program_id(2) * 16
    row = slot * heads + head
    keys_left = n_keys - split * (run * RUNS)
    keys_to_load = gl.where(first_token < high, keys_left, 0)
    first_key = row.to(gl.int64) * n_keys + split * (run * RUNS)
    keys = load_run(cache.k, first_key, keys_to_load, keys_layout(RUNS, run, config.int8), "")
    values = load_run(cache.v, first_key, keys_to_load, values_layout(RUNS, run, config.int8), "")
    if config.pdl:  # safe: the step's first kernel waited for the kernel that wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    for start in range(first_token, high, gl.num_programs(2) * 16):
        query = load_queries(q, cache.k_scale, start, high, n_tokens, heads, head, row, mma, config)
        no_scores = gl.zeros([RUNS, 16, run], gl.float32, mma)
        score = mma_v2(query, keys_operand(keys, mma), no_scores)
        weights, peaks = softmax_weights(top_rows(score, rows), keys_left, config.int8)
        accs, totals = weighted_values(weights, values, mma, rows)
        peak, total, acc = _add_runs(peaks, totals, accs, layout)
        if config.int8:
            acc = acc * SUBNORMAL_SCALE - total[:, None] * INT8_OFFSET
        token = start + gl.arange(0, rows, gl.SliceLayout(1, layout))
        offsets = ((token - begin) * heads + head) * splits + split
        d = gl.arange(0, 64, gl.SliceLayout(0, layout))
        mask = token < high
        gl.store(workspace.partial + offsets[:, None] * 64 + d[None, :], acc, mask=mask[:, None])
        gl.store(workspace.stats + offsets * 2, peak, mask=mask)
        gl.store(workspace.stats + offsets * 2 + 1, total, mask=mask)
        barrier()  # all threads store their part before the program counts as finished
        counter = workspace.arrived + (start - begin) * heads + head
        if gl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            last, v_scale = gl.minimum(start + 16, high), cache.v_scale + row * 64
            combine_splits(
                workspace, out, v_scale, begin, start, last, heads, head, rows, config, layout
            )
            gl.store(counter, 0)


@gluon.jit
def _add_runs(peaks, totals, accs, layout: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Add the results of all warps' runs in shared memory.

    Returns:
        The highest score (rows,), the sum of softmax numerators (rows,), and the weighted sum of
        values (rows, 64).
    """
    rows: gl.constexpr = peaks.shape[1]
    n_rows: gl.constexpr = RUNS * rows
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    peaks = gl.allocate_shared_memory(gl.float32, [n_rows], flat, gl.reshape(peaks, [n_rows]))
    totals = gl.allocate_shared_memory(gl.float32, [n_rows], flat, gl.reshape(totals, [n_rows]))
    accs = gl.reshape(accs, [n_rows, 64])
    accs = gl.allocate_shared_memory(gl.float32, [n_rows, 64], swizzled, accs)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    peak = gl.full([rows], -1e35, gl.float32, row_layout)
    total = gl.zeros([rows], gl.float32, row_layout)
    acc = gl.zeros([rows, 64], gl.float32, layout)
    for run in gl.static_range(RUNS):
        new_peak = peaks.slice(run * rows, rows).load(row_layout)
        new_total = totals.slice(run * rows, rows).load(row_layout)
        new_acc = accs.slice(run * rows, rows).load(layout)
        peak, total, acc = add_run(peak, total, acc, new_peak, new_total, new_acc)
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
    config: gl.constexpr,
) -> tuple[int, int, int, int, int, int]:
    """Find the next split with tokens that this program computes, from `item` on.

    Returns:
        The item, its tokens [low, high), the row of its slot and head, the row of its first key,
        and the number of keys from there on. If no split is left, the last number is 0 and
        low = high.
    """
    splits: gl.constexpr = config.splits
    keys_per_split: gl.constexpr = config.run * RUNS
    slot, low, high = item // splits // heads, item // splits // heads, 0
    if config.direct:
        high = low + gl.where(item < items, 1, 0)
    else:
        low = 0
        while (item < items) & (low >= high):
            slot, low, high = load_group(groups, item // splits // heads, begin, end)
            item = gl.where(low < high, item, item + gl.num_programs(0))
        high = gl.where(item < items, high, low)
    row = slot * heads + item // splits % heads
    keys_left = gl.where(item < items, n_keys - item % splits * keys_per_split, 0)
    first_key = row.to(gl.int64) * n_keys + item % splits * keys_per_split
    return item, low, high, row, first_key, keys_left


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
    config: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Attend to the keys of one split, and load the first run of the next split.

    The next run's keys and values are loaded as soon as their registers are free.

    Returns:
        The split's highest scores, sums of softmax numerators and weighted sums of values; then
        the keys and values of the next split's first run.
    """
    layout: gl.constexpr = rows_layout(1, 8, 64)
    row_layout: gl.constexpr = gl.SliceLayout(2, layout)
    run: gl.constexpr = config.run
    k_layout: gl.constexpr = keys_layout(1, run, config.int8)
    v_layout: gl.constexpr = values_layout(1, run, config.int8)
    peak = gl.full([1, 8], -1e35, gl.float32, row_layout)
    total = gl.zeros([1, 8], gl.float32, row_layout)
    acc = gl.zeros([1, 8, 64], gl.float32, layout)
    for index in range(RUNS):
        score = mma_v2(query, keys_operand(keys, mma), gl.zeros([1, 16, run], gl.float32, mma))
        last = index + 1 == RUNS
        next_run = gl.where(last, next_key, first_key + (index + 1) * run)
        next_run_keys = gl.where(last, next_left, keys_left - (index + 1) * run)
        keys = load_run(cache.k, next_run, next_run_keys, k_layout, "evict_first")
        run_left = keys_left - index * run
        weights, new_peak = softmax_weights(top_rows(score, 8), run_left, config.int8)
        new_acc, new_total = weighted_values(weights, values, mma, 8)
        values = load_run(cache.v, next_run, next_run_keys, v_layout, "evict_first")
        new_peak = gl.convert_layout(new_peak, row_layout, assert_trivial=True)
        new_total = gl.convert_layout(new_total, row_layout, assert_trivial=True)
        peak, total, acc = add_run(peak, total, acc, new_peak, new_total, new_acc)
    if config.int8:
        acc = acc * SUBNORMAL_SCALE - gl.expand_dims(total, 2) * INT8_OFFSET
    return peak, total, acc, keys, values


@gluon.jit
def _store_split(
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
    """Store a split's peaks and totals, (1, rows), and values, (1, rows, 64), in the workspace."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = acc.shape[1]
    split_offset = item // splits % heads * splits + item % splits
    token = low + arange_3d(rows, 1, layout)
    offsets = (token - begin) * heads * splits + split_offset
    gl.store(workspace.partial + offsets * 64 + arange_3d(64, 2, layout), acc, mask=token < high)
    token = low + gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, peak.type.layout)), 0)
    offsets = (token - begin) * heads * splits + split_offset
    gl.store(workspace.stats + offsets * 2, peak, mask=token < high)
    gl.store(workspace.stats + offsets * 2 + 1, total, mask=token < high)
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
    config: gl.constexpr,
) -> None:
    """Compute all splits of all groups and heads: `items` splits, with at most 8 tokens a group.

    A program is one warp. It computes every `num_programs`-th split.
    """
    mma: gl.constexpr = mma_layout(1)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    item, low, high, row, first_key, keys_left = _next_split(
        groups, gl.program_id(0), items, begin, end, heads, n_keys, config
    )
    k_layout: gl.constexpr = keys_layout(1, config.run, config.int8)
    keys = load_run(cache.k, first_key, keys_left, k_layout, "evict_first")
    v_layout: gl.constexpr = values_layout(1, config.run, config.int8)
    values = load_run(cache.v, first_key, keys_left, v_layout, "evict_first")
    if config.pdl:  # safe: the step's first kernel waited for the kernel that wrote the caches
        gdc_launch_dependents()
        gdc_wait()
    head = item // config.splits % heads
    query = load_queries(q, cache.k_scale, low, high, n_tokens, heads, head, row, mma, config)
    while item < items:
        next_item, next_low, next_high, next_row, next_key, next_left = _next_split(
            groups, item + gl.num_programs(0), items, begin, end, heads, n_keys, config
        )
        peak, total, acc, keys, values = _attend(
            query, keys, values, cache, first_key, keys_left, next_key, next_left, mma, config
        )
        head = item // config.splits % heads
        _store_split(workspace, peak, total, acc, low, high, begin, heads, item, config.splits)
        counter = workspace.arrived + (low - begin) * heads + head
        arrived = gl.atomic_add(counter, 1, sem="acq_rel")
        next_head = next_item // config.splits % heads
        query = load_queries(
            q, cache.k_scale, next_low, next_high, n_tokens, heads, next_head, next_row, mma, config
        )
        if arrived == config.splits - 1:
            v_scale = cache.v_scale + row * 64
            combine_splits(
                workspace, out, v_scale, begin, low, high, heads, head, 1, config, layout
            )
            gl.store(counter, 0)
        item, low, high, row = next_item, next_low, next_high, next_row
        first_key, keys_left = next_key, next_left
