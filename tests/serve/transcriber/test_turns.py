"""Whose turn it is: least had first, nobody starves, nothing is lost."""

import random

import pytest

from serve.transcriber.turns import Turns


def waiting(*had):
    turns = Turns()
    for id, count in enumerate(had):
        turns.add(id, (count,), id)
    return turns


def test_least_had_goes_first_and_ties_by_arrival():
    turns = waiting(2, 1, 0, 1)
    assert [turns.pop() for _ in range(3)] == [2, 1, 3]


def test_of_those_that_had_the_same_the_shortest_goes_first():
    turns = Turns()
    for id, size in enumerate((30, 2, 30, 10)):
        turns.add(id, (0, size), id)
    assert [turns.pop() for _ in range(3)] == [1, 3, 0]


def test_every_fourth_turn_is_that_of_the_longest_wait():
    turns = waiting(9, 1, 2, 3, 4, 8, 5, 6, 7)
    assert [turns.pop() for _ in range(9)] == [1, 2, 3, 0, 4, 6, 7, 5, 8]


def test_who_has_gone_is_forgotten_though_others_always_go_first():
    random.seed(0)
    turns = waiting(*[0] * 50)
    for id in range(50, 10_000):
        turns.pop()
        turns.add(id, (0, random.random()), id)
    assert len(turns._by_rank) < 300


def test_nobody_starves_beside_a_stream_of_new_ones():
    turns = waiting(100, 200)
    popped = []
    for id in range(10, 60):
        turns.add(id, (0,), id)
        popped.append(turns.pop())
    assert {0, 1} <= set(popped[:8])


def test_only_new_ones_where_nobody_else_may():
    turns = waiting(1, 0, 3, 0)
    assert [turns.pop(below=(1,)) for _ in range(3)] == [1, 3, None]
    assert (len(turns), turns.pop()) == (2, 0)


def test_who_was_removed_has_no_turn_and_may_come_back():
    turns = waiting(0, 0, 1)
    turns.remove(0)
    turns.remove(99)
    assert (0 in turns, 1 in turns, list(turns)) == (False, True, [1, 2])
    turns.add(0, (5,), "back")
    assert [turns.pop() for _ in range(4)] == [1, 2, "back", None]


def test_nobody_waits_twice():
    turns = waiting(0)
    with pytest.raises(AssertionError, match="0 waits already"):
        turns.add(0, (1,), 0)


def test_cleared_means_that_nobody_waits():
    turns = waiting(0, 1)
    turns.clear()
    assert (len(turns), turns.pop()) == (0, None)


def test_each_gets_each_of_its_turns_once():
    dice = random.Random(3)
    turns, had, left = Turns(), dict.fromkeys(range(30), 0), []
    for id in had:
        turns.add(id, (0,), id)
    for _ in range(2000):
        id = turns.pop(below=(9,) if dice.random() < 0.1 else None)
        if id is not None:
            had[id] += 1
            left.append(id)
        if left and dice.random() < 0.8:
            back = left.pop(dice.randrange(len(left)))
            if dice.random() < 0.1:
                turns.add(back, (had[back],), back)
                turns.remove(back)
            turns.add(back, (had[back],), back)
    assert set(left) | set(turns) == set(had)
    assert not set(left) & set(turns)
    assert len(turns._by_rank) < 100, "what is stale goes away"
