"""Feeds of windows that start, each of one shape and memory for good, for CUDA graphs.

A host takes longer to launch a step of a decoder, kernel by kernel, than the device for several
windows' prompts and guesses, and as long again for the choices that follow the guesses. So there
are graphs of a few sizes, and what starts takes the smallest that holds it, filled up as
`feeds.fixed_numbers` says.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from serve.native.feeds import Span, fixed_numbers, upload
from serve.native.kernels.feed import Feed, Groups
from serve.native.rules.state import NO_ROW, Picks

_PROMPT = 4  # start of transcript, language, task, no timestamps
_FEEDS = (32, 64, 128, 256, 384)  # of prompts and guesses
_WINDOWS = 8  # that start at a time
_TURNS = (0, 8, 16, 32, 64)  # guesses of a window that graphs go through


@dataclasses.dataclass(frozen=True)
class Size:
    """The most that is fed at a time."""

    feeds: int
    windows: int
    wanted: int  # feeds whose logits are asked for

    @property
    def spans(self) -> int:
        """Count the prompts and, but for a single prompt, as many drafts."""
        return self.windows if self.feeds <= _PROMPT else 2 * self.windows

    @property
    def turns(self) -> list[int]:
        """Return the guesses of a window that there are graphs for, fewest first."""
        most = min(_TURNS[-1], self.feeds - _PROMPT)
        return [*(turns for turns in _TURNS if turns < most), most]


def sizes(slots: int) -> list[Size]:
    """Return the sizes of an engine with so many slots, smallest first."""
    several = [Size(feeds, min(_WINDOWS, slots), feeds) for feeds in _FEEDS]
    return [Size(_PROMPT, 1, wanted=2), *several]


class PromptFeed:
    """A feed of some slots' first rows, and the choice of their first tokens.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
        size: the most that it holds.
    """

    def __init__(self, ids: torch.Tensor, size: Size) -> None:
        self._ids = ids
        self.size = size
        lengths = [size.feeds] * 2 + [size.wanted] + [size.spans] * 3
        self._fed = torch.zeros(sum(lengths), dtype=torch.int64, device=ids.device)
        parts = torch.split(self._fed, lengths)
        self._rows, self._positions, self.wanted, self._slots, self._firsts, self._counts = parts
        lines = 1 + 1 + size.turns[-1]  # the rows, and what each reads in each choice
        width = size.windows + size.windows % 2  # kernels know how each line is aligned
        self._chosen = torch.full((lines, width), NO_ROW, device=ids.device)

    @property
    def feed(self) -> Feed:
        """The feed, in that memory."""
        groups = Groups(self._slots, self._firsts, self._counts, self.size.feeds)
        rows, each = (self._rows, self._positions), self.size.feeds if self.size.spans == 1 else 1
        return Feed(self._ids, *rows, groups, None, True, self._ids.shape[1], each)

    def picks(self, turns: int) -> list[Picks]:
        """Return what chooses after the prompts, and after each of so many guesses."""
        rows, *lines = self._chosen[: 2 + turns, : self.size.windows].unbind()
        return [Picks(rows, line) for line in lines]

    def holds(self, spans: Sequence[Span], wanted: Sequence[int]) -> bool:
        """Tell whether such spans fit, with so many logits asked for."""
        enough = len(spans) <= self.size.spans and len(wanted) <= self.size.wanted
        return enough and sum(map(len, spans)) <= self.size.feeds

    def write(self, spans: Sequence[Span], wanted: Sequence[int]) -> None:
        """Feed these from now on; `wanted` are the feeds whose logits are asked for."""
        counts = [len(span) for span in spans]
        rows = np.repeat([span.place.first_row for span in spans], counts)
        positions = np.concatenate([np.arange(span.begin, span.end) for span in spans])
        feeds, slots = self.size.feeds, [span.place.slot for span in spans]
        columns = [(rows, feeds), (positions, feeds), (wanted, self.size.wanted)]
        numbers = fixed_numbers(columns, slots, counts, self.size.spans)
        self._fed.copy_(upload(numbers, self._ids.device))

    def choose(self, rows: Sequence[int], lines: Sequence[Sequence[int]]) -> int | None:
        """Have rows choose from now on, each by itself.

        Args:
            rows: of as many windows.
            lines: of logits, one a row: after the prompts, and after each guess. What stands where
                a row has fewer guesses is not read.

        Returns:
            The guesses of the smallest graph for it; None: there is none.
        """
        turns = next((turns for turns in self.size.turns if turns >= len(lines) - 1), None)
        if turns is None or len(rows) > self.size.windows:
            return None
        numbers = np.full((2 + turns, self._chosen.shape[1]), NO_ROW)
        numbers[: 1 + len(lines), : len(rows)] = [rows, *lines]
        self._chosen[: 2 + turns].copy_(upload(numbers, self._ids.device))
        return turns
