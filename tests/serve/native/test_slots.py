"""Slots: every slot is free or owned once, whatever the order of calls."""

from hypothesis import given
from hypothesis import strategies as st

from serve.native.slots import Slots


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_any_order_of_calls_keeps_the_invariants(count, calls):
    slots = Slots(count)
    owned = {}
    for acquire, job in calls:
        if acquire and job not in owned and slots.free:
            owned[job] = slots.acquire(job)
        elif not acquire:
            assert slots.release(job) == owned.pop(job, None)
        slots.check()
        assert slots.busy == len(owned)
        assert slots.span == max(owned.values(), default=-1) + 1
        assert dict(slots.owners()) == {slot: job for job, slot in owned.items()}


def test_the_lowest_free_slot_is_given_first():
    slots = Slots(3)
    assert [slots.acquire(job) for job in (10, 11, 12)] == [0, 1, 2]
    slots.release(11)
    slots.release(10)
    assert slots.acquire(13) == 0
    assert slots.span == 3
