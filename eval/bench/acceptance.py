"""Drafts of which a chosen share is right, for engines whose weights are made up.

What a draft decoder is worth depends on how often the network says what it guesses, and made-up
weights agree on nothing. So the guess becomes what the network says, or does not, as if by a throw
of dice; everything is computed as ever.
"""

import torch

from serve.native.decoder import Cache
from serve.native.kernels.feed import Feed
from serve.native.network import Whisper
from serve.native.runtime import NativeRuntime

_OTHER = 1000  # a token of text
_SURE = 1e4  # of logits: above all others
_DICE = 10_007  # sides


def accepting(share: float) -> type[NativeRuntime]:
    """A runtime whose network agrees with such a share of guesses."""

    class Agreeing(Whisper):
        """Says what was guessed, or something else."""

        def step(
            self,
            feed: Feed,
            cache: Cache,
            wanted: torch.Tensor | None = None,
            queries: dict[int, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            logits = super().step(feed, cache, wanted, queries)
            if feed.several and wanted is None and queries is None:  # guesses are verified
                logits.scatter_(1, _following(feed, share)[:, None], _SURE)
            return logits

    class AgreeingRuntime(NativeRuntime):
        """Opens engines with that network."""

        network_class = Agreeing

    return AgreeingRuntime


def _following(feed: Feed, share: float) -> torch.Tensor:
    """Choose what follows each feed: the guess that stands there, or another token; int64 (n,)."""
    after = (feed.positions + 1).clamp(max=feed.ids.shape[1] - 1)
    guess = feed.ids[feed.rows, after]
    thrown = (feed.rows * 7_919 + after * 104_729) % _DICE
    return torch.where(thrown < share * _DICE, guess, _OTHER + (guess == _OTHER))
