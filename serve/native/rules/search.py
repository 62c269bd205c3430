"""Beam search in plain torch, as in CTranslate2's `src/decoding.cc`.

Each step ranks the 2 * beam likeliest continuations of a search; ties go to the lower beam. A
continuation among the first `beam` is a hypothesis if it ends; at the last step all of them are.
The first `beam` continuations that do not end become the next beams.
"""

import dataclasses
import math

import torch

from serve.native.rules.phrases import MARGIN, MAX_BOOSTED, Phrasebook, trie_steps
from serve.native.rules.state import NEG_INF, RowState


def best_tokens(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of each row's `count` highest values, in descending order.

    Ties go to the lower id, as in a stable sort. Only the tiles with the highest peaks are sorted.

    Args:
        values: float32 (m, n).
        count: the number of values, at most n.

    Returns:
        int64 (m, count).
    """
    n = values.shape[1]
    tile = math.isqrt(n // count) + 1  # about as many peaks to sort as values in the chosen tiles
    tiled_length = n // tile * tile
    peaks = [values[:, :tiled_length].view(len(values), -1, tile).amax(-1)]
    if tiled_length < n:
        peaks.append(values[:, tiled_length:].amax(1, keepdim=True))
    tiles = _highest(torch.cat(peaks, dim=1), count)
    tiles = tiles.sort(dim=1).values  # ties go to the lower id
    ids = (tiles[..., None] * tile + torch.arange(tile, device=values.device)).flatten(1)
    candidates = values.gather(1, ids.clamp_max(n - 1)).masked_fill(ids >= n, NEG_INF)
    # Padding has the highest ids, so it loses every tie.
    return ids.gather(1, _highest(candidates, count))


def _highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of each row's highest values, in the order of a stable sort.

    Each value becomes an integer key that keeps the order, with the index in its low bits, so that
    no two keys are equal. `topk` of the keys needs no sort. For some hundred values per row a sort
    takes three times as long.

    Args:
        values: float32 (m, n).
        count: the number of values; at most n are returned.

    Returns:
        int64 (m, min(count, n)).
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # the bits of negative numbers count backwards
    indices = torch.arange(values.shape[1], device=values.device)
    return ((ordered << 31) - indices).topk(min(count, len(indices)), dim=1).indices


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The 2 * beam likeliest continuations of each search, the likeliest first.

    All tensors are (searches, 2 * beam). A search with fewer continuations is padded with the sum
    `NEG_INF`, token 0, and the leader as the parent.
    """

    parents: torch.Tensor  # int64: the rows that they continue
    tokens: torch.Tensor  # int64
    sums: torch.Tensor  # float32: log-probability of the whole text, boosts included
    ends: torch.Tensor  # bool: the token is end of text
    boost: torch.Tensor  # float32: the part of the sums that phrases have added
    nodes: torch.Tensor  # int64: the next node of the trie of phrases

    @property
    def alive(self) -> torch.Tensor:
        """Whether each continuation exists: bool (searches, 2 * beam)."""
        return self.sums > NEG_INF


def extend(
    state: RowState,
    rows: torch.Tensor,
    logprobs: torch.Tensor,
    eot: int,
    timestamp_begin: int,
    book: Phrasebook | None = None,
) -> None:
    """Choose the next beams of searches of one width, and store their best hypotheses.

    A beam without a continuation gets token 0 and the sum -inf.

    Args:
        state: changed at `rows`.
        rows: int64 (searches, beam), each search's leader first; none is finished.
        logprobs: float32 (searches * beam, n_vocab), the log-probabilities after each beam.
        eot, timestamp_begin: token ids.
        book: the phrase lists if any row has phrases.
    """
    leader = rows[:, 0]
    candidates = _candidates(state, rows, logprobs, eot, book)
    ends = candidates.ends
    at_limit = state.position[leader] + 2 >= state.limit[leader]
    hypothesis = (ends | (at_limit[:, None] & candidates.alive))[:, : rows.shape[1]]
    _keep_best(state, leader, hypothesis, candidates)
    # Without a length penalty no later hypothesis can beat one that is the likeliest candidate.
    has_penalty = state.length_penalty[leader] != 0
    enough_hypotheses = (state.ended[leader] >= state.needed[leader]) & has_penalty
    finished = at_limit | enough_hypotheses | (ends[:, 0] & ~has_penalty)
    _continue_beams(state, rows, candidates, timestamp_begin)
    state.finished[rows] = finished[:, None].expand_as(rows)


def _candidates(
    state: RowState, rows: torch.Tensor, logprobs: torch.Tensor, eot: int, book: Phrasebook | None
) -> _Candidates:
    """Rank the likeliest continuations of each search; the arguments are those of `extend`."""
    searches, beam = rows.shape
    per_beam = 2 * beam if book is None else MAX_BOOSTED
    ids = best_tokens(logprobs, per_beam)
    values = logprobs.gather(1, ids)
    sums = values + state.logprob_sum[rows.flatten(), None]
    if book is not None:
        boostable = values >= values[:, :1] - MARGIN
        next_nodes, gains = trie_steps(book, state, rows.flatten(), ids, boostable)
        sums += gains
    sums = sums.nan_to_num_(nan=NEG_INF, neginf=NEG_INF).view(searches, -1)
    order = sums.sort(dim=1, descending=True, stable=True).indices[:, : 2 * beam]

    def ordered(of_beams: torch.Tensor) -> torch.Tensor:
        return of_beams.view(searches, -1).gather(1, order)

    sums = ordered(sums)
    alive = sums > NEG_INF
    parents = torch.where(alive, rows.gather(1, order // per_beam), rows[:, :1])
    tokens = torch.where(alive, ordered(ids), 0)
    boost, nodes = state.boost[parents], state.node[parents]
    if book is not None:
        boost = torch.where(alive, boost + ordered(gains), 0.0)
        nodes = torch.where(alive, ordered(next_nodes), state.root[parents].clamp_min(0))
    return _Candidates(parents, tokens, sums, alive & (tokens == eot), boost, nodes)


def _continue_beams(
    state: RowState, rows: torch.Tensor, candidates: _Candidates, timestamp_begin: int
) -> None:
    """Continue each search with its first candidates that do not end."""
    continuing = candidates.ends.long().sort(dim=1, stable=True).indices[:, : rows.shape[1]]
    parents = candidates.parents.gather(1, continuing)
    chosen = candidates.tokens.gather(1, continuing)
    next_position = state.position[rows[:, :1]] + 1
    tokens, source = state.tokens[parents], state.source[parents]
    last_timestamp = torch.where(chosen >= timestamp_begin, chosen, state.last_timestamp[parents])
    state.tokens[rows] = tokens
    state.tokens[rows, next_position] = chosen
    state.source[rows] = source
    state.source[rows, next_position] = rows.int()
    state.last_timestamp[rows] = last_timestamp
    state.logprob_sum[rows] = candidates.sums.gather(1, continuing)
    state.boost[rows] = candidates.boost.gather(1, continuing)
    state.node[rows] = candidates.nodes.gather(1, continuing)
    state.position[rows] = next_position.expand_as(rows)


def _keep_best(
    state: RowState, leader: torch.Tensor, hypothesis: torch.Tensor, candidates: _Candidates
) -> None:
    """Count new hypotheses, and store the best of each search; ties go to the first.

    Args:
        state: changed at `leader`.
        leader: int64 (searches,).
        hypothesis: bool (searches, beam): True where one of the first `beam` candidates of a search
            is a hypothesis.
        candidates: the continuations of each search.
    """
    beam = hypothesis.shape[1]
    position = state.position[leader]
    continues = ~candidates.ends[:, :beam]
    length = (position + 1 - state.prompt_len[leader])[:, None] + continues.long()
    score = candidates.sums[:, :beam] / length.float().pow(state.length_penalty[leader][:, None])
    # The score of an empty hypothesis is -inf; it is stored if the search has no other.
    rank = torch.where(hypothesis, score, NEG_INF)
    best = torch.where(rank.amax(1) > NEG_INF, rank.argmax(1), hypothesis.long().argmax(1))[:, None]
    improves = score.gather(1, best)[:, 0] > state.best_score[leader]
    improves |= state.ended[leader] == 0
    improves &= hypothesis.any(1)
    state.ended[leader] += hypothesis.sum(1)

    def select(table: torch.Tensor) -> torch.Tensor:
        return table.gather(1, best)[improves, 0]

    updated = leader[improves]
    state.best_tokens[updated] = state.tokens[select(candidates.parents)]
    state.best_tokens[updated, position[improves] + 1] = select(candidates.tokens)
    state.best_length[updated] = select(length)
    state.best_score[updated] = select(score)
    state.best_logprob_sum[updated] = select(candidates.sums) - select(candidates.boost)
    state.best_is_ended[updated] = select(candidates.ends)
