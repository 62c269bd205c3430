"""Arguments of the rules' kernels: the state of rows, results of the scan, and constants."""

import dataclasses
from typing import NamedTuple

import torch
import triton.language as tl

from serve.native.rules.state import RowState

WIDEST = tl.constexpr(8)  # maximum rows of a search; a power of two
SUMS = tl.constexpr(4)  # results of a tile: peak, mass, best score and its logit


class RowPointers(NamedTuple):
    """The tensors of a `RowState` that kernels use; bool is uint8."""

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
    lists: torch.Tensor
    finished: torch.Tensor
    best_is_ended: torch.Tensor
    trusted: torch.Tensor


def fields_of(state: RowState) -> RowPointers:
    tensors = (getattr(state, name) for name in RowPointers._fields)
    return RowPointers(*(x.view(torch.uint8) if x.dtype == torch.bool else x for x in tensors))


class Scan(NamedTuple):
    """Partial results of each pick and tile of the vocabulary."""

    peaks: torch.Tensor  # float32 (picks,): the highest logit so far; only for boosted rows
    sums: torch.Tensor  # float32 (picks, tiles, SUMS)
    ids: torch.Tensor  # int32 (picks, tiles): the best token
    # Only for rows with a beam search or phrases, in descending order:
    tops: torch.Tensor  # float32 (picks, tiles, keep)
    top_ids: torch.Tensor  # int32 (picks, tiles, keep)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Compile-time parameters of the rules' kernels."""

    eot: int
    no_timestamps: int
    timestamp_begin: int
    newest_first: int  # the latest timestamp that may begin a text
    tiles: int
    text_tiles: int
    tiles_padded: int
    keep: int  # candidates that a tile keeps for searches and phrases
    searching: bool  # whether any row may be part of a search
    ctx_padded: int
    drafted: bool  # see `TokenRules.advance`
    pdl: bool  # see `serve.native.kernels.linear`
