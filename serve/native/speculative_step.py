"""A step of speculative decoding without the host: draft, verify and choose.

The host does not look up the position of each row, so CUDA graphs can record a step. Each time the
draft decoder computes the last two known tokens, which covers the token that the step before may
have left out. The samplers always run for the full draft. Rows with a rejected draft token, and
finished rows, stay unchanged until the next step. Rows beside a beam search take single steps,
which leave gaps in the draft decoder's cache. The drafts are then worse, and the answers the same.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from serve.native.kernels.step_batch import SlotGroups, StepBatch
from serve.native.resources import RuntimeResources
from serve.native.rules.state import Picks


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """The constants of a step of some rows; making a constant in a graph would cost a kernel.

    One tensor holds the tokens of all decoder steps in turn: the last two known tokens of every
    row, then one draft token of every row for each further draft token, then the tokens to verify.
    """

    steps: list[slice]  # the tokens of each decoder step; of even length, since kernels need that
    rows: torch.Tensor  # int64 (tokens,)
    ahead: torch.Tensor  # int64 (tokens,), relative to the next position
    last: torch.Tensor  # int64 (rows,): the tokens of the first step that need logits
    picks: list[Picks]  # for each choice of tokens

    @staticmethod
    def of(rows: Sequence[int], draft_length: int, device: torch.device) -> "StepLayout":
        """Make the layout of some rows with `draft_length` draft tokens each."""
        spans = [(-1, 1), *((i, i + 1) for i in range(1, draft_length)), (0, draft_length + 1)]
        steps, row_of, ahead = list[slice](), list[int](), list[int]()
        for begin, end in spans:
            tokens = list(itertools.product(rows, range(begin, end)))
            steps.append(slice(len(row_of), len(row_of) + len(tokens)))
            tokens += [(rows[0], 0)] * (len(tokens) % 2)
            row_of += [row for row, _ in tokens]
            ahead += [offset for _, offset in tokens]
        every = torch.tensor(rows, device=device)
        lines = torch.arange(len(rows), device=device)
        return StepLayout(
            steps=steps,
            rows=torch.tensor(row_of, device=device),
            ahead=torch.tensor(ahead, device=device),
            last=lines * 2 + 1,
            picks=[
                Picks(every, lines * (draft_length + 1) + turn) for turn in range(draft_length + 1)
            ],
        )


class SpeculativeStep:
    """A step with a draft, for rows that are alone in their slots.

    Args:
        parts: the network, its caches and its samplers; the draft decoder's cache has the prompts.
        count: the number of draft tokens per row.
    """

    def __init__(self, parts: RuntimeResources, count: int) -> None:
        assert parts.draft is not None, "the engine has no draft decoder"
        self._network = parts.network
        self._cache = parts.cache
        self._state = parts.state
        self._advance = parts.advances[False]
        self._guess = parts.guess
        self._decoder, self._draft_cache = parts.draft
        self.count = count
        # Tokens per row of the first draft step, of the other draft steps, and of the verification.
        self._tokens_per_row = torch.tensor([2, 1, count + 1], device=parts.state.tokens.device)[
            :, None, None
        ]

    def layout_of(self, rows: Sequence[int]) -> StepLayout:
        """Make the layout of a step of some rows."""
        return StepLayout.of(rows, self.count, self._state.tokens.device)

    def run(self, layout: StepLayout, table: torch.Tensor, length: int) -> None:
        """Run one step.

        Args:
            layout: the rows.
            table: int64 (3, at least rows): the slot of each row, the row's index in the layout,
                and 1; all 0 for a row without a slot.
            length: greater than every position of the step, or n_text_ctx.
        """
        state = self._state
        *drafting, verifying = self._batches(layout, table, length)
        for turn, batch in enumerate(drafting, 1):
            wanted = layout.last if turn == 1 else None
            logits = self._decoder.step(batch, self._draft_cache, wanted)
            self._guess(state, layout.picks[0].rows, logits, turn)
        logits = self._network.step(verifying, self._cache)
        state.trusted.index_fill_(0, layout.picks[0].rows, True)
        for picks in layout.picks:
            self._advance(state, picks, logits, drafted=True)

    def _batches(self, layout: StepLayout, table: torch.Tensor, length: int) -> list[StepBatch]:
        """Make the batches of the decoder steps from the rows' current positions."""
        state = self._state
        last = state.tokens.shape[1] - 1
        position = state.position.index_select(0, layout.rows).add_(layout.ahead).clamp_(0, last)
        rows = len(layout.last)
        # (kinds of step, 2, slots): the first token of each slot, and the number of tokens.
        token_ranges = table[1:] * self._tokens_per_row
        kinds = [0, *[1] * (self.count - 1), 2]
        batches = []
        for step, kind in zip(layout.steps, kinds, strict=True):
            per_row = (2, 1, self.count + 1)[kind]
            first, count = token_ranges[kind, :, :rows].unbind()
            groups = SlotGroups(table[0, :rows], first, count, per_row)
            rows_at = (layout.rows[step], position[step])
            batches.append(
                StepBatch(state.tokens, *rows_at, groups, None, per_row > 1, length, per_row)
            )
        return batches
