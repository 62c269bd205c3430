"""Choose the implementation of the token rules: the reference in torch, or Triton kernels."""

from typing import Protocol

import torch

from serve.contract.config import KernelsName
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import Picks, RowState


class Sampler(Protocol):
    """A function that chooses the next tokens of rows from logits."""

    def __call__(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None: ...


class DraftSampler(Protocol):
    """A function that writes draft tokens from the draft decoder's logits."""

    def __call__(
        self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, ahead: int
    ) -> None: ...


def choose_guess(kernels: KernelsName, rules: TokenRules) -> DraftSampler:
    """Return the draft sampler for a network's kernels."""
    if kernels != "triton":
        return rules.guess
    from serve.native.rules.guess_kernel import (  # noqa: PLC0415 - needs triton
        TritonDraftSampler,
    )

    return TritonDraftSampler(rules).guess


def choose_advance(kernels: KernelsName, rules: TokenRules, most: int, searching: bool) -> Sampler:
    """Return the sampler for a network's kernels.

    Args:
        kernels: the kernels of the network.
        rules: the checkpoint's token rules.
        most: the maximum number of picks of a call.
        searching: whether any row may be part of a beam search; Triton kernels are compiled for it.
    """
    if kernels != "triton":
        return rules.advance
    from serve.native.rules.kernel import TritonSampler  # noqa: PLC0415 - needs triton

    return TritonSampler(rules, most, searching).advance
