"""The order of turns: least served first, no starvation, nothing lost."""

import random

from serve.transcriber.dispatch import NOT_SERVED, FairQueue, rank_of


def waiting(*had):
    queue = FairQueue()
    for id, count in enumerate(had):
        queue.add(id, (count,), id)
    return queue


def test_least_had_goes_first_and_ties_by_arrival():
    queue = waiting(2, 1, 0, 1)
    assert [queue.pop() for _ in range(3)] == [2, 1, 3]


def test_of_those_that_had_the_same_the_shortest_goes_first():
    queue = FairQueue()
    for id, size in enumerate((30, 2, 30, 10)):
        queue.add(id, (0, size), id)
    assert [queue.pop() for _ in range(3)] == [1, 3, 0]


def test_every_fourth_turn_is_that_of_the_longest_wait():
    queue = waiting(9, 1, 2, 3, 4, 8, 5, 6, 7)
    assert [queue.pop() for _ in range(9)] == [1, 2, 3, 0, 4, 6, 7, 5, 8]


def test_who_was_removed_has_no_turn_and_may_come_back():
    queue = waiting(0, 0, 1)
    queue.remove(0)
    queue.remove(99)
    assert (0 in queue, 1 in queue, len(queue)) == (False, True, 2)
    queue.add(0, (5,), "back")
    assert [queue.pop() for _ in range(4)] == [1, 2, "back", None]


def test_each_gets_each_of_its_turns_once():
    dice = random.Random(3)
    queue, had, left = FairQueue(), dict.fromkeys(range(30), 0), []
    for id in had:
        queue.add(id, (0,), id)
    for _ in range(2000):
        id = queue.pop(below=NOT_SERVED if dice.random() < 0.1 else None)
        if id is not None:
            had[id] += 1
            left.append(id)
        if left and dice.random() < 0.8:
            back = left.pop(dice.randrange(len(left)))
            if dice.random() < 0.1:
                queue.add(back, (had[back],), back)
                queue.remove(back)
            queue.add(back, (had[back],), back)
    waits = [queue.pop() for _ in range(len(queue))]
    assert sorted(left + waits) == list(had)


def test_live_text_goes_before_files_that_have_had_as_much():
    queue = FairQueue()
    for id, (priority, had) in enumerate((("file", 0), ("live", 0), ("file", 1), ("live", 1))):
        queue.add(id, rank_of(priority, had, size=10 * id), id)
    assert [queue.pop() for _ in range(3)] == [1, 0, 3]


def test_jobs_go_last_and_have_every_sixteenth_turn():
    queue = FairQueue()
    for id in range(3):
        queue.add(id, rank_of("job", 0, 1), "job")
    turns = []
    for id in range(10, 58):
        queue.add(id, rank_of("file", id % 3, 1), "file")
        turns.append(queue.pop())
    assert [at for at, who in enumerate(turns) if who == "job"] == [15, 31, 47]


def test_jobs_are_no_newcomers_and_have_all_turns_that_nobody_else_wants():
    queue = FairQueue()
    for id in range(20):
        queue.add(id, rank_of("job", id % 2, 1), id)
    assert queue.pop(below=NOT_SERVED) is None
    assert len({queue.pop() for _ in range(20)}) == 20
