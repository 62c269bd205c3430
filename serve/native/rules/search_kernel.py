"""Choose the next beams of a search on the device; `search` is the reference implementation.

The program of a search's leader handles the whole search. Its rows are adjacent, both in the state
and among the picks. The program reads all that it overwrites before a barrier, and writes after it.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import triton
import triton.language as tl

from serve.native.rules.fields import SUMS, WIDEST, RowPointers, Scan
from serve.native.rules.phrases import MARGIN
from serve.native.rules.phrases_kernel import Tables, likeliest_of_beams, steps

_MARGIN = tl.constexpr(MARGIN)


@triton.jit
def total(peaks, masses, axis: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (peak, log of the summed mass) over several tiles; (-inf, -inf) if all are empty."""
    peak = tl.max(peaks, axis, keep_dims=True)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(masses * tl.exp(peaks - base), axis, keep_dims=True)
    return tl.max(peak, axis), tl.max(base + tl.log(mass), axis)


@triton.jit
def _sums_of(state: RowPointers, row, pick, width, scan: Scan, form: tl.constexpr) -> tl.tuple:
    """Add each beam's log-probability to its candidates' log-probabilities.

    Returns:
        The sums (WIDEST, tiles_padded * keep), -inf = no candidate, and the lowest logit of each
        beam that phrases may boost (WIDEST,).
    """
    tiles: tl.constexpr = form.tiles
    keep: tl.constexpr = form.keep
    none = float("-inf")
    beam = tl.arange(0, WIDEST)
    tile = tl.arange(0, form.tiles_padded)
    there = (beam < width)[:, None] & (tile < tiles)[None, :]
    left = scan.sums + ((pick + beam)[:, None] * tiles + tile[None, :]) * SUMS
    peak = tl.load(left, mask=there, other=none)
    mass = tl.load(left + 1, mask=there, other=0.0)
    text = (tile < form.text_tiles)[None, :]
    text_peak, text_mass = total(tl.where(text, peak, none), tl.where(text, mass, 0.0), 1)
    _, time_mass = total(tl.where(text, none, peak), tl.where(text, 0.0, mass), 1)
    timed = tl.load(state.timestamps + row + beam, mask=beam < width, other=0) != 0
    must = timed & (time_mass > text_peak)
    most = tl.maximum(text_mass, time_mass)
    base = tl.where(most == none, 0.0, most)
    everything = base + tl.log(tl.exp(text_mass - base) + tl.exp(time_mass - base))
    everything = tl.where(must, time_mass, tl.where(most == none, 0.0, everything))
    sum = tl.load(state.logprob_sum + row + beam, mask=beam < width, other=none)

    which = tl.arange(0, form.tiles_padded * keep)
    from_tile, rank = which // keep, which % keep
    kept = tl.where(tl.load(state.root + row) >= 0, keep, 2 * width)
    there = (beam < width)[:, None] & ((from_tile < tiles) & (rank < kept))[None, :]
    there = there & ((must == 0)[:, None] | (from_tile >= form.text_tiles)[None, :])
    places = ((pick + beam) * tiles * keep)[:, None] + which[None, :]
    # Declared as not contiguous, so that a warp's lanes hold different beams, ranked in parallel.
    value = tl.load(tl.max_contiguous(scan.tops + places, (1, 1)), mask=there, other=none)
    alive = (value > none) & (sum > none)[:, None]
    sums = tl.where(alive, (value - everything[:, None]) + sum[:, None], none)
    return sums, tl.max(value, 1) - _MARGIN


@triton.jit
def _keep_best(
    state: RowPointers,
    row,
    at,
    hypothesis,
    parent,
    token,
    sum,
    ends,
    boost,
    n_ctx: int,
    form: tl.constexpr,
) -> tl.tensor:
    """Compute `search._keep_best`; return the number of hypotheses so far."""
    keep: tl.constexpr = form.keep
    none = float("-inf")
    lane = tl.arange(0, keep)
    length = at + 1 - tl.load(state.prompt_len + row) + tl.where(ends, 0, 1)
    penalty = tl.load(state.length_penalty + row).to(tl.float64)
    base = tl.where(penalty == 0, 1, length).to(tl.float64)  # 0 ** 0 is 1
    score = sum / tl.exp(penalty * tl.log(base)).to(tl.float32)
    ranked = tl.where(hypothesis, score, none)
    best, which = tl.max(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.min(tl.where(hypothesis, lane, keep), 0)
    which = tl.where(best > none, which, first)  # an empty hypothesis has -inf
    before = tl.load(state.ended + row)
    some = first < keep
    if some & ((best > tl.load(state.best_score + row)) | (before == 0)):
        winner = lane == which
        column = tl.arange(0, form.ctx_padded)
        from_row = row + tl.sum(tl.where(winner, parent, 0), 0)
        text = tl.load(state.tokens + from_row * n_ctx + column, mask=column <= at)
        chosen = tl.sum(tl.where(winner, token, 0), 0)
        text = tl.where(column == at + 1, chosen, text)
        tl.store(state.best_tokens + row * n_ctx + column, text, mask=column <= at + 1)
        tl.store(state.best_length + row, tl.sum(tl.where(winner, length, 0), 0))
        tl.store(state.best_score + row, tl.sum(tl.where(winner, score, 0.0), 0))
        tl.store(state.best_logprob_sum + row, tl.sum(tl.where(winner, sum - boost, 0.0), 0))
        tl.store(state.best_is_ended + row, tl.sum(tl.where(winner & ends, 1, 0), 0).to(tl.uint8))
    return before + tl.sum(tl.where(hypothesis, 1, 0), 0)


@triton.jit
def _go_on(
    state: RowPointers,
    row,
    at,
    width,
    done,
    parent,
    token,
    sum,
    boost,
    node,
    n_ctx: int,
    form: tl.constexpr,
) -> None:
    """Continue each beam from its parent with its token; all tensors are (WIDEST,)."""
    beam = tl.arange(0, WIDEST)
    there = beam < width
    column = tl.arange(0, form.ctx_padded)[None, :]
    moved = (there & (parent != beam))[:, None] & (column <= at)
    old = (row + parent)[:, None] * n_ctx + column
    text = tl.load(state.tokens + old, mask=moved)
    source = tl.load(state.source + old, mask=moved)
    stamp = tl.load(state.last_timestamp + row + parent, mask=there)
    tl.debug_barrier()
    new = (row + beam)[:, None] * n_ctx + column
    tl.store(state.tokens + new, text, mask=moved)
    tl.store(state.source + new, source, mask=moved)
    follow = (row + beam) * n_ctx + at + 1
    tl.store(state.tokens + follow, token, mask=there)
    tl.store(state.source + follow, (row + beam).to(tl.int32), mask=there)
    stamp = tl.where(token >= form.timestamp_begin, token, stamp)
    tl.store(state.last_timestamp + row + beam, stamp, mask=there)
    tl.store(state.logprob_sum + row + beam, sum, mask=there)
    boosted = there & (tl.load(state.root + row) >= 0)
    tl.store(state.boost + row + beam, boost, mask=boosted)
    tl.store(state.node + row + beam, node, mask=boosted)
    tl.store(state.position + row + beam, at + 1, mask=there)
    tl.store(state.finished + row + beam, done.to(tl.uint8), mask=there)


@triton.jit
def _ranked(rest, width, keep: tl.constexpr) -> tl.tuple:
    """Return (sum, beam, column), each (keep,), of the best 2 * width of (WIDEST, n) in order."""
    none = float("-inf")
    beam = tl.arange(0, WIDEST)
    column = tl.arange(0, rest.shape[1])
    lane = tl.arange(0, keep)
    sum = tl.full((keep,), none, tl.float32)
    parent = tl.zeros((keep,), tl.int32)
    place = tl.zeros((keep,), tl.int32)
    for rank in range(0, 2 * width):
        peaks, places = tl.max(rest, 1, return_indices=True, return_indices_tie_break_left=True)
        peak, best = tl.max(peaks, 0, return_indices=True, return_indices_tie_break_left=True)
        taken = tl.sum(tl.where(beam == best, places, 0), 0)
        sum = tl.where(lane == rank, peak, sum)
        parent = tl.where(lane == rank, best, parent)
        place = tl.where(lane == rank, taken, place)
        rest = tl.where((beam == best)[:, None] & (column == taken)[None, :], none, rest)
    return sum, parent, place


@triton.jit
def _best_of(
    state: RowPointers, row, pick, width, scan: Scan, book: Tables, form: tl.constexpr
) -> tl.tuple:
    """Return (sum, beam, token, near), each (keep,), of the best 2 * width candidates in order.

    `near` is the distance of the logit to the lowest one that phrases may boost.
    """
    keep: tl.constexpr = form.keep
    beam = tl.arange(0, WIDEST)
    rest, lowest = _sums_of(state, row, pick, width, scan, form)
    near = tl.zeros((keep,), tl.float32)
    if tl.load(state.root + row) >= 0:
        few, places = likeliest_of_beams(book, state, row, pick, width, rest, lowest, scan, form)
        sum, parent, column = _ranked(few, width, keep)
        mine = parent[:, None] == beam[None, :]
        here = mine[:, :, None] & (column[:, None, None] == tl.arange(0, keep)[None, None, :])
        place = tl.sum(tl.sum(tl.where(here, places[None, :, :], 0), 2), 1)
        near = tl.load(scan.tops + place) - tl.sum(tl.where(mine, lowest[None, :], 0.0), 1)
    else:
        sum, parent, column = _ranked(rest, width, keep)
        place = (pick + parent) * form.tiles * keep + column
    token = tl.load(scan.top_ids + place).to(tl.int64)
    return sum, parent.to(tl.int64), token, near


@triton.jit
def settle_search(
    state: RowPointers,
    row,
    limit,
    pick,
    width,
    scan: Scan,
    book: Tables,
    n_ctx: int,
    form: tl.constexpr,
) -> None:
    """Compute `search.extend` for the search of one leader, `row`."""
    sum, parent, token, near = _best_of(state, row, pick, width, scan, book, form)
    lane = tl.arange(0, form.keep)
    at = tl.load(state.position + row)
    last = at + 2 >= limit
    alive = sum > float("-inf")
    parent, token = tl.where(alive, parent, 0), tl.where(alive, token, 0)
    ends = alive & (token == form.eot)
    root = tl.load(state.root + row)
    there = (lane < 2 * width) & (root >= 0)
    node = tl.load(state.node + row + parent, mask=there, other=0)
    boost = tl.load(state.boost + row + parent, mask=there, other=0.0)
    if root >= 0:
        node, gain = steps(book, root, node, token, near >= 0)
        node, boost = tl.where(alive, node, root), tl.where(alive, boost + gain, 0.0)
    hypothesis = (lane < width) & tl.where(last, alive, ends)
    ended = _keep_best(state, row, at, hypothesis, parent, token, sum, ends, boost, n_ctx, form)
    tl.store(state.ended + row, ended)
    first_ends = tl.sum(tl.where((lane == 0) & ends, 1, 0), 0) > 0
    enough = ended >= tl.load(state.needed + row)
    enough = tl.where(tl.load(state.length_penalty + row) == 0, first_ends, enough)

    goes_on = (ends == 0) & (lane < 2 * width)
    new = tl.cumsum(goes_on.to(tl.int32), 0) - 1  # the beam that each candidate becomes
    mine = goes_on[None, :] & (new[None, :] == tl.arange(0, WIDEST)[:, None])
    parent = tl.sum(tl.where(mine, parent[None, :], 0), 1)
    token = tl.sum(tl.where(mine, token[None, :], 0), 1)
    sum = tl.sum(tl.where(mine, sum[None, :], 0.0), 1)
    boost = tl.sum(tl.where(mine, boost[None, :], 0.0), 1)
    node = tl.sum(tl.where(mine, node[None, :], 0), 1)
    done = last | enough
    _go_on(state, row, at, width, done, parent, token, sum, boost, node, n_ctx, form)
