"""Which implementation of the token rules runs: the definition, or its twin on the GPU."""

from collections.abc import Callable
from typing import Literal

import torch

from serve.native.rules.definition import Rules, SlotState

Advance = Callable[[SlotState, torch.Tensor], None]
"""Chooses every slot's next token from logits; as `Rules.advance`."""


def choose_advance(
    kernels: Literal["torch", "triton"],
    rules: Rules,
    slots: int,
    anyone_samples: Callable[[], bool],
) -> Advance:
    """The implementation that goes with a network's kernels.

    Args:
        kernels: what the network computes with.
        rules: the checkpoint's.
        slots: the most slots of any call.
        anyone_samples: tells the host whether any slot's temperature is above 0; only plain torch
            asks, for the GPU's kernel reads the temperatures itself.
    """
    if kernels == "torch":
        return lambda state, logits: rules.advance(state, logits, anyone_samples())
    from serve.native.rules.kernel import TritonChoice  # noqa: PLC0415 - only where triton is

    return TritonChoice(rules, slots).advance
