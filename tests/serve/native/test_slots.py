"""Slots: every slot and row is free or owned once, whatever the order of calls."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.native.slots import SlotAllocation, SlotPool

STEADY = settings(derandomize=True, deadline=None, database=None)
CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60)


@STEADY
@given(st.integers(1, 6), st.integers(0, 9), CALLS)
def test_any_order_of_calls_keeps_the_invariants(count, more, calls):
    slots = SlotPool(count, count + more)
    owned = {}
    for rows, job in calls:
        if rows and job not in owned and slots.fit([rows]):
            version = slots.version
            owned[job] = slots.acquire(job, rows)
            assert owned[job].count == rows
            assert slots.version > version
        elif not rows:
            slots.release(job)
            owned.pop(job, None)
        rows_in_use = [row for place in owned.values() for row in place.rows]
        assert len(rows_in_use) == len(set(rows_in_use)) and set(rows_in_use) <= set(
            range(slots.rows)
        )
        assert slots.free == slots.slots - len(owned)
        assert slots.busy == len(owned)
        assert slots.row_end == max((place.rows.stop for place in owned.values()), default=0)
        assert {job: place for place, job in slots.owners()} == owned
        assert [p.slot for p, _ in slots.owners()] == sorted(p.slot for p in owned.values())
        assert slots.has_multi_row_jobs == any(place.count > 1 for place in owned.values())


@STEADY
@given(st.integers(1, 6), st.integers(0, 9), CALLS, st.lists(st.integers(1, 4), max_size=9))
def test_as_many_fit_as_can_be_acquired(count, more, calls, wanted):
    slots = SlotPool(count, count + more)
    for rows, job in calls:
        slots.release(job)
        if rows and slots.fit([rows]):
            slots.acquire(job, rows)
    fitting = slots.fit(wanted)
    for job, rows in enumerate(wanted[:fitting], 100):
        slots.acquire(job, rows)
    assert fitting == len(wanted) or slots.fit(wanted[fitting : fitting + 1]) == 0


def test_the_lowest_free_slot_and_rows_are_given_first():
    slots = SlotPool(3, 8)
    assert slots.acquire(10, 2) == SlotAllocation(0, 0, 2)
    assert slots.acquire(11) == SlotAllocation(1, 2, 1)
    assert slots.acquire(12, 5) == SlotAllocation(2, 3, 5)
    slots.release(10)
    slots.release(11)
    assert slots.acquire(13, 3) == SlotAllocation(0, 0, 3)
    assert slots.row_end == 8


def test_who_rests_keeps_what_it_owns_and_is_left_out():
    slots = SlotPool(3, 8)
    for job, count in ((10, 2), (11, 1)):
        slots.acquire(job, count)
    version = slots.version
    slots.pause({10})
    assert slots.version > version
    assert slots.owners() == [(SlotAllocation(1, 2, 1), 11)]
    assert not slots.has_multi_row_jobs
    assert (slots.busy, slots.fit([2])) == (2, 1)
    assert slots.acquire(12) == SlotAllocation(2, 3, 1)
    slots.pause(())
    assert [job for _, job in slots.owners()] == [10, 11, 12]
