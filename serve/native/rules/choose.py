"""Which implementation of the token rules runs: the definition, or its twin on the GPU."""

from typing import Protocol

import torch

from serve.contract.config import KernelsName
from serve.native.rules.definition import Rules
from serve.native.rules.state import Picks, RowState


class Advance(Protocol):
    """Chooses rows' next tokens from logits."""

    def __call__(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None: ...


class Guess(Protocol):
    """Writes what a draft decoder guesses."""

    def __call__(
        self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, ahead: int
    ) -> None: ...


def choose_guess(kernels: KernelsName, rules: Rules) -> Guess:
    """The implementation that goes with a network's kernels."""
    if kernels != "triton":
        return rules.guess
    from serve.native.rules.guess_kernel import (  # noqa: PLC0415 - only where triton is
        TritonGuess,
    )

    return TritonGuess(rules).guess


def choose_advance(kernels: KernelsName, rules: Rules, most: int, searching: bool) -> Advance:
    """The implementation that goes with a network's kernels.

    Args:
        kernels: what the network computes with.
        rules: the checkpoint's.
        most: the most picks of any call.
        searching: whether any row may be part of a search; only the GPU's kernels ask, which are
            compiled for it.
    """
    if kernels != "triton":
        return rules.advance
    from serve.native.rules.kernel import TritonChoice  # noqa: PLC0415 - only where triton is

    return TritonChoice(rules, most, searching).advance
