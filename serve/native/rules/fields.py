"""Arguments of the rules' kernels: the state of rows, results of the scan, and constants."""

import collections
import dataclasses
from typing import NamedTuple

import torch
import triton.language as tl

from serve.native.rules.state import RowState

WIDEST = tl.constexpr(8)  # maximum rows of a search; a power of two
SUMS = tl.constexpr(4)  # of a tile: highest logit, sum of exponentials, best score and its logit


# The tensors of a `RowState` that kernels use, in its order; bool is uint8.
RowPointers = collections.namedtuple(
    "RowPointers",
    "tokens source best_tokens position prompt_len text_begin limit loop_at seed last_timestamp "
    "leader beam needed ended best_length no_repeat_ngram root node temperature logprob_sum "
    "length_penalty repetition_penalty best_score best_logprob_sum boost timestamps lists "
    "finished best_is_ended trusted",
)


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
    max_first_timestamp: int  # the latest timestamp that may begin a text
    tiles: int
    text_tiles: int
    tiles_padded: int
    keep: int  # candidates that a tile keeps for searches and phrases
    searching: bool  # whether any row may be part of a search
    ctx_padded: int
    drafted: bool  # see `TokenRules.advance`
    pdl: bool  # see `serve.native.kernels.linear`
