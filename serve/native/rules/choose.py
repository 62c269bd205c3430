"""Which implementation of the token rules runs: the definition, or its twin on the GPU."""

from collections.abc import Callable

import torch

from serve.native.kernels.choose import Ops
from serve.native.rules.definition import Rules, SlotState

Advance = Callable[[SlotState, torch.Tensor, bool], None]
"""As `Rules.advance`."""


def choose_advance(ops: Ops, rules: Rules, slots: int) -> Advance:
    """The choice of the next token that goes with the operations."""
    if ops.name == "torch":
        return rules.advance
    from serve.native.rules.kernel import TritonChoice  # noqa: PLC0415 - only where triton is

    return TritonChoice(rules, slots).advance
