"""One search's next beams, on the device: `search.extend`, by the program of the search's leader.

Its rows stand side by side, in the pool as among the picks. What the program overwrites it has read
before, with a barrier between the two.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from serve.native.rules.fields import Fields
from serve.native.rules.phrases import MARGIN
from serve.native.rules.phrases_kernel import Tables, boost_beams, steps

_MARGIN = tl.constexpr(MARGIN)


@triton.jit
def total(peaks: tl.tensor, masses: tl.tensor, axis: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(peak, log of the summed mass) of several tiles; (-inf, -inf) of nothing."""
    peak = tl.max(peaks, axis, keep_dims=True)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(masses * tl.exp(peaks - base), axis, keep_dims=True)
    return tl.max(peak, axis), tl.max(base + tl.log(mass), axis)


@triton.jit
def _sums_of(
    state: Fields, row: tl.tensor, pick: tl.tensor, width: tl.tensor, sums: tl.tensor,
    tops: tl.tensor, tiles: tl.constexpr, text_tiles: tl.constexpr, tiles_padded: tl.constexpr,
    n_sums: tl.constexpr, keep: tl.constexpr, beams_padded: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Summed log-probability of each beam with each candidate of its tiles, -inf where none is.

    Returns:
        That, (beams_padded, tiles_padded * keep), and the lowest logit that phrases may boost,
        (beams_padded,).
    """
    none = float("-inf")
    beam = tl.arange(0, beams_padded)
    tile = tl.arange(0, tiles_padded)
    there = (beam < width)[:, None] & (tile < tiles)[None, :]
    left = sums + ((pick + beam)[:, None] * tiles + tile[None, :]) * n_sums
    peak = tl.load(left, mask=there, other=none)
    mass = tl.load(left + 1, mask=there, other=0.0)
    text = (tile < text_tiles)[None, :]
    text_peak, text_mass = total(tl.where(text, peak, none), tl.where(text, mass, 0.0), 1)
    _, time_mass = total(tl.where(text, none, peak), tl.where(text, 0.0, mass), 1)
    timed = tl.load(state.timestamps + row + beam, mask=beam < width, other=0) != 0
    must = timed & (time_mass > text_peak)
    most = tl.maximum(text_mass, time_mass)
    base = tl.where(most == none, 0.0, most)
    everything = base + tl.log(tl.exp(text_mass - base) + tl.exp(time_mass - base))
    everything = tl.where(must, time_mass, tl.where(most == none, 0.0, everything))
    sum = tl.load(state.logprob_sum + row + beam, mask=beam < width, other=none)

    which = tl.arange(0, tiles_padded * keep)
    from_tile, rank = which // keep, which % keep
    kept = tl.where(tl.load(state.root + row) >= 0, keep, 2 * width)
    there = (beam < width)[:, None] & ((from_tile < tiles) & (rank < kept))[None, :]
    there = there & ((must == 0)[:, None] | (from_tile >= text_tiles)[None, :])
    places = ((pick + beam) * tiles * keep)[:, None] + which[None, :]
    value = tl.load(tops + places, mask=there, other=none)
    alive = (value > none) & (sum > none)[:, None]
    sums = tl.where(alive, (value - everything[:, None]) + sum[:, None], none)
    return sums, tl.max(value, 1) - _MARGIN


@triton.jit
def _keep_best(
    state: Fields, row: tl.tensor, at: tl.tensor, hypothesis: tl.tensor, parent: tl.tensor,
    token: tl.tensor, sum: tl.tensor, ends: tl.tensor, boost: tl.tensor, n_ctx: int,
    ctx_padded: tl.constexpr, keep: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """See `search._keep_best`; returns how many hypotheses there are now."""
    none = float("-inf")
    lane = tl.arange(0, keep)
    length = at + 1 - tl.load(state.prompt_len + row) + tl.where(ends, 0, 1)
    penalty = tl.load(state.length_penalty + row).to(tl.float64)
    base = tl.where(penalty == 0, 1, length).to(tl.float64)  # 0 ** 0 is 1
    score = sum / tl.exp(penalty * tl.log(base)).to(tl.float32)
    ranked = tl.where(hypothesis, score, none)
    best, which = tl.max(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
    first = tl.min(tl.where(hypothesis, lane, keep), 0)
    which = tl.where(best > none, which, first)  # an empty one has -inf
    before = tl.load(state.ended + row)
    some = first < keep
    if some & ((best > tl.load(state.best_score + row)) | (before == 0)):
        one = lane == which
        column = tl.arange(0, ctx_padded)
        from_row = row + tl.sum(tl.where(one, parent, 0), 0)
        text = tl.load(state.tokens + from_row * n_ctx + column, mask=column <= at)
        chosen = tl.sum(tl.where(one, token, 0), 0)
        text = tl.where(column == at + 1, chosen, text)
        tl.store(state.best_tokens + row * n_ctx + column, text, mask=column <= at + 1)
        tl.store(state.best_length + row, tl.sum(tl.where(one, length, 0), 0))
        tl.store(state.best_score + row, tl.sum(tl.where(one, score, 0.0), 0))
        tl.store(state.best_logprob_sum + row, tl.sum(tl.where(one, sum - boost, 0.0), 0))
        tl.store(state.best_is_ended + row, tl.sum(tl.where(one & ends, 1, 0), 0).to(tl.uint8))
    return before + tl.sum(tl.where(hypothesis, 1, 0), 0)


@triton.jit
def _go_on(
    state: Fields, row: tl.tensor, at: tl.tensor, width: tl.tensor, done: tl.tensor,
    parent: tl.tensor, token: tl.tensor, sum: tl.tensor, boost: tl.tensor, node: tl.tensor,
    n_ctx: int, timestamp_begin: tl.constexpr, ctx_padded: tl.constexpr, beams_padded: tl.constexpr,
) -> None:  # fmt: skip
    """Let each beam go on from its parent with its token; all (beams_padded,)."""
    beam = tl.arange(0, beams_padded)
    there = beam < width
    column = tl.arange(0, ctx_padded)[None, :]
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
    stamp = tl.where(token >= timestamp_begin, token, stamp)
    tl.store(state.last_timestamp + row + beam, stamp, mask=there)
    tl.store(state.logprob_sum + row + beam, sum, mask=there)
    tl.store(state.boost + row + beam, boost, mask=there)
    tl.store(state.node + row + beam, node, mask=there)
    tl.store(state.position + row + beam, at + 1, mask=there)
    tl.store(state.finished + row + beam, done.to(tl.uint8), mask=there)


@triton.jit
def settle_search(
    state: Fields, book: Tables, row: tl.tensor, limit: tl.tensor, pick: tl.tensor,
    width: tl.tensor, sums: tl.tensor, tops: tl.tensor, top_ids: tl.tensor, n_ctx: int,
    eot: tl.constexpr, timestamp_begin: tl.constexpr, tiles: tl.constexpr, text_tiles: tl.constexpr,
    tiles_padded: tl.constexpr, n_sums: tl.constexpr, keep: tl.constexpr,
    beams_padded: tl.constexpr, ctx_padded: tl.constexpr,
) -> None:  # fmt: skip
    """See `search.extend`; what is of one row is the leader's, `tops` as the scan left them."""
    none = float("-inf")
    rest, lowest = _sums_of(
        state, row, pick, width, sums, tops, tiles, text_tiles, tiles_padded, n_sums, keep,
        beams_padded,
    )  # fmt: skip
    root = tl.load(state.root + row)
    if root >= 0:
        rest = boost_beams(
            book, state, row, width, rest, lowest, tops + pick * tiles * keep,
            top_ids + pick * tiles * keep, tiles * keep, tiles_padded * keep, keep, beams_padded,
        )  # fmt: skip
    beam = tl.arange(0, beams_padded)
    which = tl.arange(0, tiles_padded * keep)
    lane = tl.arange(0, keep)
    sum = tl.full((keep,), none, tl.float32)
    parent = tl.zeros((keep,), tl.int64)
    token = tl.zeros((keep,), tl.int64)
    above = tl.full((keep,), none, tl.float32)  # the lowest logit that phrases may boost
    for rank in range(0, 2 * width):
        peaks, places = tl.max(
            rest, 1, return_indices=True, return_indices_tie_break_left=True
        )  # fmt: skip
        peak, best = tl.max(peaks, 0, return_indices=True, return_indices_tie_break_left=True)
        place = tl.sum(tl.where(beam == best, places, 0), 0)
        found = tl.load(top_ids + (pick + best) * tiles * keep + place)
        logit = tl.load(tops + (pick + best) * tiles * keep + place)
        least = tl.sum(tl.where(beam == best, lowest, 0.0), 0)
        above = tl.where(lane == rank, logit - least, above)
        sum = tl.where(lane == rank, peak, sum)
        parent = tl.where(lane == rank, best, parent)
        token = tl.where(lane == rank, found, token)
        taken = (beam == best)[:, None] & (which == place)[None, :]
        rest = tl.where(taken, none, rest)

    at = tl.load(state.position + row)
    last = at + 2 >= limit
    alive = sum > none
    parent, token = tl.where(alive, parent, 0), tl.where(alive, token, 0)
    ends = alive & (token == eot)
    inside = lane < 2 * width
    node = tl.load(state.node + row + parent, mask=inside, other=0)
    boost = tl.load(state.boost + row + parent, mask=inside, other=0.0)
    if root >= 0:
        node, gain = steps(book, root, node, token, above >= 0)
        node, boost = tl.where(alive, node, root), tl.where(alive, boost + gain, 0.0)
    hypothesis = (lane < width) & tl.where(last, alive, ends)
    ended = _keep_best(
        state, row, at, hypothesis, parent, token, sum, ends, boost, n_ctx, ctx_padded, keep
    )
    tl.store(state.ended + row, ended)
    first_ends = tl.sum(tl.where((lane == 0) & ends, 1, 0), 0) > 0
    enough = ended >= tl.load(state.needed + row)
    enough = tl.where(tl.load(state.length_penalty + row) == 0, first_ends, enough)

    goes_on = (ends == 0) & (lane < 2 * width)
    new = tl.cumsum(goes_on.to(tl.int32), 0) - 1  # which beam each becomes
    mine = goes_on[None, :] & (new[None, :] == beam[:, None])
    _go_on(
        state, row, at, width, last | enough, tl.sum(tl.where(mine, parent[None, :], 0), 1),
        tl.sum(tl.where(mine, token[None, :], 0), 1),
        tl.sum(tl.where(mine, sum[None, :], 0.0), 1),
        tl.sum(tl.where(mine, boost[None, :], 0.0), 1),
        tl.sum(tl.where(mine, node[None, :], 0), 1), n_ctx, timestamp_begin, ctx_padded,
        beams_padded,
    )  # fmt: skip
