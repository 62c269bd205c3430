"""Sequences that have begun to repeat themselves, and are ended: in plain torch.

A decoder that finds nothing to go by often says the same few words over and over until its limit.
Tokens alone tell: all of the last ones are those that stand a period before them. Timestamps differ
from one time to the next and stand for each other.
"""

from collections.abc import Sequence

import torch

from serve.native.rules.state import RowState

PERIODS = 32  # tokens of the longest words that are repeated; a power of two
REPEATS = 4  # times that they are said again
EVERY = 8  # sampled tokens between two looks
MATCH = 8  # of so many last tokens the shortest period is taken


def end_loops(state: RowState, rows: torch.Tensor, timestamp_begin: int) -> None:
    """Let the next token be the last of rows that repeat themselves, by lowering their limit.

    Of a search only the leader's sequence, its likeliest, is looked at.

    Args:
        state: `limit` is changed at `rows`.
        rows: int64 (m,), about to choose a token.
        timestamp_begin: token id.
    """
    for row in rows[state.position[rows] >= state.loop_at[rows]].tolist():
        begin, end = int(state.prompt_len[row]), int(state.position[row]) + 1
        if (end - begin) % EVERY == 0:
            tokens = state.tokens[row, begin:end].clamp_max(timestamp_begin).tolist()
            repeated, period = repetition(tokens)
            if repeated >= max(int(state.loop_at[row]) + 1 - begin, REPEATS * period):
                state.limit[row] = end + 1


def repetition(tokens: Sequence[int]) -> tuple[int, int]:
    """Count the tokens at the end that repeat those a period before them.

    Returns:
        So many, and the period: the shortest that fits the last `MATCH` tokens. Or (0, 0).
    """
    for period in range(1, min(PERIODS, len(tokens) - MATCH) + 1):
        if tokens[-MATCH:] == tokens[-MATCH - period : -period]:
            pairs = zip(tokens[::-1], tokens[-period - 1 :: -1], strict=False)
            different = (i for i, (token, other) in enumerate(pairs) if token != other)
            return next(different, len(tokens) - period), period
    return 0, 0
