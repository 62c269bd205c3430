"""Boost phrases in Triton-language kernels; `phrases` is the reference implementation."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from serve.contract.phrases import MAX_NODES
from serve.native.rules.fields import WIDEST, RowPointers, Scan
from serve.native.rules.phrases import MARGIN, TOKEN_BITS, Phrasebook

_HALF = tl.constexpr(MAX_NODES // 2)
_HALVES = tl.constexpr(MAX_NODES.bit_length() - 1)  # steps of a binary search
_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_MARGIN = tl.constexpr(MARGIN)
_ROUNDING = tl.constexpr(1e-2)  # upper bound of the rounding error of a beam's sums


class Tables(NamedTuple):
    """The tensors of a `Phrasebook`."""

    keys: torch.Tensor
    targets: torch.Tensor
    gains: torch.Tensor
    refunds: torch.Tensor


def tables_of(book: Phrasebook) -> Tables:
    return Tables(book.keys, book.targets, book.gains, book.refunds)


@triton.jit
def _edge(book: Tables, root, node, token, mask) -> tuple[tl.tensor, tl.tensor]:
    """Compute `phrases._edge` by a binary search from the root's first edge to the list's end."""
    key = (node << _TOKEN_BITS) | token
    edge = root + tl.zeros_like(key)
    for step in tl.static_range(0, _HALVES):
        half = _HALF >> step
        before = tl.load(book.keys + edge + (half - 1), mask=mask, other=0) < key
        edge = tl.where(before & mask, edge + half, edge)
    return edge, mask & (tl.load(book.keys + edge, mask=mask, other=-1) == key)


@triton.jit
def steps(book: Tables, root, node, token, boostable) -> tuple[tl.tensor, tl.tensor]:
    """Compute `phrases.trie_steps` as (nodes, gains), for rows with phrases.

    Args:
        book: all lists.
        root: int64.
        node, token: int64, of one shape.
        boostable: bool, of the same shape.
    """
    # Both searches run at once, because every step of a search waits for memory.
    starts = tl.join(node, root + tl.zeros_like(node))
    edges, exists = _edge(book, root, starts, tl.join(token, token), tl.join(boostable, boostable))
    next_edge, first_edge = tl.split(edges)
    continues, begins = tl.split(exists)
    edge = tl.where(continues, next_edge, first_edge)
    found = continues | begins
    nodes = tl.load(book.targets + edge, mask=found, other=0).to(tl.int64)
    gains = tl.load(book.gains + edge, mask=found, other=0.0)
    refund = tl.load(book.refunds + node)
    return tl.where(found, nodes, root), tl.where(continues, gains, gains + refund)


@triton.jit
def choose_boosted(
    book: Tables, state: RowPointers, row, pick, must_be_timestamp, scan: Scan, config: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute `reference_rules._likeliest_boosted` for one row, and store the row's next trie node.

    Only tokens near the likeliest one are candidates. All others lose the same amount by leaving a
    match, so none of them can become the best.

    Args:
        book, state: all lists, and all rows.
        row, pick: the row and its pick.
        must_be_timestamp: whether the row must choose a timestamp.
        scan, config: the candidates of each tile, and their layout.

    Returns:
        The token and its logit.
    """
    keep: tl.constexpr = config.keep
    index, slot = tl.arange(0, config.tiles_padded * keep), tl.arange(0, keep)
    allowed = (must_be_timestamp == 0) | (index >= config.text_tiles * keep)
    mask = (index < config.tiles * keep) & allowed
    first = pick * config.tiles * keep
    remaining = tl.load(scan.tops + first + index, mask=mask, other=float("-inf"))
    threshold = tl.max(remaining, 0) - _MARGIN
    value = tl.full((keep,), float("-inf"), tl.float32)
    scan_index = tl.zeros((keep,), tl.int32)
    n_near = tl.sum((remaining >= threshold).to(tl.int32), 0)
    for rank in range(0, tl.minimum(n_near, keep)):
        peak, best = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
        value = tl.where(slot == rank, peak, value)
        scan_index = tl.where(slot == rank, best, scan_index)
        remaining = tl.where(index == best, float("-inf"), remaining)
    token = tl.load(scan.top_ids + first + scan_index).to(tl.int64)
    root, node = tl.load(state.root + row), tl.load(state.node + row) + tl.zeros_like(token)
    nodes, gains = steps(book, root, node, token, value >= threshold)
    boosted = value + gains
    _, best = tl.max(boosted, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(state.node + row, tl.sum(tl.where(slot == best, nodes, 0), 0))
    best_token = tl.sum(tl.where(slot == best, token, 0), 0)
    return best_token, tl.sum(tl.where(slot == best, value, 0.0), 0)


@triton.jit
def likeliest_of_beams(
    book: Tables,
    state: RowPointers,
    row,
    pick,
    width,
    remaining,
    min_logit,
    scan: Scan,
    config: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Boost each beam's likeliest candidates; no other candidate can be among the best.

    Args:
        book: all phrase lists.
        state: the state of all rows.
        row, pick: the first row of the beam search, and the index of its logits in the scan.
        width: the number of beams.
        remaining: float32 (WIDEST, tiles_padded * keep), the beams' sums of log-probabilities with
            each candidate added; -inf = no candidate.
        min_logit: (WIDEST,), per beam, the lowest logit that phrases may boost.
        scan, config: the candidates of each tile, and their layout.

    Returns:
        Boosted sums (WIDEST, keep), -inf = no candidate, and the candidates' indices in the scan.
    """
    keep: tl.constexpr = config.keep
    beam, slot = tl.arange(0, WIDEST), tl.arange(0, keep)
    index = tl.arange(0, config.tiles_padded * keep)[None, :]
    threshold = tl.max(remaining, 1) - (_MARGIN + _ROUNDING)
    # An ended beam has no candidates.
    threshold = tl.where(threshold > float("-inf"), threshold, float("inf"))
    sums = tl.full((WIDEST, keep), float("-inf"), tl.float32)
    scan_indices = tl.zeros((WIDEST, keep), tl.int32)
    n_near = tl.max(tl.sum((remaining >= threshold[:, None]).to(tl.int32), 1), 0)
    for rank in range(0, tl.minimum(tl.maximum(n_near, 2 * width), keep)):
        peaks, best = tl.max(remaining, 1, return_indices=True, return_indices_tie_break_left=True)
        at_rank = (slot == rank)[None, :]
        sums = tl.where(at_rank, peaks[:, None], sums)
        scan_indices = tl.where(at_rank, best[:, None], scan_indices)
        remaining = tl.where(index == best[:, None], float("-inf"), remaining)
    alive = sums > float("-inf")
    scan_indices += ((pick + beam) * config.tiles * keep)[:, None]
    token = tl.load(scan.top_ids + scan_indices, mask=alive, other=0).to(tl.int64)
    logit = tl.load(scan.tops + scan_indices, mask=alive, other=float("-inf"))
    root = tl.load(state.root + row)
    node = tl.load(state.node + row + beam, mask=beam < width, other=0)
    boostable = alive & (logit >= min_logit[:, None])
    _, gains = steps(book, root, node[:, None] + tl.zeros_like(token), token, boostable)
    return tl.where(alive, sums + gains, float("-inf")), scan_indices
