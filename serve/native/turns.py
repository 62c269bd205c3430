"""Drafted turns for CUDA graphs: guesses, the step that verifies them all, the choice of tokens.

What `drafting` does with the host's help is here done by the device alone, for the same answers.
No host looks up how far each row has come: every turn the draft decoder is fed the last two known
tokens, which catches up with whatever the turn before left out, and the rules choose as often as
they could at most; rows whose guess was wrong, or that have finished, stay as they are. Single
steps, which rows take beside a search, leave gaps in what the draft decoder knows: then its guesses
are worse, and the answers the same.
"""

import dataclasses
import itertools

import torch

from serve.native.kernels.feed import Feed, Groups
from serve.native.parts import Parts
from serve.native.rules.state import Picks


@dataclasses.dataclass(frozen=True)
class _Outline:
    """The constants of all turns of so many rows; a captured constant costs a kernel a turn.

    The feeds of a turn's steps stand in one tensor, behind each other: the last two known tokens
    of every row, then one guess of every row for each further guess, then what is verified.
    """

    steps: list[slice]  # where the feeds of each step are; even, for kernels know their alignment
    rows: torch.Tensor  # int64 (feeds,)
    ahead: torch.Tensor  # int64 (feeds,): their positions, 0 being the next to be fed
    last: torch.Tensor  # int64 (rows,): of the first step, whose logits are asked for
    picks: list[Picks]  # for each choice of tokens

    @staticmethod
    def of(rows: int, guesses: int, device: torch.device) -> "_Outline":
        """For turns of so many rows and guesses."""
        spans = [(-1, 1), *((i, i + 1) for i in range(1, guesses)), (0, guesses + 1)]
        steps, row_of, ahead = list[slice](), list[int](), list[int]()
        for begin, end in spans:
            feeds = list(itertools.product(range(rows), range(begin, end)))
            steps.append(slice(len(row_of), len(row_of) + len(feeds)))
            feeds += [(0, 0)] * (len(feeds) % 2)
            row_of += [row for row, _ in feeds]
            ahead += [at for _, at in feeds]
        every = torch.arange(rows, device=device)
        return _Outline(
            steps=steps,
            rows=torch.tensor(row_of, device=device),
            ahead=torch.tensor(ahead, device=device),
            last=every * 2 + 1,
            picks=[Picks(every, every * (guesses + 1) + turn) for turn in range(guesses + 1)],
        )


class DraftTurns:
    """Records turns of rows that stand alone in their slots.

    Args:
        parts: what the windows are decoded with; the second decoder's caches hold the prompts.
        count: guesses a turn.
    """

    def __init__(self, parts: Parts, count: int) -> None:
        assert parts.draft is not None, "nothing guesses"
        self._network = parts.network
        self._cache = parts.cache
        self._state = parts.state
        self._advance = parts.advances[False]
        self._guess = parts.guess
        self._decoder, self._draft_cache = parts.draft
        self.count = count
        self._outlines: dict[int, _Outline] = {}
        # Feeds a row of the steps: the first, those of further guesses, the one that verifies.
        self._each = torch.tensor([2, 1, count + 1], device=parts.state.tokens.device)[
            :, None, None
        ]

    def take(self, table: torch.Tensor, rows: int) -> None:
        """One turn of the first rows.

        Args:
            table: int64 (3, slots): of each group its slot, its row, and 1; 0 = no group.
            rows: how many, and so groups; what is recorded is for so many.
        """
        state, outline = self._state, self._outline(rows)
        *guessing, verifying = self._feeds(outline, table, rows)
        for turn, feed in enumerate(guessing, 1):
            wanted = outline.last if turn == 1 else None
            logits = self._decoder.step(feed, self._draft_cache, wanted)
            self._guess(state, outline.picks[0].rows, logits, turn)
        logits = self._network.step(verifying, self._cache)
        state.trusted[:rows].fill_(True)
        for picks in outline.picks:
            self._advance(state, picks, logits, drafted=True)

    def _outline(self, rows: int) -> _Outline:
        """Of turns of so many rows; made before the first of them is captured, as all run once."""
        if rows not in self._outlines:
            device = self._state.tokens.device
            self._outlines[rows] = _Outline.of(rows, self.count, device)
        return self._outlines[rows]

    def _feeds(self, outline: _Outline, table: torch.Tensor, rows: int) -> list[Feed]:
        """Make the feeds of a turn's steps, from where the rows are now."""
        state = self._state
        n_ctx = state.tokens.shape[1]
        at = state.position.index_select(0, outline.rows).add_(outline.ahead).clamp_(0, n_ctx - 1)
        scaled = table[1:] * self._each  # (kinds of step, 2, slots)
        kinds = [0, *[1] * (self.count - 1), 2]
        feeds = []
        for step, kind in zip(outline.steps, kinds, strict=True):
            each = (2, 1, self.count + 1)[kind]
            first, count = scaled[kind, :, :rows].unbind()
            groups = Groups(table[0, :rows], first, count, each)
            rows_at = (outline.rows[step], at[step])
            feeds.append(Feed(state.tokens, *rows_at, groups, None, each > 1, n_ctx, each))
        return feeds
