"""Choose the next beams of a search on the device; `search` is the reference implementation.

The program of a search's leader handles the whole search. The rows of a search are adjacent, both
in the state and among the picks. The program reads the values that it overwrites before a barrier,
and writes after it.
"""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

import triton
import triton.language as tl

from serve.native.rules.fields import SUMS, WIDEST, RowPointers, Scan
from serve.native.rules.phrases import MARGIN
from serve.native.rules.phrases_kernel import Tables, likeliest_of_beams, steps

_MARGIN = tl.constexpr(MARGIN)


@triton.jit
def sum_mass(peaks, masses, axis: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Combine tiles; return their highest logit and the log of their summed exponentials.

    Both are -inf if no tile has an allowed token.
    """
    peak = tl.max(peaks, axis, keep_dims=True)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(masses * tl.exp(peaks - shift), axis, keep_dims=True)
    return tl.max(peak, axis), tl.max(shift + tl.log(mass), axis)


@triton.jit
def _candidate_sums(
    state: RowPointers, row, pick, width, scan: Scan, config: tl.constexpr
) -> tl.tuple:
    """Add each beam's log-probability to its candidates' log-probabilities.

    Returns:
        The sums (WIDEST, tiles_padded * keep), -inf = no candidate, and the lowest logit of each
        beam that phrases may boost (WIDEST,).
    """
    tiles: tl.constexpr = config.tiles
    keep: tl.constexpr = config.keep
    none = float("-inf")
    beam = tl.arange(0, WIDEST)
    tile = tl.arange(0, config.tiles_padded)
    mask = (beam < width)[:, None] & (tile < tiles)[None, :]
    tile_sums = scan.sums + ((pick + beam)[:, None] * tiles + tile[None, :]) * SUMS
    peak = tl.load(tile_sums, mask=mask, other=none)
    mass = tl.load(tile_sums + 1, mask=mask, other=0.0)
    is_text = (tile < config.text_tiles)[None, :]
    text_peak, text_mass = sum_mass(tl.where(is_text, peak, none), tl.where(is_text, mass, 0.0), 1)
    _, timestamp_mass = sum_mass(tl.where(is_text, none, peak), tl.where(is_text, 0.0, mass), 1)
    has_timestamps = tl.load(state.timestamps + row + beam, mask=beam < width, other=0) != 0
    must_be_timestamp = has_timestamps & (timestamp_mass > text_peak)
    max_mass = tl.maximum(text_mass, timestamp_mass)
    shift = tl.where(max_mass == none, 0.0, max_mass)
    total_mass = shift + tl.log(tl.exp(text_mass - shift) + tl.exp(timestamp_mass - shift))
    total_mass = tl.where(max_mass == none, 0.0, total_mass)
    total_mass = tl.where(must_be_timestamp, timestamp_mass, total_mass)
    beam_sum = tl.load(state.logprob_sum + row + beam, mask=beam < width, other=none)

    index = tl.arange(0, config.tiles_padded * keep)
    candidate_tile, rank = index // keep, index % keep
    n_kept = tl.where(tl.load(state.root + row) >= 0, keep, 2 * width)
    mask = (beam < width)[:, None] & ((candidate_tile < tiles) & (rank < n_kept))[None, :]
    is_timestamp = (candidate_tile >= config.text_tiles)[None, :]
    mask = mask & ((must_be_timestamp == 0)[:, None] | is_timestamp)
    scan_indices = ((pick + beam) * tiles * keep)[:, None] + index[None, :]
    # Declared as not contiguous: the lanes of a warp then rank different beams in parallel.
    logit = tl.load(tl.max_contiguous(scan.tops + scan_indices, (1, 1)), mask=mask, other=none)
    alive = (logit > none) & (beam_sum > none)[:, None]
    sums = tl.where(alive, (logit - total_mass[:, None]) + beam_sum[:, None], none)
    return sums, tl.max(logit, 1) - _MARGIN


@triton.jit
def _keep_best(
    state: RowPointers,
    row,
    position,
    hypothesis,
    parent,
    token,
    sums,
    ends,
    boost,
    n_ctx: int,
    config: tl.constexpr,
) -> tl.tensor:
    """Compute `search._keep_best`; return the number of hypotheses so far."""
    keep: tl.constexpr = config.keep
    none = float("-inf")
    slot = tl.arange(0, keep)
    length = position + 1 - tl.load(state.prompt_len + row) + tl.where(ends, 0, 1)
    penalty = tl.load(state.length_penalty + row).to(tl.float64)
    base = tl.where(penalty == 0, 1, length).to(tl.float64)  # 0 ** 0 is 1
    score = sums / tl.exp(penalty * tl.log(base)).to(tl.float32)
    ranked = tl.where(hypothesis, score, none)
    best, best_slot = tl.max(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
    first_slot = tl.min(tl.where(hypothesis, slot, keep), 0)
    best_slot = tl.where(best > none, best_slot, first_slot)  # an empty hypothesis has -inf
    n_before = tl.load(state.ended + row)
    any_hypothesis = first_slot < keep
    if any_hypothesis & ((best > tl.load(state.best_score + row)) | (n_before == 0)):
        winner = slot == best_slot
        column = tl.arange(0, config.ctx_padded)
        from_row = row + tl.sum(tl.where(winner, parent, 0), 0)
        text = tl.load(state.tokens + from_row * n_ctx + column, mask=column <= position)
        chosen = tl.sum(tl.where(winner, token, 0), 0)
        text = tl.where(column == position + 1, chosen, text)
        tl.store(state.best_tokens + row * n_ctx + column, text, mask=column <= position + 1)
        tl.store(state.best_length + row, tl.sum(tl.where(winner, length, 0), 0))
        tl.store(state.best_score + row, tl.sum(tl.where(winner, score, 0.0), 0))
        tl.store(state.best_logprob_sum + row, tl.sum(tl.where(winner, sums - boost, 0.0), 0))
        tl.store(state.best_is_ended + row, tl.sum(tl.where(winner & ends, 1, 0), 0).to(tl.uint8))
    return n_before + tl.sum(tl.where(hypothesis, 1, 0), 0)


@triton.jit
def _continue_beams(
    state: RowPointers,
    row,
    position,
    width,
    finished,
    parent,
    token,
    sums,
    boost,
    node,
    n_ctx: int,
    config: tl.constexpr,
) -> None:
    """Continue each beam from its parent with its token; all tensors are (WIDEST,)."""
    beam = tl.arange(0, WIDEST)
    mask = beam < width
    column = tl.arange(0, config.ctx_padded)[None, :]
    moves = (mask & (parent != beam))[:, None] & (column <= position)
    old = (row + parent)[:, None] * n_ctx + column
    text = tl.load(state.tokens + old, mask=moves)
    sources = tl.load(state.source + old, mask=moves)
    last_timestamp = tl.load(state.last_timestamp + row + parent, mask=mask)
    tl.debug_barrier()
    new = (row + beam)[:, None] * n_ctx + column
    tl.store(state.tokens + new, text, mask=moves)
    tl.store(state.source + new, sources, mask=moves)
    next_token = (row + beam) * n_ctx + position + 1
    tl.store(state.tokens + next_token, token, mask=mask)
    tl.store(state.source + next_token, (row + beam).to(tl.int32), mask=mask)
    last_timestamp = tl.where(token >= config.timestamp_begin, token, last_timestamp)
    tl.store(state.last_timestamp + row + beam, last_timestamp, mask=mask)
    tl.store(state.logprob_sum + row + beam, sums, mask=mask)
    boosted = mask & (tl.load(state.root + row) >= 0)
    tl.store(state.boost + row + beam, boost, mask=boosted)
    tl.store(state.node + row + beam, node, mask=boosted)
    tl.store(state.position + row + beam, position + 1, mask=mask)
    tl.store(state.finished + row + beam, finished.to(tl.uint8), mask=mask)


@triton.jit
def _rank(remaining, width, keep: tl.constexpr) -> tl.tuple:
    """Return (sum, beam, column), each (keep,), of the best 2 * width of (WIDEST, n) in order."""
    none = float("-inf")
    beam = tl.arange(0, WIDEST)
    column = tl.arange(0, remaining.shape[1])
    slot = tl.arange(0, keep)
    sums = tl.full((keep,), none, tl.float32)
    parent = tl.zeros((keep,), tl.int32)
    columns = tl.zeros((keep,), tl.int32)
    for rank in range(0, 2 * width):
        peaks, peak_columns = tl.max(
            remaining, 1, return_indices=True, return_indices_tie_break_left=True
        )
        peak, best = tl.max(peaks, 0, return_indices=True, return_indices_tie_break_left=True)
        best_column = tl.sum(tl.where(beam == best, peak_columns, 0), 0)
        sums = tl.where(slot == rank, peak, sums)
        parent = tl.where(slot == rank, best, parent)
        columns = tl.where(slot == rank, best_column, columns)
        is_best = (beam == best)[:, None] & (column == best_column)[None, :]
        remaining = tl.where(is_best, none, remaining)
    return sums, parent, columns


@triton.jit
def _best_candidates(
    state: RowPointers, row, pick, width, scan: Scan, tables: Tables, config: tl.constexpr
) -> tl.tuple:
    """Return (sum, beam, token, margin), each (keep,), of the best 2 * width candidates in order.

    `margin` is the candidate's logit minus the lowest logit that phrases may boost.
    """
    keep: tl.constexpr = config.keep
    beam = tl.arange(0, WIDEST)
    candidates, min_logit = _candidate_sums(state, row, pick, width, scan, config)
    margin = tl.zeros((keep,), tl.float32)
    if tl.load(state.root + row) >= 0:
        boosted, scan_indices = likeliest_of_beams(
            tables, state, row, pick, width, candidates, min_logit, scan, config
        )
        sums, parent, column = _rank(boosted, width, keep)
        is_parent = parent[:, None] == beam[None, :]
        columns = tl.arange(0, keep)[None, None, :]
        is_chosen = is_parent[:, :, None] & (column[:, None, None] == columns)
        scan_index = tl.sum(tl.sum(tl.where(is_chosen, scan_indices[None, :, :], 0), 2), 1)
        parent_min = tl.sum(tl.where(is_parent, min_logit[None, :], 0.0), 1)
        margin = tl.load(scan.tops + scan_index) - parent_min
    else:
        sums, parent, column = _rank(candidates, width, keep)
        scan_index = (pick + parent) * config.tiles * keep + column
    token = tl.load(scan.top_ids + scan_index).to(tl.int64)
    return sums, parent.to(tl.int64), token, margin


@triton.jit
def extend_search(
    state: RowPointers,
    row,
    limit,
    pick,
    width,
    scan: Scan,
    tables: Tables,
    n_ctx: int,
    config: tl.constexpr,
) -> None:
    """Compute `search.extend` for the search of one leader, `row`."""
    sums, parent, token, margin = _best_candidates(state, row, pick, width, scan, tables, config)
    slot = tl.arange(0, config.keep)
    position = tl.load(state.position + row)
    last = position + 2 >= limit
    alive = sums > float("-inf")
    parent, token = tl.where(alive, parent, 0), tl.where(alive, token, 0)
    ends = alive & (token == config.eot)
    root = tl.load(state.root + row)
    mask = (slot < 2 * width) & (root >= 0)
    node = tl.load(state.node + row + parent, mask=mask, other=0)
    boost = tl.load(state.boost + row + parent, mask=mask, other=0.0)
    if root >= 0:
        node, gain = steps(tables, root, node, token, margin >= 0)
        node, boost = tl.where(alive, node, root), tl.where(alive, boost + gain, 0.0)
    hypothesis = (slot < width) & tl.where(last, alive, ends)
    ended = _keep_best(
        state, row, position, hypothesis, parent, token, sums, ends, boost, n_ctx, config
    )
    tl.store(state.ended + row, ended)
    best_ends = tl.sum(tl.where((slot == 0) & ends, 1, 0), 0) > 0
    enough = ended >= tl.load(state.needed + row)
    enough = tl.where(tl.load(state.length_penalty + row) == 0, best_ends, enough)

    goes_on = (ends == 0) & (slot < 2 * width)
    new_beam = tl.cumsum(goes_on.to(tl.int32), 0) - 1  # the beam that each candidate becomes
    becomes_beam = goes_on[None, :] & (new_beam[None, :] == tl.arange(0, WIDEST)[:, None])
    parent = tl.sum(tl.where(becomes_beam, parent[None, :], 0), 1)
    token = tl.sum(tl.where(becomes_beam, token[None, :], 0), 1)
    sums = tl.sum(tl.where(becomes_beam, sums[None, :], 0.0), 1)
    boost = tl.sum(tl.where(becomes_beam, boost[None, :], 0.0), 1)
    node = tl.sum(tl.where(becomes_beam, node[None, :], 0), 1)
    finished = last | enough
    _continue_beams(
        state, row, position, width, finished, parent, token, sums, boost, node, n_ctx, config
    )
