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

FEEDS = 4  # of a short prompt: start of transcript, language, task, no timestamps
_WANTED = 2  # its logits: after the start of transcript and after the last token


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


class ShortPrompt:
    """A feed of one slot's first row that always has the same shape and memory, for a CUDA graph.

    A host takes longer to launch a large decoder's step than the device for one window's encoder
    and prompt together. Most prompts have three or four tokens, so one graph serves them; others,
    and those of several windows, which are encoded for longer than the host needs, are launched
    kernel by kernel.

    Shorter prompts are filled up with their last token: as it is fed again at its own position, it
    writes what it has written, and nobody asks for its logits.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids
        count = 2 * FEEDS + _WANTED + 1
        self._numbers = torch.zeros(count, dtype=torch.int64, device=ids.device)
        sizes = [FEEDS, FEEDS, _WANTED, 1]
        self._rows, self._positions, self.wanted, self._slot = torch.split(self._numbers, sizes)
        self._first, self._count = torch.zeros_like(self._slot), torch.full_like(self._slot, FEEDS)

    @property
    def feed(self) -> Feed:
        """The feed, in that memory."""
        groups = Groups(self._slot, self._first, self._count, FEEDS)
        ids = self._ids
        return Feed(ids, self._rows, self._positions, groups, None, True, ids.shape[1], FEEDS)

    @staticmethod
    def holds(spans: Sequence[Span], wanted: Sequence[int]) -> bool:
        """Tell whether such a prompt fits."""
        return len(spans) == 1 and len(wanted) <= _WANTED and len(spans[0]) <= FEEDS

    def write(self, span: Span, wanted: Sequence[int]) -> None:
        """Feed this from now on; `wanted` are the feeds whose logits are asked for."""
        rows = [span.place.first_row] * FEEDS
        positions = [min(span.begin + i, span.end - 1) for i in range(FEEDS)]
        feeds = [*wanted, *[wanted[-1]] * (_WANTED - len(wanted))]
        numbers = [*rows, *positions, *feeds, span.place.slot]
        self._numbers.copy_(upload(numbers, self._numbers.device))


def _groups(slots: list[int], counts: list[int], device: torch.device) -> Groups:
    firsts = list(itertools.accumulate(counts, initial=0))[:-1]
    return Groups(
        slots=upload(slots, device),
        first=upload(firsts, device),
        count=upload(counts, device),
        most=max(counts),
    )
