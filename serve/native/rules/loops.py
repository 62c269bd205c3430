"""End sequences that repeat themselves; the reference implementation in plain torch.

If the audio gives a decoder no clue, it often repeats a few words until its limit. Such a loop
shows in the tokens: each of the last tokens equals the one that precedes it by one period. All
timestamps count as equal, since they differ between repetitions.
"""

from collections.abc import Sequence

import torch

from serve.native.rules.state import RowState

PERIODS = 32  # the longest period in tokens; a power of two
REPEATS = 4  # the number of repetitions that makes a loop
EVERY = 8  # sampled tokens between two checks
MATCH = 8  # the number of last tokens that decide the period


def end_loops(state: RowState, rows: torch.Tensor, timestamp_begin: int) -> None:
    """Lower the limit of rows that repeat themselves, so that their next token is the last.

    For a beam search only the leader's sequence, the likeliest one, is checked.

    Args:
        state: `limit` is changed at `rows`.
        rows: int64 (m,), the rows about to choose a token.
        timestamp_begin: the first timestamp token.
    """
    for row in rows[state.position[rows] >= state.loop_at[rows]].tolist():
        begin, end = int(state.prompt_len[row]), int(state.position[row]) + 1
        if (end - begin) % EVERY == 0:
            tokens = state.tokens[row, begin:end].clamp_max(timestamp_begin).tolist()
            repeated, period = repetition(tokens)
            if repeated >= max(int(state.loop_at[row]) + 1 - begin, REPEATS * period):
                state.limit[row] = end + 1


def repetition(tokens: Sequence[int]) -> tuple[int, int]:
    """Count the tokens at the end that equal the tokens one period before them.

    Returns:
        Their number and the period, the shortest one that fits the last `MATCH` tokens; (0, 0) if
        no period fits.
    """
    for period in range(1, min(PERIODS, len(tokens) - MATCH) + 1):
        if tokens[-MATCH:] == tokens[-MATCH - period : -period]:
            pairs = zip(tokens[::-1], tokens[-period - 1 :: -1], strict=False)
            different = (i for i, (token, other) in enumerate(pairs) if token != other)
            return next(different, len(tokens) - period), period
    return 0, 0
