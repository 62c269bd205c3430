"""Drafted turns for CUDA graphs: guesses, the step that verifies them all, the choice of tokens.

What `drafting` does with the host's help is here done by the device alone, for the same answers.
No host looks up how far each row has come: every turn the draft decoder is fed the last two known
tokens, which catches up with whatever the turn before left out, and the rules choose as often as
they could at most; rows whose guess was wrong, or that have finished, stay as they are. Single
steps, which rows take beside a search, leave gaps in what the draft decoder knows: then its guesses
are worse, and the answers the same.
"""

from collections.abc import Callable

import torch

from serve.native.decoder import Cache, Decoder
from serve.native.kernels.feed import Feed, Groups
from serve.native.network import Whisper
from serve.native.rules.choose import Advance
from serve.native.rules.state import Picks, RowState


class DraftTurns:
    """Records turns of rows that stand alone in their slots.

    Args:
        network, cache, state: of the same slots and rows.
        advance: chooses tokens without the host, for rows that do not search.
        decoder, draft_cache: the second decoder, and caches of its own, which hold the prompts.
        suppress: float32 (n_vocab), -inf for tokens that are never guessed.
        count: guesses a turn.
    """

    def __init__(
        self,
        network: Whisper,
        cache: Cache,
        state: RowState,
        advance: Advance,
        decoder: Decoder,
        draft_cache: Cache,
        suppress: torch.Tensor,
        count: int,
    ) -> None:
        self._network = network
        self._cache = cache
        self._state = state
        self._advance = advance
        self._decoder = decoder
        self._draft_cache = draft_cache
        self._suppress = suppress
        self.count = count

    def take(self, slots: torch.Tensor, first: torch.Tensor, busy: torch.Tensor) -> None:
        """One turn of the first rows, as many as there are groups.

        Args:
            slots, first, busy: int64 (n,): of each group its slot, its row, and 1; 0 = no group.
        """
        state, each = self._state, self.count + 1
        position = state.position[: len(slots)].clone()

        def feed(begin: int, end: int) -> Feed:
            """The tokens at positions from `begin` to before `end`, 0 being the next to be fed."""
            count = end - begin
            rows = torch.arange(len(slots), device=slots.device).repeat_interleave(count)
            at = position[:, None] + torch.arange(begin, end, device=slots.device)
            at = at.clamp(0, state.tokens.shape[1] - 1).flatten()
            groups = Groups(slots, first * count, busy * count, count)
            return Feed(state.tokens, rows, at, groups, None, count > 1, state.tokens.shape[1])

        self._guess(position, feed)
        logits = self._network.step(feed(0, each), self._cache)
        rows = torch.arange(len(slots), device=slots.device)
        state.trusted[: len(slots)].fill_(True)
        for turn in range(each):
            self._advance(state, Picks(rows, rows * each + turn), logits, drafted=True)

    def _guess(self, position: torch.Tensor, feed: Callable[[int, int], Feed]) -> None:
        """Write guesses behind the next token of every row."""
        last = torch.arange(len(position), device=position.device) * 2 + 1
        logits = self._decoder.step(feed(-1, 1), self._draft_cache, last)
        for turn in range(1, self.count + 1):
            self._write(position + turn, (logits + self._suppress).argmax(dim=-1))
            if turn < self.count:
                logits = self._decoder.step(feed(turn, turn + 1), self._draft_cache)

    def _write(self, at: torch.Tensor, guesses: torch.Tensor) -> None:
        """Put guesses at a position of every row; beyond the last one there is none."""
        tokens = self._state.tokens[: len(at)]
        place = at.clamp(max=tokens.shape[1] - 1)[:, None]
        inside = (at < tokens.shape[1])[:, None]
        known = tokens.gather(1, place)
        tokens.scatter_(1, place, torch.where(inside, guesses[:, None], known))
