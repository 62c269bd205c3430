"""Choose the implementation of the token rules: the reference in torch, or Triton kernels."""

from collections.abc import Collection
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
        self, state: RowState, rows: torch.Tensor, logits: torch.Tensor, offset: int
    ) -> None: ...


def choose_samplers(
    kernels: KernelsName, rules: TokenRules, max_picks: int, searching: Collection[bool]
) -> tuple[dict[bool, Sampler], DraftSampler]:
    """Return the samplers for a network's kernels, and the sampler of draft tokens.

    Args:
        kernels: the kernels of the network.
        rules: the checkpoint's token rules.
        max_picks: the maximum number of picks of a call.
        searching: the keys of the samplers: whether any row may be part of a beam search. The
            Triton kernels without it are smaller.
    """
    if kernels != "triton":
        return dict.fromkeys(searching, rules.advance), rules.write_draft
    from serve.native.rules.draft_kernel import (  # noqa: PLC0415 - needs triton
        TritonDraftSampler,
    )
    from serve.native.rules.kernel import TritonSampler  # noqa: PLC0415 - needs triton

    samplers: dict[bool, Sampler] = {
        searches: TritonSampler(rules, max_picks, searches).advance for searches in searching
    }
    return samplers, TritonDraftSampler(rules).write_draft
