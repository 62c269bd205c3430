"""`phrases.steps`, and what it changes of a choice, for kernels."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from serve.contract.phrases import MAX_NODES
from serve.native.rules.fields import Fields
from serve.native.rules.phrases import MARGIN, TOKEN_BITS, Phrasebook

_HALF = tl.constexpr(MAX_NODES // 2)
_HALVES = tl.constexpr(MAX_NODES.bit_length() - 1)  # until one edge is left
_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_MARGIN = tl.constexpr(MARGIN)


class Tables(NamedTuple):
    """`Phrasebook` as kernels take it."""

    keys: torch.Tensor
    targets: torch.Tensor
    gains: torch.Tensor
    refunds: torch.Tensor


def tables_of(book: Phrasebook) -> Tables:
    """The tensors of some book."""
    return Tables(book.keys, book.targets, book.gains, book.refunds)


@triton.jit
def _edge(
    book: Tables, root: tl.tensor, node: tl.tensor, token: tl.tensor, there: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """See `phrases._edge`; looked for between the root's first edge and the list's end."""
    key = (node << _TOKEN_BITS) | token
    edge = root + tl.zeros_like(key)
    for step in tl.static_range(0, _HALVES):
        half = _HALF >> step
        before = tl.load(book.keys + edge + (half - 1), mask=there, other=0) < key
        edge = tl.where(before & there, edge + half, edge)
    return edge, there & (tl.load(book.keys + edge, mask=there, other=-1) == key)


@triton.jit
def steps(
    book: Tables, root: tl.tensor, node: tl.tensor, token: tl.tensor, near: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """See `phrases.steps`, of (nodes, gains), for rows that have phrases.

    Args:
        book: all lists.
        root: int64.
        node, token: int64, of one shape.
        near: bool, as they are.
    """
    onward, goes_on = _edge(book, root, node, token, near)
    anew, begins = _edge(book, root, root + tl.zeros_like(node), token, near & (goes_on == 0))
    edge = tl.where(goes_on, onward, anew)
    found = goes_on | begins
    nodes = tl.load(book.targets + edge, mask=found, other=0).to(tl.int64)
    gains = tl.load(book.gains + edge, mask=found, other=0.0)
    refund = tl.load(book.refunds + node)
    return tl.where(found, nodes, root), tl.where(goes_on, gains, gains + refund)


@triton.jit
def choose_boosted(
    book: Tables, state: Fields, row: tl.tensor, rest: tl.tensor, top_ids: tl.tensor,
    padded: tl.constexpr, keep: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """See `definition._boosted`, of one row; notes where the row is in its trie then.

    Args:
        book, state, row: whose.
        rest: float32 (padded,), the logits of what the tiles keep, -inf where none is.
        top_ids: their tokens.
        padded: how many there are.
        keep: as many are the likeliest.

    Returns:
        The token and its logit.
    """
    which, lane = tl.arange(0, padded), tl.arange(0, keep)
    value = tl.full((keep,), float("-inf"), tl.float32)
    token = tl.zeros((keep,), tl.int64)
    for rank in range(0, keep):
        peak, place = tl.max(rest, 0, return_indices=True, return_indices_tie_break_left=True)
        value = tl.where(lane == rank, peak, value)
        token = tl.where(lane == rank, tl.load(top_ids + place).to(tl.int64), token)
        rest = tl.where(which == place, float("-inf"), rest)
    root, node = tl.load(state.root + row), tl.load(state.node + row) + tl.zeros_like(token)
    nodes, gains = steps(book, root, node, token, value >= tl.max(value, 0) - _MARGIN)
    _, best = tl.max(
        value + gains, 0, return_indices=True, return_indices_tie_break_left=True
    )  # fmt: skip
    tl.store(state.node + row, tl.sum(tl.where(lane == best, nodes, 0), 0))
    chosen = tl.sum(tl.where(lane == best, token, 0), 0)
    return chosen, tl.sum(tl.where(lane == best, value, 0.0), 0)


@triton.jit
def boost_beams(
    book: Tables, state: Fields, row: tl.tensor, width: tl.tensor, rest: tl.tensor,
    lowest: tl.tensor, tops: tl.tensor, top_ids: tl.tensor, each: tl.constexpr,
    padded: tl.constexpr, keep: tl.constexpr, beams_padded: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What phrases make of a search's candidates: those that are not likely enough are dropped.

    Args:
        book, state, row, width: whose.
        rest: float32 (beams_padded, padded), summed log-probabilities, -inf where none is.
        lowest: (beams_padded,), the lowest logit of a beam that may earn.
        tops, top_ids: their logits and tokens, `each` a beam.
        each: candidates of a beam that are there.
        padded: candidates of a beam.
        keep: as many of a beam are the likeliest.
        beams_padded: rows of `rest`.
    """
    beam, which = tl.arange(0, beams_padded), tl.arange(0, padded)
    left = rest
    for _ in range(0, keep):
        _, places = tl.max(
            left, 1, return_indices=True, return_indices_tie_break_left=True
        )  # fmt: skip
        left = tl.where(which[None, :] == places[:, None], float("-inf"), left)
    likely = (rest > float("-inf")) & (left == float("-inf"))
    places = beam[:, None] * each + which[None, :]
    token = tl.load(top_ids + places, mask=likely, other=0).to(tl.int64)
    near = tl.load(tops + places, mask=likely, other=0.0) >= lowest[:, None]
    root = tl.load(state.root + row)
    node = tl.load(state.node + row + beam, mask=beam < width, other=0)
    _, gains = steps(book, root, node[:, None] + tl.zeros_like(token), token, likely & near)
    return tl.where(likely, rest + gains, float("-inf"))
