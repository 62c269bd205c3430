"""Prefill batches of fixed size and memory, for CUDA graphs.

The host needs longer to launch the kernels of a prefill step, and of the sampling after it, than
the device needs to run them. There are therefore graphs of a few sizes. New windows use the
smallest graph that fits; `batching.FixedBatch` pads them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from serve.native.batching import FixedBatch, TokenSpan, overwrite
from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.rules.state import NO_ROW, Picks

_PROMPT = 4  # start of transcript, language, task, no timestamps
_TOKENS = (32, 64, 128, 256, 384)  # tokens of prompts and drafts
_WINDOWS = 8  # the maximum number of windows that start together
_DRAFT_LENGTHS = (0, 8, 16, 32, 64)  # draft tokens of a window that the graphs verify


@dataclasses.dataclass(frozen=True)
class PrefillSize:
    """The capacity of a prefill batch."""

    tokens: int
    windows: int
    n_logits: int  # number of tokens with logits

    @property
    def spans(self) -> int:
        """The number of prompts and, unless there is a single prompt, as many drafts."""
        return self.windows if self.tokens <= _PROMPT else 2 * self.windows

    @property
    def draft_lengths(self) -> list[int]:
        """The draft lengths that have a graph, the shortest first."""
        longest = min(_DRAFT_LENGTHS[-1], self.tokens - _PROMPT)
        return [*(length for length in _DRAFT_LENGTHS if length < longest), longest]


def sizes(slots: int) -> list[PrefillSize]:
    """Return the sizes for an engine with `slots` slots, the smallest first."""
    several = [PrefillSize(n_tokens, min(_WINDOWS, slots), n_tokens) for n_tokens in _TOKENS]
    return [PrefillSize(_PROMPT, 1, n_logits=2), *several]


class PrefillBatch(FixedBatch):
    """A prefill batch of some slots' first rows, and the sampling of the rows' first tokens.

    Args:
        ids: int64 (all rows, n_text_ctx), the tokens.
        size: the capacity.
    """

    def __init__(self, ids: torch.Tensor, size: PrefillSize) -> None:
        super().__init__([size.tokens, size.tokens, size.n_logits], size.spans, ids.device)
        self._ids = ids
        self.size = size
        self.logit_indices = self.columns[2]
        n_lists = 1 + 1 + size.draft_lengths[-1]  # the rows, and the line of logits for each choice
        width = size.windows + size.windows % 2  # even, since kernels assume aligned lines
        self._chosen = torch.full((n_lists, width), NO_ROW, device=ids.device)

    @property
    def batch(self) -> StepBatch:
        """The batch as views of this memory."""
        rows, positions, _ = self.columns
        groups = SlotGroups(*self.groups, self.size.tokens)
        per_row, length = self.size.tokens if self.size.spans == 1 else 1, self._ids.shape[1]
        return StepBatch(self._ids, rows, positions, groups, None, True, length, per_row)

    def picks(self, draft_length: int) -> list[Picks]:
        """Return the choices after the prompts and after each of `draft_length` draft tokens."""
        rows, *logit_rows = self._chosen[: 2 + draft_length, : self.size.windows].unbind()
        return [Picks(rows, row_logits) for row_logits in logit_rows]

    def holds(self, spans: Sequence[TokenSpan], logit_indices: Sequence[int]) -> bool:
        """Return whether these spans and wanted logits fit."""
        enough = len(spans) <= self.size.spans and len(logit_indices) <= self.size.n_logits
        return enough and sum(map(len, spans)) <= self.size.tokens

    def write_spans(self, spans: Sequence[TokenSpan], logit_indices: Sequence[int]) -> None:
        """Write the batch; `logit_indices` are the indices of the tokens that need logits."""
        counts = [len(span) for span in spans]
        rows = np.repeat([span.allocation.first_row for span in spans], counts)
        positions = np.concatenate([np.arange(span.begin, span.end) for span in spans])
        slots = [span.allocation.slot for span in spans]
        self.write([rows, positions, logit_indices], slots, counts)

    def choose(self, rows: Sequence[int], logit_rows: Sequence[Sequence[int]]) -> int | None:
        """Write the rows that choose tokens and the rows of logits that they read.

        Args:
            rows: the first row of each window.
            logit_rows: for each choice, one row of logits per window: after the prompts, then after
                each draft token. Entries beyond a window's draft are not read.

        Returns:
            The draft length of the smallest graph that fits; None if there is none.
        """
        lengths = (length for length in self.size.draft_lengths if length >= len(logit_rows) - 1)
        draft_length = next(lengths, None)
        if draft_length is None or len(rows) > self.size.windows:
            return None
        table = np.full((2 + draft_length, self._chosen.shape[1]), NO_ROW)
        table[: 1 + len(logit_rows), : len(rows)] = [rows, *logit_rows]
        overwrite(self._chosen[: 2 + draft_length], table)
        return draft_length
