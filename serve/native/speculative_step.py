"""A step of speculative decoding without the host: draft, verify and choose.

The host does not look up the position of each row, so CUDA graphs can record a step. In each step
the draft decoder first computes the last two known tokens: the previous step may not have computed
the earlier one. The token rules always run for the full draft. Rows with a rejected draft token
stay unchanged until the next step, and so do finished rows. If a beam search runs as well, rows
take single steps, which leave gaps in the draft decoder's cache. Later drafts are then worse, but
the answers are the same.
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
    """The constants of a step of some rows; to make them in a graph would cost kernels.

    The tensors hold the tokens of all decoder steps in turn. The first step has the last two known
    tokens of every row. Each further step has one draft token of every row. The last step has the
    tokens to verify.
    """

    steps: list[slice]  # the tokens of each decoder step; of even length, since kernels need that
    rows: torch.Tensor  # int64 (tokens,)
    offsets: torch.Tensor  # int64 (tokens,), relative to the next position
    last: torch.Tensor  # int64 (rows,): the tokens of the first step that need logits
    picks: list[Picks]  # for each choice of tokens


class SpeculativeStep:
    """A step with a draft, for rows that are alone in their slots.

    Args:
        resources: the network, its caches and its token rules; the draft decoder's cache has the
            prompts.
        count: the number of draft tokens per row.
    """

    def __init__(self, resources: RuntimeResources, count: int) -> None:
        assert resources.draft is not None, "the engine has no draft decoder"
        self._network = resources.network
        self._cache = resources.cache
        self._state = resources.state
        self._rules = resources.rules
        self._decoder, self._draft_cache = resources.draft
        self.count = count
        # Tokens per row of the first draft step, of the other draft steps, and of the verification.
        device = resources.state.tokens.device
        self._tokens_per_row = torch.tensor([2, 1, count + 1], device=device)[:, None, None]

    def layout_of(self, rows: Sequence[int]) -> StepLayout:
        """Make the layout of a step of some rows."""
        device = self._state.tokens.device
        spans = [(-1, 1), *((i, i + 1) for i in range(1, self.count)), (0, self.count + 1)]
        steps, token_rows, offsets = list[slice](), list[int](), list[int]()
        for begin, end in spans:
            tokens = list(itertools.product(rows, range(begin, end)))
            steps.append(slice(len(token_rows), len(token_rows) + len(tokens)))
            tokens += [(rows[0], 0)] * (len(tokens) % 2)
            token_rows += [row for row, _ in tokens]
            offsets += [offset for _, offset in tokens]
        row_indices = torch.tensor(rows, device=device)
        indices = torch.arange(len(rows), device=device)
        first = indices * (self.count + 1)
        return StepLayout(
            steps=steps,
            rows=torch.tensor(token_rows, device=device),
            offsets=torch.tensor(offsets, device=device),
            last=indices * 2 + 1,
            picks=[
                Picks(row_indices, first + index, searching=False)
                for index in range(self.count + 1)
            ],
        )

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
        for offset, batch in enumerate(drafting, 1):
            logit_indices = layout.last if offset == 1 else None
            logits = self._decoder.step(batch, self._draft_cache, logit_indices)
            self._rules.write_draft(state, layout.picks[0].rows, logits, offset)
        logits = self._network.step(verifying, self._cache)
        state.trusted.index_fill_(0, layout.picks[0].rows, True)
        for picks in layout.picks:
            self._rules.advance(state, picks, logits, drafted=True)

    def _batches(self, layout: StepLayout, table: torch.Tensor, length: int) -> list[StepBatch]:
        """Make the batches of the decoder steps from the rows' current positions."""
        state = self._state
        last = state.tokens.shape[1] - 1
        position = state.position.index_select(0, layout.rows).add_(layout.offsets).clamp_(0, last)
        rows = len(layout.last)
        # (kinds of step, 2, slots): the first token of each slot, and the number of tokens.
        token_ranges = table[1:] * self._tokens_per_row
        kinds = [0, *[1] * (self.count - 1), 2]
        batches = []
        for step, kind in zip(layout.steps, kinds, strict=True):
            tokens_per_row = (2, 1, self.count + 1)[kind]
            first, count = token_ranges[kind, :, :rows].unbind()
            groups = SlotGroups(table[0, :rows], first, count, tokens_per_row)
            tokens = (state.tokens, layout.rows[step], position[step])
            lengths = (tokens_per_row > 1, length, tokens_per_row)
            batches.append(StepBatch(*tokens, groups, None, *lengths))
        return batches
