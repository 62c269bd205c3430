"""Rows' state in its own memory, and followed elsewhere."""

import pytest
import torch

from serve.native.rules.state import _LAYOUT, new_state

CPU = torch.device("cpu")
ROWS, N_CTX = 5, 7  # odd, so that tables have to be aligned


def filled(seed):
    """State of which every byte is random."""
    state = new_state(ROWS, N_CTX, CPU)
    generator = torch.Generator().manual_seed(seed)
    state.memory.copy_(torch.randint(0, 2, state.memory.shape, generator=generator))
    return state


@pytest.mark.parametrize("searched", [False, True])
def test_a_follower_has_what_was_asked_for_and_nothing_else(searched):
    leader, follower, before = filled(1), filled(2), filled(2)
    follower.follow(leader, 3, searched=searched)
    for name in ("position", "limit", "logprob_sum", "finished", "trusted"):
        assert getattr(follower, name).equal(getattr(leader, name)), name
    best = leader if searched else before
    assert follower.tokens[:3].equal(leader.tokens[:3])
    assert follower.tokens[3:].equal(before.tokens[3:])
    assert follower.best_tokens[:3].equal(best.best_tokens[:3])
    assert follower.best_tokens[3:].equal(before.best_tokens[3:])
    assert follower.source.equal(before.source)


def test_only_the_chosen_rows_are_overwritten():
    state, before, new = filled(1), filled(1), new_state(3, 4, CPU)
    new.memory.copy_(torch.randint(0, 2, new.memory.shape))
    state.write_rows(torch.tensor([4, 0, 3]), new)
    for name in _LAYOUT:
        field, old = getattr(state, name), getattr(before, name)
        assert field[[4, 0, 3]].equal(getattr(new, name)), name
        assert field[1:3].equal(old[1:3]), name
    assert state.tokens[[4, 0, 3], :4].equal(new.tokens)
    assert state.tokens[1:3].equal(before.tokens[1:3])


def test_fields_do_not_share_memory():
    state = new_state(ROWS, N_CTX, CPU)
    state.memory.zero_()
    state.tokens.fill_(-1)
    others = ("best_tokens", "source", "position", "needed", "best_score", "finished", "trusted")
    assert not any(getattr(state, name).any() for name in others)
    assert (state.tokens.data_ptr() - state.memory.data_ptr()) % 16 == 0  # as kernels like it
