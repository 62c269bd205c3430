"""The feed of one window's prompt that a CUDA graph can be recorded with.

A host takes longer to launch a large decoder's step than the device for one window's encoder and
prompt together. Most prompts have three or four tokens, so one graph serves them; others, and those
of several windows, which are encoded for longer than the host needs, are launched kernel by kernel.
"""

from collections.abc import Sequence

import torch

from serve.native.feeds import Span, upload
from serve.native.kernels.feed import Feed, Groups

FEEDS = 4  # start of transcript, language, task, no timestamps
_WANTED = 2  # logits are asked for after the start of transcript and after the last token


class ShortPrompt:
    """A feed of one slot's first row that always has the same shape and memory.

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
        return len(spans) == 1 and len(wanted) <= _WANTED and _length(spans[0]) <= FEEDS

    def write(self, span: Span, wanted: Sequence[int]) -> None:
        """Feed this from now on; `wanted` are the feeds whose logits are asked for."""
        rows = [span.place.first_row] * FEEDS
        positions = [min(span.begin + i, span.end - 1) for i in range(FEEDS)]
        feeds = [*wanted, *[wanted[-1]] * (_WANTED - len(wanted))]
        numbers = [*rows, *positions, *feeds, span.place.slot]
        self._numbers.copy_(upload(numbers, self._numbers.device))


def _length(span: Span) -> int:
    return span.end - span.begin
