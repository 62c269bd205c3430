"""Which implementation of the token rules runs: the definition, or its twin on the GPU."""

from typing import Literal, Protocol

import torch

from serve.native.rules.definition import Rules
from serve.native.rules.state import Picks, RowState


class Advance(Protocol):
    """Chooses rows' next tokens from logits."""

    def __call__(
        self, state: RowState, picks: Picks, logits: torch.Tensor, drafted: bool = False
    ) -> None:
        """See `Rules.advance`."""
        ...


def choose_advance(
    kernels: Literal["torch", "triton"], rules: Rules, most: int, searching: bool
) -> Advance:
    """The implementation that goes with a network's kernels.

    Args:
        kernels: what the network computes with.
        rules: the checkpoint's.
        most: the most picks of any call.
        searching: whether any row may be part of a search; only the GPU's kernels ask, which are
            compiled for it.
    """
    if kernels == "torch":
        return rules.advance
    from serve.native.rules.kernel import TritonChoice  # noqa: PLC0415 - only where triton is

    return TritonChoice(rules, most, searching).advance
