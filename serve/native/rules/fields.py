"""What the rules know of rows, as kernels take it."""

from typing import NamedTuple

import torch

from serve.native.rules.state import RowState


class Fields(NamedTuple):
    """A `RowState` as kernels take it; bool is uint8."""

    tokens: torch.Tensor
    source: torch.Tensor
    best_tokens: torch.Tensor
    position: torch.Tensor
    prompt_len: torch.Tensor
    text_begin: torch.Tensor
    limit: torch.Tensor
    loop_at: torch.Tensor
    seed: torch.Tensor
    last_timestamp: torch.Tensor
    leader: torch.Tensor
    beam: torch.Tensor
    needed: torch.Tensor
    ended: torch.Tensor
    best_length: torch.Tensor
    no_repeat_ngram: torch.Tensor
    root: torch.Tensor
    node: torch.Tensor
    temperature: torch.Tensor
    logprob_sum: torch.Tensor
    length_penalty: torch.Tensor
    repetition_penalty: torch.Tensor
    best_score: torch.Tensor
    best_logprob_sum: torch.Tensor
    boost: torch.Tensor
    timestamps: torch.Tensor
    finished: torch.Tensor
    best_is_ended: torch.Tensor
    trusted: torch.Tensor


def fields_of(state: RowState) -> Fields:
    """The state's tensors."""
    found = (getattr(state, name) for name in Fields._fields)
    return Fields(*(x.view(torch.uint8) if x.dtype == torch.bool else x for x in found))
