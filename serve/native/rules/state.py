"""The token rules' state of every row of the pool, in memory that one copy moves."""

import dataclasses
import math
from typing import Annotated, get_origin, get_type_hints

import torch

NEVER = -math.inf
NOWHERE = 1 << 30  # a position that no sequence reaches
NO_ROW = -1  # in place of a row: nobody chooses
FIRST = 1  # bit of the list that applies to the first token alone
LATER = 0xFF - FIRST  # bits of the others
NO_GUESS = -2  # in place of a token: nothing is guessed, and nothing that is chosen is this

Int64 = Annotated[torch.Tensor, torch.int64]
Float32 = Annotated[torch.Tensor, torch.float32]
Bool = Annotated[torch.Tensor, torch.bool]
Uint8 = Annotated[torch.Tensor, torch.uint8]


@dataclasses.dataclass(frozen=True)
class RowState:
    """Every row's sequence and scores. All tensors but `memory` have one entry a row of the pool.

    Those of a number a row lie in memory as they stand here, the widest first, so that each is
    aligned.

    A slot's rows stand side by side, the leader first. What a slot has once stands at its leader:
    what was heard at start-of-transcript, and the best hypothesis of a search.
    """

    memory: torch.Tensor  # uint8, of all that follow: what has one entry a row, then the tables
    tokens: torch.Tensor  # int64 (rows, n_text_ctx): prompt, then what was sampled
    source: torch.Tensor  # int32 (rows, n_text_ctx): whose cache holds each position of its past
    best_tokens: torch.Tensor  # int64 (rows, n_text_ctx): as `tokens`, of the best ended hypothesis
    position: Int64  # the next token to feed
    prompt_len: Int64
    text_begin: Int64  # rules count from here; before prompt_len after a prefix
    limit: Int64  # the sequence ends when it has this many tokens
    loop_at: Int64  # from this position on it may be ended as a loop; see `loops.py`
    seed: Int64
    last_timestamp: Int64  # highest timestamp id said; 0 = none yet
    language: Int64  # the likeliest language's token id at start-of-transcript; -1 = not known yet
    leader: Int64  # the first row of its slot
    beam: Int64  # rows of the search that it is part of; 1 = it stands for itself
    needed: Int64  # so many hypotheses end a search
    ended: Int64  # hypotheses of the search so far
    best_length: Int64  # sampled tokens of the best hypothesis, no end of text
    no_repeat_ngram: Int64  # so many tokens are never sampled twice; 0 = off
    root: Int64  # of the trie of its phrases; -1 = none
    node: Int64  # where it is in that
    temperature: Float32  # 0 = greedy
    logprob_sum: Float32  # over the sampled tokens, end of text included
    no_speech_prob: Float32
    language_prob: Float32
    length_penalty: Float32  # exponent of the length that divides a hypothesis's sum
    repetition_penalty: Float32  # 1 = off
    best_score: Float32
    best_logprob_sum: Float32  # of the best hypothesis, end of text included
    boost: Float32  # what phrases have earned of a search's `logprob_sum`
    timestamps: Bool  # timestamp rules apply
    lists: Uint8  # of forbidden tokens that apply to it, a bit each: see `definition.LISTS`
    finished: Bool  # free rows count as finished
    best_is_ended: Bool  # end of text ended the best hypothesis, not its limit
    trusted: Bool  # every token of its draft so far was what the rules chose

    def to(self, device: torch.device) -> "RowState":
        """A copy on another device; from pinned memory, without waiting."""
        return self._at(self.memory.to(device, non_blocking=True))

    def pinned(self) -> "RowState":
        """A copy in host memory that the device can read and write while the host goes on."""
        return self._at(self.memory.pin_memory())

    def follow(self, other: "RowState", rows: int, *, searched: bool) -> None:
        """Become what another is, without waiting where this one is pinned.

        Args:
            other: of as many rows.
            rows: only so many, from the first on, have their tokens copied.
            searched: whether their best hypotheses' tokens are copied, too.
        """
        end = _begin_of_tables(len(self.tokens)) + self.tokens[:rows].nbytes
        self.memory[:end].copy_(other.memory[:end], non_blocking=True)
        if searched:
            self.best_tokens[:rows].copy_(other.best_tokens[:rows], non_blocking=True)

    def put(self, rows: torch.Tensor, new: "RowState") -> None:
        """Let some rows begin anew.

        Args:
            rows: int64 (m,), of this state.
            new: m rows as the host wrote them; `leader` counts this state's rows. It has as many
                columns as its longest prompt. What it says of `source` is not read: a prompt is fed
                to its leader, and all that follows to the row itself.
        """
        self.tokens[rows, : new.tokens.shape[1]] = new.tokens
        for name in _LAYOUT:
            getattr(self, name).index_copy_(0, rows, getattr(new, name))
        prompt = torch.arange(self.source.shape[1], device=rows.device) < new.prompt_len[:, None]
        self.source[rows] = torch.where(prompt, new.leader[:, None], rows[:, None]).int()

    def _at(self, memory: torch.Tensor) -> "RowState":
        """The same in other memory."""
        return _carved(memory, *self.tokens.shape)


_LAYOUT: dict[str, torch.dtype] = {  # of what has one entry a row; the tables stand behind it
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RowState, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def new_state(rows: int, n_text_ctx: int, device: torch.device) -> RowState:
    """State of free rows, each of which would stand for itself and be decoded greedily."""
    state = _carved(
        torch.zeros(_bytes(rows, n_text_ctx), dtype=torch.uint8, device=device), rows, n_text_ctx
    )
    own = torch.arange(rows, device=device)
    state.source.copy_(own[:, None])
    state.leader.copy_(own)
    for field in (state.prompt_len, state.text_begin, state.beam, state.needed):
        field.fill_(1)
    for field in (state.length_penalty, state.repetition_penalty):
        field.fill_(1.0)
    state.loop_at.fill_(NOWHERE)
    state.language.fill_(-1)
    state.root.fill_(-1)
    state.best_score.fill_(NEVER)
    state.lists.fill_(FIRST)
    state.finished.fill_(True)
    return state


_TABLES = {"tokens": torch.int64, "best_tokens": torch.int64, "source": torch.int32}


def _begin_of_tables(rows: int) -> int:
    """Behind what has one entry a row, aligned as kernels like it."""
    size = rows * sum(dtype.itemsize for dtype in _LAYOUT.values())
    return size + -size % 16


def _bytes(rows: int, n_text_ctx: int) -> int:
    widths = sum(dtype.itemsize for dtype in _TABLES.values())
    return _begin_of_tables(rows) + rows * n_text_ctx * widths


def _carved(memory: torch.Tensor, rows: int, n_text_ctx: int) -> RowState:
    """The fields as views of their memory."""
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
    """Which rows choose a token, and from which logits.

    The rows of a search stand side by side, its leader first, and choose together. In its first
    choice all of them read its leader's logits, and `logprob_sum` of all but the leader is -inf.
    """

    rows: torch.Tensor  # int64 (m,); `NO_ROW` = none
    at: torch.Tensor  # int64 (m,): the line of the logits that each reads
