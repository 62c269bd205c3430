"""Sequences that repeat themselves: what counts as a loop, and that only those end early."""

import math

import pytest
import torch

from serve.native.rules.loops import EVERY, MATCH, PERIODS, REPEATS, repetition
from serve.native.rules.reference_rules import TokenRules
from serve.native.rules.state import Picks, new_state
from tests.serve.native.rules.rows import CPU, DIMS, FACTS, N_VOCAB, PROMPT, admit, stamp

N_CTX = 200
WORDS = tuple(range(10, 10 + PERIODS))


@pytest.mark.parametrize("period", [1, 2, 5, PERIODS])
@pytest.mark.parametrize("before", [0, 3, 40])
def test_a_repetition_is_as_long_as_what_is_the_same_a_period_before(period, before):
    said = [*range(100, 100 + before), *(WORDS[:period] * 300)]
    for end in (before + period + MATCH, before + 4 * period + MATCH + 1, before + 300):
        assert repetition(said[:end]) == (end - before - period, period)


def test_what_does_not_repeat_itself_is_no_repetition():
    assert repetition([]) == repetition([5] * MATCH) == (0, 0)
    assert repetition(list(range(300))) == (0, 0)
    assert repetition([*range(PERIODS + 1)] * 5) == (0, 0)  # too long a period
    assert repetition([*([7, 8] * 40), 9]) == (0, 0)  # it is over


def row(said, need, timestamps=False):
    """A row that has said something and may be ended once `need` tokens repeat others."""
    state = new_state(2, N_CTX, CPU)
    for at in range(2):
        admit(state, at, PROMPT, said, timestamps, limit=N_CTX)
    state.loop_at[0] = len(PROMPT) - 1 + need
    return state


def go_on(state, token):
    """One step, in which this token is the likeliest."""
    logits = torch.zeros(2, N_VOCAB)
    logits[:, token] = 20.0
    TokenRules(FACTS, DIMS, CPU).advance(state, Picks(torch.arange(2), torch.arange(2)), logits)


def steps_until_it_ends(unit, need, before=()):
    state = row(before, need)
    for step in range(N_CTX - len(PROMPT) - len(before) - 1):
        go_on(state, unit[step % len(unit)])
        if state.finished[0]:
            break
    assert not state.finished[1], "nobody asked for it"
    assert int(state.limit[0]) == int(state.position[0]) + 1
    return step + 1


@pytest.mark.parametrize(("period", "need"), [(1, 30), (3, 30), (7, 30), (12, 30), (5, 100)])
def test_a_loop_ends_soon_after_it_is_long_enough(period, need):
    for before in ((), (40, 41, 42, 43, 44)):
        steps = steps_until_it_ends(WORDS[:period], need, before)
        long_enough = max(need, REPEATS * period) + period
        looked = math.ceil((long_enough + len(before)) / EVERY) * EVERY - len(before)
        assert steps == looked + 1  # what is chosen at that look is the last


def test_a_list_that_counts_and_a_refrain_between_verses_are_no_loops():
    for said in (
        [token for i in range(60) for token in (30, 31, 10 + i % 19)],
        [token for i in range(5) for token in (*WORDS[:20], *range(30 + i, 45 + i))],
        [30, 31] * 12,  # too short
    ):
        state = row((), 30)
        for token in said[: N_CTX - len(PROMPT) - 1]:
            go_on(state, token)
            assert not state.finished[0]


def test_timestamps_that_go_on_do_not_hide_a_loop():
    turns = [t for i in range(10) for t in (stamp(2 * i), 11, 12, stamp(2 * i + 1))]
    state = row(turns, 30, timestamps=True)
    for token in (stamp(20), 11):  # the first is told by its probability, here as by the rules
        go_on(state, token)
    assert state.finished.tolist() == [True, False]
    plain = row([11, 12, 13, 14] * 10, 30)
    other = row([t if i % 9 else 15 + i for i, t in enumerate([11, 12, 13, 14] * 10)], 30)
    go_on(plain, 11), go_on(other, 11)
    assert plain.finished.tolist() == [True, False] and not other.finished.any()
