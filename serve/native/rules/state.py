"""The state of the token rules for every row, in one block of memory that one copy moves."""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, get_origin, get_type_hints

import torch

from serve.native.kernels.gpu import staged

NEG_INF = -math.inf
NOWHERE = 1 << 30  # a position beyond every sequence
NO_ROW = -1  # instead of a row: no choice
FIRST = 1  # bit of the list that applies to the first token alone
LATER = 0xFF - FIRST  # bits of the other lists
NO_DRAFT = -2  # instead of a draft token; differs from every token

Int64 = Annotated[torch.Tensor, torch.int64]
Float32 = Annotated[torch.Tensor, torch.float32]
Bool = Annotated[torch.Tensor, torch.bool]
Uint8 = Annotated[torch.Tensor, torch.uint8]


@dataclasses.dataclass(frozen=True)
class RowState:
    """The sequence and the scores of every row; all tensors but `memory` have one entry per row.

    The tensors of one number per row lie in memory in the order below, the widest dtype first, so
    that each is aligned.

    The rows of a slot are adjacent, the leader first. The leader holds the values of the slot:
    those at start-of-transcript, and the best hypothesis of a beam search.
    """

    memory: torch.Tensor  # uint8: the memory of all other tensors, the tables last
    tokens: torch.Tensor  # int64 (rows, n_text_ctx): the prompt, then the sampled tokens
    source: torch.Tensor  # int32 (rows, n_text_ctx): the row that cached each past position
    best_tokens: torch.Tensor  # int64 (rows, n_text_ctx): as `tokens`, of the best hypothesis
    position: Int64  # position of the next token to compute
    prompt_len: Int64
    text_begin: Int64  # where the text begins for the rules; before prompt_len with a prefix
    limit: Int64  # the sequence ends when it has this many tokens
    loop_at: Int64  # the first position at which it may end as a loop; see `loops.py`
    seed: Int64
    last_timestamp: Int64  # highest timestamp token so far; 0 = none yet
    language: Int64  # token id of the likeliest language at start-of-transcript; -1 = unknown
    leader: Int64  # the slot's first row
    beam: Int64  # the number of rows in the beam search; 1 = no beam search
    needed: Int64  # the number of hypotheses that ends a search
    ended: Int64  # the number of hypotheses so far
    best_length: Int64  # sampled tokens of the best hypothesis without end of text
    no_repeat_ngram: Int64  # the length of n-grams that are never sampled twice; 0 = off
    root: Int64  # root of the phrases' trie; -1 = none
    node: Int64  # current node of that trie
    temperature: Float32  # 0 = greedy
    logprob_sum: Float32  # sum over the sampled tokens with end of text
    no_speech_prob: Float32
    language_prob: Float32
    length_penalty: Float32  # exponent of the length that divides a hypothesis's sum
    repetition_penalty: Float32  # 1 = off
    best_score: Float32
    best_logprob_sum: Float32  # sum over the best hypothesis with end of text
    boost: Float32  # the part of a beam search's `logprob_sum` that phrases have added
    timestamps: Bool  # the timestamp rules apply
    lists: Uint8  # a bit for each suppress list that applies; see `reference_rules.LISTS`
    finished: Bool  # free rows count as finished
    best_is_ended: Bool  # the best hypothesis ended with end of text, not at its limit
    trusted: Bool  # all draft tokens so far were accepted

    def pinned(self) -> "RowState":
        """Copy into pinned host memory, which the device can access asynchronously."""
        return _views_of(self.memory.pin_memory(), *self.tokens.shape)

    def follow(self, other: "RowState", rows: int, *, searched: bool) -> None:
        """Copy another state into this one, without waiting if this one is pinned.

        Args:
            other: a state with as many rows.
            rows: the number of rows to copy the tokens of, from the first on.
            searched: whether to copy the best hypotheses' tokens too.
        """
        end = _begin_of_tables(len(self.tokens)) + self.tokens[:rows].nbytes
        self.memory[:end].copy_(other.memory[:end], non_blocking=True)
        if searched:
            self.best_tokens[:rows].copy_(other.best_tokens[:rows], non_blocking=True)

    def write_rows(self, rows: torch.Tensor, new: "RowState") -> None:
        """Overwrite some rows with the initial state of new jobs, without waiting for a GPU.

        Args:
            rows: int64 (m,), the rows to overwrite.
            new: a state on the host of m rows, with as many columns as the longest prompt has
                tokens. `leader` has row indices of this state, not of `new`. `source` is ignored,
                because it follows from `leader`: prompts are in the leader's cache, later tokens in
                the row's own.
        """
        device, (count, length) = self.memory.device, new.tokens.shape
        memory = staged(new.memory, device).to(device, non_blocking=True)
        blocks = _number_blocks(self.memory, len(self.tokens)), _number_blocks(memory, count)
        for block, new_block in zip(*blocks, strict=True):
            block.index_copy_(1, rows, new_block)
        begin = _begin_of_tables(count)
        tokens = memory[begin : begin + new.tokens.nbytes].view(torch.int64)
        self.tokens[rows, :length] = tokens.view(count, length)
        positions = torch.arange(self.source.shape[1], device=rows.device)
        prompt, leader = positions < self.prompt_len[rows, None], self.leader[rows, None]
        self.source[rows] = torch.where(prompt, leader, rows[:, None]).int()


_LAYOUT: dict[str, torch.dtype] = {  # the tensors of one number per row; the tables follow them
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RowState, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def new_state(rows: int, n_text_ctx: int, device: torch.device) -> RowState:
    """Make the state of free rows, with greedy decoding and no beam search."""
    widths = sum(dtype.itemsize for dtype in _TABLES.values())
    size = _begin_of_tables(rows) + rows * n_text_ctx * widths
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    state = _views_of(buffer, rows, n_text_ctx)
    row_ids = torch.arange(rows, device=device)
    state.source.copy_(row_ids[:, None])
    state.leader.copy_(row_ids)
    for field in (state.prompt_len, state.text_begin, state.beam, state.needed):
        field.fill_(1)
    for field in (state.length_penalty, state.repetition_penalty):
        field.fill_(1.0)
    state.loop_at.fill_(NOWHERE)
    state.language.fill_(-1)
    state.root.fill_(-1)
    state.best_score.fill_(NEG_INF)
    state.lists.fill_(FIRST)
    state.finished.fill_(True)
    return state


_WIDTHS = collections.Counter(dtype.itemsize for dtype in _LAYOUT.values())  # the widest first
_INTEGERS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}  # by width
_TABLES = {"tokens": torch.int64, "best_tokens": torch.int64, "source": torch.int32}


def _begin_of_tables(rows: int) -> int:
    """Return the aligned offset of the tables, after the tensors of one number per row."""
    size = rows * sum(dtype.itemsize for dtype in _LAYOUT.values())
    return size + -size % 16


def _number_blocks(memory: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of one number per row as integers: (tensors of this width, rows)."""
    begin = 0
    for width, count in _WIDTHS.items():
        end = begin + count * rows * width
        yield memory[begin:end].view(_INTEGERS[width]).view(count, rows)
        begin = end


def _views_of(memory: torch.Tensor, rows: int, n_text_ctx: int) -> RowState:
    """Return the fields as views of the memory."""
    fields, begin = {}, 0
    for name, dtype in _LAYOUT.items():
        end = begin + rows * dtype.itemsize
        fields[name] = memory[begin:end].view(dtype)
        begin = end
    begin = _begin_of_tables(rows)
    for name, dtype in _TABLES.items():
        end = begin + rows * n_text_ctx * dtype.itemsize
        fields[name] = memory[begin:end].view(dtype).view(rows, n_text_ctx)
        begin = end
    return RowState(memory=memory, **fields)


@dataclasses.dataclass(frozen=True)
class Picks:
    """The rows that choose a token, and the rows of logits that they read.

    The rows of a beam search are adjacent, the leader first, and choose together. In the first
    choice all of them read the leader's logits, and `logprob_sum` of the others is -inf.
    """

    rows: torch.Tensor  # int64 (m,); `NO_ROW` = none
    logit_rows: torch.Tensor  # int64 (m,): the row of the logits that each row reads
    searching: bool = True  # whether a row may be in a beam search; kernels without it are smaller
