"""Beam search in plain torch, as CTranslate2's `src/decoding.cc` does it.

Of each search the 2 * beam likeliest continuations are looked at; of equals that of the lower beam
comes first. Those among the first `beam` that end, at the last step all of
them, are hypotheses; the first `beam` that go on are the next beams.
"""

import dataclasses
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
    tiles = _highest(torch.cat(peaks, dim=1), count)
    tiles = tiles.sort(dim=1).values  # so that of equals the lower id comes first
    ids = (tiles[..., None] * tile + torch.arange(tile, device=values.device)).flatten(1)
    kept = values.gather(1, ids.clamp_max(n - 1)).masked_fill(ids >= n, NEVER)
    # Beyond the end there are the highest ids, which are the last of equals.
    return ids.gather(1, _highest(kept, count))


def _highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Find each row's highest values, as a stable sort of them would begin.

    They are made whole numbers that keep their order and, by their places, are never equal. So it
    takes no sort, which for some hundred values a row takes three times as long.

    Args:
        values: float32 (m, n).
        count: how many, or n where that is less.

    Returns:
        int64 (m, count), their places.
    """
    bits = (values + 0.0).view(torch.int32).long()  # of zeros there is one then
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # of negative numbers the others are higher
    places = torch.arange(values.shape[1], device=values.device)
    return ((ordered << 31) - places).topk(min(count, len(places)), dim=1).indices


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The 2 * beam likeliest continuations of each search, the likeliest first.

    All are (searches, 2 * beam). Where there are fewer, the others have the sum `NEVER`, token 0,
    and the leader as their parent.
    """

    parents: torch.Tensor  # int64: the rows that they continue
    tokens: torch.Tensor  # int64
    sums: torch.Tensor  # float32
    ends: torch.Tensor  # bool: the token is end of text
    boost: torch.Tensor  # float32: what phrases have earned of the sums
    nodes: torch.Tensor  # int64: where they are in the tries of their phrases

    @property
    def alive(self) -> torch.Tensor:
        """Tell which of them there are, bool."""
        return self.sums > NEVER


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
    leader = rows[:, 0]
    candidates = _candidates(state, rows, logprobs, eot, book)
    ends = candidates.ends
    last = state.position[leader] + 2 >= state.limit[leader]
    hypothesis = (ends | (last[:, None] & candidates.alive))[:, : rows.shape[1]]
    _keep_best(state, leader, hypothesis, candidates)
    # Without a penalty for length no other can be better than the likeliest that ended.
    enough = (state.ended[leader] >= state.needed[leader]) & (state.length_penalty[leader] != 0)
    done = last | enough | (ends[:, 0] & (state.length_penalty[leader] == 0))
    _go_on(state, rows, candidates, timestamp_begin)
    state.finished[rows] = done[:, None].expand_as(rows)


def _candidates(
    state: RowState, rows: torch.Tensor, logprobs: torch.Tensor, eot: int, book: Phrasebook | None
) -> _Candidates:
    """Rank the likeliest continuations of all beams of each search; arguments as of `extend`."""
    searches, beam = rows.shape
    looked_at = 2 * beam if book is None else LIKELIEST
    ids = best_tokens(logprobs, looked_at)
    values = logprobs.gather(1, ids)
    sums = values + state.logprob_sum[rows.flatten(), None]
    if book is not None:
        near = values >= values[:, :1] - MARGIN
        after = steps(book, state, rows.flatten(), ids, near)
        sums += after.gains
    sums = sums.nan_to_num_(nan=NEVER, neginf=NEVER).view(searches, -1)
    order = sums.sort(dim=1, descending=True, stable=True).indices[:, : 2 * beam]

    def ordered(of_beams: torch.Tensor) -> torch.Tensor:
        return of_beams.view(searches, -1).gather(1, order)

    sums = ordered(sums)
    alive = sums > NEVER
    parents = torch.where(alive, rows.gather(1, order // looked_at), rows[:, :1])
    tokens = torch.where(alive, ordered(ids), 0)
    boost, nodes = state.boost[parents], state.node[parents]
    if book is not None:
        boost = torch.where(alive, boost + ordered(after.gains), 0.0)
        nodes = torch.where(alive, ordered(after.nodes), state.root[parents].clamp_min(0))
    return _Candidates(parents, tokens, sums, alive & (tokens == eot), boost, nodes)


def _go_on(
    state: RowState, rows: torch.Tensor, candidates: _Candidates, timestamp_begin: int
) -> None:
    """Let the first candidates that do not end be the next beams."""
    going_on = candidates.ends.long().sort(dim=1, stable=True).indices[:, : rows.shape[1]]
    parents = candidates.parents.gather(1, going_on)
    chosen = candidates.tokens.gather(1, going_on)
    follow = state.position[rows[:, :1]] + 1
    tokens, source = state.tokens[parents], state.source[parents]
    stamp = torch.where(chosen >= timestamp_begin, chosen, state.last_timestamp[parents])
    state.tokens[rows] = tokens
    state.tokens[rows, follow] = chosen
    state.source[rows] = source
    state.source[rows, follow] = rows.int()
    state.last_timestamp[rows] = stamp
    state.logprob_sum[rows] = candidates.sums.gather(1, going_on)
    state.boost[rows] = candidates.boost.gather(1, going_on)
    state.node[rows] = candidates.nodes.gather(1, going_on)
    state.position[rows] = follow.expand_as(rows)


def _keep_best(
    state: RowState, leader: torch.Tensor, hypothesis: torch.Tensor, candidates: _Candidates
) -> None:
    """Count new hypotheses, and keep the best of each search: of equals the first.

    Args:
        state: changed at `leader`.
        leader: int64 (searches,).
        hypothesis: bool (searches, beam): which of the candidates is one.
        candidates: as many and more.
    """
    beam = hypothesis.shape[1]
    position = state.position[leader]
    goes_on = ~candidates.ends[:, :beam]
    length = (position + 1 - state.prompt_len[leader])[:, None] + goes_on.long()
    score = candidates.sums[:, :beam] / length.float().pow(state.length_penalty[leader][:, None])
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
    state.best_tokens[where] = state.tokens[take(candidates.parents)]
    state.best_tokens[where, position[better] + 1] = take(candidates.tokens)
    state.best_length[where] = take(length)
    state.best_score[where] = take(score)
    state.best_logprob_sum[where] = take(candidates.sums) - take(candidates.boost)
    state.best_is_ended[where] = take(candidates.ends)
