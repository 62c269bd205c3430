"""`phrases.steps`, and what it changes of a choice, for kernels."""
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-call, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from serve.contract.phrases import MAX_NODES
from serve.native.rules.fields import WIDEST, RowPointers, Scan
from serve.native.rules.phrases import MARGIN, TOKEN_BITS, Phrasebook

_HALF = tl.constexpr(MAX_NODES // 2)
_HALVES = tl.constexpr(MAX_NODES.bit_length() - 1)  # until one edge is left
_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_MARGIN = tl.constexpr(MARGIN)
_ROUNDING = tl.constexpr(1e-2)  # that sums may differ by where logits do not


class Tables(NamedTuple):
    """`Phrasebook` as kernels take it."""

    keys: torch.Tensor
    targets: torch.Tensor
    gains: torch.Tensor
    refunds: torch.Tensor


def tables_of(book: Phrasebook) -> Tables:
    """The tensors of a phrasebook."""
    return Tables(book.keys, book.targets, book.gains, book.refunds)


@triton.jit
def _edge(book: Tables, root, node, token, there) -> tuple[tl.tensor, tl.tensor]:
    """See `phrases._edge`; looked for between the root's first edge and the list's end."""
    key = (node << _TOKEN_BITS) | token
    edge = root + tl.zeros_like(key)
    for step in tl.static_range(0, _HALVES):
        half = _HALF >> step
        before = tl.load(book.keys + edge + (half - 1), mask=there, other=0) < key
        edge = tl.where(before & there, edge + half, edge)
    return edge, there & (tl.load(book.keys + edge, mask=there, other=-1) == key)


@triton.jit
def steps(book: Tables, root, node, token, near) -> tuple[tl.tensor, tl.tensor]:
    """See `phrases.steps`, of (nodes, gains), for rows that have phrases.

    Args:
        book: all lists.
        root: int64.
        node, token: int64, of one shape.
        near: bool, as they are.
    """
    # Both searches at once: each waits for memory as often as the list is halved.
    starts = tl.join(node, root + tl.zeros_like(node))
    edges, there = _edge(book, root, starts, tl.join(token, token), tl.join(near, near))
    onward, anew = tl.split(edges)
    goes_on, begins = tl.split(there)
    edge = tl.where(goes_on, onward, anew)
    found = goes_on | begins
    nodes = tl.load(book.targets + edge, mask=found, other=0).to(tl.int64)
    gains = tl.load(book.gains + edge, mask=found, other=0.0)
    refund = tl.load(book.refunds + node)
    return tl.where(found, nodes, root), tl.where(goes_on, gains, gains + refund)


@triton.jit
def choose_boosted(
    book: Tables, state: RowPointers, row, pick, must, scan: Scan, form: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """See `reference_rules._boosted`, of one row; notes where the row is in its trie then.

    What cannot earn is not the best either: whoever leaves a match pays the same for it. So those
    that are near the likeliest suffice.

    Args:
        book, state, row, pick: whose.
        must: whether it is to say a timestamp.
        scan, form: what the tiles keep.

    Returns:
        The token and its logit.
    """
    keep: tl.constexpr = form.keep
    which, lane = tl.arange(0, form.tiles_padded * keep), tl.arange(0, keep)
    there = (which < form.tiles * keep) & ((must == 0) | (which >= form.text_tiles * keep))
    first = pick * form.tiles * keep
    rest = tl.load(scan.tops + first + which, mask=there, other=float("-inf"))
    lowest = tl.max(rest, 0) - _MARGIN
    value = tl.full((keep,), float("-inf"), tl.float32)
    place = tl.zeros((keep,), tl.int32)
    near = tl.sum((rest >= lowest).to(tl.int32), 0)
    for rank in range(0, tl.minimum(near, keep)):
        peak, best = tl.max(rest, 0, return_indices=True, return_indices_tie_break_left=True)
        value = tl.where(lane == rank, peak, value)
        place = tl.where(lane == rank, best, place)
        rest = tl.where(which == best, float("-inf"), rest)
    token = tl.load(scan.top_ids + first + place).to(tl.int64)
    root, node = tl.load(state.root + row), tl.load(state.node + row) + tl.zeros_like(token)
    nodes, gains = steps(book, root, node, token, value >= lowest)
    earned = value + gains
    _, best = tl.max(earned, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(state.node + row, tl.sum(tl.where(lane == best, nodes, 0), 0))
    chosen = tl.sum(tl.where(lane == best, token, 0), 0)
    return chosen, tl.sum(tl.where(lane == best, value, 0.0), 0)


@triton.jit
def likeliest_of_beams(
    book: Tables, state: RowPointers, row, pick, width, rest, lowest, scan: Scan, form: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Each beam's likeliest candidates, phrases counted in; the others cannot be among the best.

    Args:
        book, state, row, pick, width: whose.
        rest: float32 (WIDEST, tiles_padded * keep), summed log-probabilities, -inf where none is.
        lowest: (WIDEST,), the lowest logit of a beam that may earn.
        scan, form: what the tiles keep.

    Returns:
        Boosted sums, (WIDEST, keep), -inf where none is, and where in the scan each stands.
    """
    keep: tl.constexpr = form.keep
    beam, lane = tl.arange(0, WIDEST), tl.arange(0, keep)
    which = tl.arange(0, form.tiles_padded * keep)[None, :]
    least = tl.max(rest, 1) - (_MARGIN + _ROUNDING)
    least = tl.where(least > float("-inf"), least, float("inf"))  # a beam that has ended
    sums = tl.full((WIDEST, keep), float("-inf"), tl.float32)
    places = tl.zeros((WIDEST, keep), tl.int32)
    near = tl.max(tl.sum((rest >= least[:, None]).to(tl.int32), 1), 0)
    for rank in range(0, tl.minimum(tl.maximum(near, 2 * width), keep)):
        peaks, best = tl.max(rest, 1, return_indices=True, return_indices_tie_break_left=True)
        mine = (lane == rank)[None, :]
        sums = tl.where(mine, peaks[:, None], sums)
        places = tl.where(mine, best[:, None], places)
        rest = tl.where(which == best[:, None], float("-inf"), rest)
    alive = sums > float("-inf")
    places += ((pick + beam) * form.tiles * keep)[:, None]
    token = tl.load(scan.top_ids + places, mask=alive, other=0).to(tl.int64)
    logit = tl.load(scan.tops + places, mask=alive, other=float("-inf"))
    root = tl.load(state.root + row)
    node = tl.load(state.node + row + beam, mask=beam < width, other=0)
    earns = alive & (logit >= lowest[:, None])
    _, gains = steps(book, root, node[:, None] + tl.zeros_like(token), token, earns)
    return tl.where(alive, sums + gains, float("-inf")), places
