"""Beam search in plain torch, as CTranslate2's `src/decoding.cc` does it.

Of each search the 2 * beam likeliest continuations are looked at; of equals that of the lower beam
comes first. Those among the first `beam` that end, at the last step all of
them, are hypotheses; the first `beam` that go on are the next beams.
"""

import math

import torch

from serve.native.rules.phrases import LIKELIEST, MARGIN, Phrasebook, steps
from serve.native.rules.state import NEVER, RowState


def best_tokens(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of each row's `count` highest values, the highest first, of equals the lower id.

    As a stable sort, but only tiles are looked at that hold one of the highest.

    Args:
        values: float32 (m, n).
        count: at most n.

    Returns:
        int64 (m, count).
    """
    n = values.shape[1]
    tile = math.isqrt(n // count) + 1  # as many peaks to sort as values in the tiles
    whole = n // tile * tile
    peaks = [values[:, :whole].view(len(values), -1, tile).amax(-1)]
    if whole < n:
        peaks.append(values[:, whole:].amax(1, keepdim=True))
    tiles = torch.cat(peaks, dim=1).sort(dim=1, descending=True, stable=True).indices[:, :count]
    tiles = tiles.sort(dim=1).values  # so that of equals the lower id comes first
    ids = (tiles[..., None] * tile + torch.arange(tile, device=values.device)).flatten(1)
    kept = values.gather(1, ids.clamp_max(n - 1)).masked_fill(ids >= n, NEVER)
    # Beyond the end there are the highest ids, which are the last of equals.
    return ids.gather(1, kept.sort(dim=1, descending=True, stable=True).indices[:, :count])


def extend(
    state: RowState,
    rows: torch.Tensor,
    logprobs: torch.Tensor,
    eot: int,
    timestamp_begin: int,
    book: Phrasebook | None = None,
) -> None:
    """Choose the next beams of searches of one width, and keep what ended.

    A beam that has no continuation left, or never had one, stays without: token 0, sum -inf.

    Args:
        state: changed at `rows`.
        rows: int64 (searches, beam), each search's leader first; none is finished.
        logprobs: float32 (searches * beam, n_vocab), of what may follow each beam.
        eot, timestamp_begin: token ids.
        book: what boosts some of the rows, if anything does.
    """
    beam = rows.shape[1]
    looked_at = 2 * beam if book is None else LIKELIEST
    ids = best_tokens(logprobs, looked_at)
    values = logprobs.gather(1, ids)
    sums = values + state.logprob_sum[rows.flatten(), None]
    if book is not None:
        near = values >= values[:, :1] - MARGIN
        after = steps(book, state, rows.flatten(), ids, near)
        sums += after.gains
    sums = sums.nan_to_num_(nan=NEVER, neginf=NEVER).view(len(rows), -1)
    ids = ids.view(len(rows), -1)
    order = sums.sort(dim=1, descending=True, stable=True).indices[:, : 2 * beam]
    sums = sums.gather(1, order)
    alive = sums > NEVER
    leader = rows[:, 0]
    parents = torch.where(alive, rows.gather(1, order // looked_at), leader[:, None])
    chosen = torch.where(alive, ids.gather(1, order), 0)
    ends = alive & (chosen == eot)
    boost, node = state.boost[parents], state.node[parents]
    if book is not None:
        gains, nodes = (
            one.view(len(rows), -1).gather(1, order) for one in (after.gains, after.nodes)
        )
        boost = torch.where(alive, boost + gains, 0.0)
        node = torch.where(alive, nodes, state.root[parents].clamp_min(0))

    position = state.position[leader]
    last = position + 2 >= state.limit[leader]
    hypothesis = (ends | (last[:, None] & alive))[:, :beam]
    _keep_best(state, leader, hypothesis, parents, chosen, sums, ends, boost)
    # Without a penalty for length no other can be better than the likeliest that ended.
    enough = (state.ended[leader] >= state.needed[leader]) & (state.length_penalty[leader] != 0)
    done = last | enough | (ends[:, 0] & (state.length_penalty[leader] == 0))

    go_on = ends.long().sort(dim=1, stable=True).indices[:, :beam]  # the first that do not end
    parents, chosen = parents.gather(1, go_on), chosen.gather(1, go_on)
    follow = position[:, None] + 1
    tokens, source = state.tokens[parents], state.source[parents]
    stamp = torch.where(chosen >= timestamp_begin, chosen, state.last_timestamp[parents])
    state.tokens[rows] = tokens
    state.tokens[rows, follow] = chosen
    state.source[rows] = source
    state.source[rows, follow] = rows.int()
    state.last_timestamp[rows] = stamp
    state.logprob_sum[rows] = sums.gather(1, go_on)
    state.boost[rows] = boost.gather(1, go_on)
    state.node[rows] = node.gather(1, go_on)
    state.position[rows] = follow.expand_as(rows)
    state.finished[rows] = done[:, None].expand_as(rows)


def _keep_best(
    state: RowState,
    leader: torch.Tensor,
    hypothesis: torch.Tensor,
    parents: torch.Tensor,
    chosen: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    boost: torch.Tensor,
) -> None:
    """Count new hypotheses, and keep the best of each search: of equals the first.

    Args:
        state: changed at `leader`.
        leader: int64 (searches,).
        hypothesis: bool (searches, beam): which of the candidates is one.
        parents, chosen, sums, ends, boost: (searches, 2 * beam): the candidates, the likeliest
            first, and what of their sums phrases have earned.
    """
    beam = hypothesis.shape[1]
    position = state.position[leader]
    length = (position + 1 - state.prompt_len[leader])[:, None] + (~ends[:, :beam]).long()
    score = sums[:, :beam] / length.float().pow(state.length_penalty[leader][:, None])
    # An empty one has -inf, and is still better than none.
    rank = torch.where(hypothesis, score, NEVER)
    best = torch.where(rank.amax(1) > NEVER, rank.argmax(1), hypothesis.long().argmax(1))[:, None]
    better = score.gather(1, best)[:, 0] > state.best_score[leader]
    better |= state.ended[leader] == 0
    better &= hypothesis.any(1)
    state.ended[leader] += hypothesis.sum(1)

    def take(table: torch.Tensor) -> torch.Tensor:
        return table.gather(1, best)[better, 0]

    where = leader[better]
    state.best_tokens[where] = state.tokens[take(parents)]
    state.best_tokens[where, position[better] + 1] = take(chosen)
    state.best_length[where] = take(length)
    state.best_score[where] = take(score)
    state.best_logprob_sum[where] = take(sums) - take(boost)
    state.best_is_ended[where] = take(ends)
