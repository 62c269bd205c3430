"""The feeds of decoder steps: a token a row while windows decode, whole prompts when they start."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serve.native.kernels.feed import Feed, Groups
from serve.native.rules.state import RowState
from serve.native.slots import Place


def upload(values: Sequence[int] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """int64 (n,) on a device; to a GPU without waiting for it."""
    tensor = torch.as_tensor(values, dtype=torch.int64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclasses.dataclass(frozen=True)
class Span:
    """Positions [begin, end) of one row, fed in one step."""

    place: Place
    begin: int
    end: int

    def __len__(self) -> int:
        """Count the positions."""
        return self.end - self.begin


def one_token_each(places: Sequence[Place], device: torch.device) -> tuple[torch.Tensor, Groups]:
    """The rows of some slots, int64 (n,), and which of them share a slot, for one token a row."""
    rows = [row for place in places for row in place.rows]
    counts = [place.count for place in places]
    return upload(rows, device), _groups([place.slot for place in places], counts, device)


def feed_of(state: RowState, rows: torch.Tensor, groups: Groups, length: int) -> Feed:
    """The next token of each of some rows; `length` is above every position."""
    source = state.source if groups.most > 1 else None
    return Feed(state.tokens, rows, state.position[rows], groups, source, False, length)


def feed_of_spans(ids: torch.Tensor, spans: Sequence[Span], device: torch.device) -> Feed:
    """Several tokens of some slots' first rows, whatever the rows' own positions.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
        spans: which of them.
        device: of the ids.
    """
    rows = [span.place.first_row for span in spans for _ in range(span.begin, span.end)]
    positions = [at for span in spans for at in range(span.begin, span.end)]
    counts = [len(span) for span in spans]
    groups = _groups([span.place.slot for span in spans], counts, device)
    return Feed(
        ids=ids,
        rows=upload(rows, device),
        positions=upload(positions, device),
        groups=groups,
        source=None,  # a first row's past is its own until beams change places
        several=True,
        length=max(positions) + 1,
    )


def fixed_numbers(
    columns: Sequence[tuple[Sequence[int] | NDArray[np.int64], int]],
    slots: Sequence[int],
    counts: Sequence[int],
    groups: int,
) -> NDArray[np.int64]:
    """The numbers of a feed of fixed size, one column behind the other, then those of its groups.

    What it has less is filled up with its last feed: as that is fed again at its own place, it
    writes what it has written, and nobody asks for it.

    Args:
        columns: with the size of each; the first has a number of each feed.
        slots: of each group.
        counts: the feeds of each.
        groups: the most that it holds; those that are not there have no feed.
    """
    begins = np.cumsum([0, *counts[:-1]])
    # Those that fill up belong to the last group, or its keys would come to hold anything.
    counts = [*counts[:-1], counts[-1] + columns[0][1] - sum(counts)]
    filled = [np.pad(column, (0, size - len(column)), mode="edge") for column, size in columns]
    filled += [np.pad(column, (0, groups - len(slots))) for column in (slots, begins, counts)]
    return np.concatenate(filled)


def _groups(slots: list[int], counts: list[int], device: torch.device) -> Groups:
    firsts = list(itertools.accumulate(counts, initial=0))[:-1]
    return Groups(
        slots=upload(slots, device),
        first=upload(firsts, device),
        count=upload(counts, device),
        most=max(counts),
    )
