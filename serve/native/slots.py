"""Allocate slots and rows to jobs.

A slot holds the encoded audio of a window, a row holds one sequence of tokens. The lowest free slot
and rows are taken first, so that busy ones stay packed. The rows of one slot are adjacent.
"""

import dataclasses
import heapq
from collections.abc import Collection, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class SlotAllocation:
    """A job's slot and rows."""

    slot: int
    first_row: int  # the row that leads the beam
    count: int  # the number of rows

    @property
    def rows(self) -> range:
        """Indices of the rows."""
        return range(self.first_row, self.first_row + self.count)


class SlotPool:
    """A fixed number of slots and rows, each of them free or owned by exactly one job.

    Args:
        slots: the number of slots.
        rows: the number of rows of all slots together, at least `slots`.
    """

    def __init__(self, slots: int, rows: int) -> None:
        assert rows >= slots
        self.slots = slots
        self.rows = rows
        self.version = 0  # grows with every change of owners
        self._free_slots = list(range(slots))
        self._row_is_free = [True] * rows
        self._allocations: dict[int, SlotAllocation] = {}  # by job id
        self._paused: Collection[int] = ()
        self._owners: Sequence[tuple[SlotAllocation, int]] = ()
        self._owners_version = 0  # the version that `_owners` belongs to

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free_slots)

    @property
    def busy(self) -> int:
        """The number of owned slots."""
        return len(self._allocations)

    @property
    def row_end(self) -> int:
        """The index after the last busy row that is not paused; a step computes the rows before."""
        return max((allocation.rows.stop for allocation, _ in self.owners()), default=0)

    @property
    def has_multi_row_jobs(self) -> bool:
        """Whether any job that is not paused owns more than one row."""
        return any(allocation.count > 1 for allocation, _ in self.owners())

    def owners(self) -> Sequence[tuple[SlotAllocation, int]]:
        """Return (allocation, job id) of every job that is not paused, ordered by slot."""
        if self._owners_version != self.version:
            pairs = ((a, id) for id, a in self._allocations.items() if id not in self._paused)
            self._owners = sorted(pairs, key=lambda pair: pair[0].slot)
            self._owners_version = self.version
        return self._owners

    def pause(self, jobs: Collection[int]) -> None:
        """Pause exactly these jobs: the next steps skip them, and they keep their rows."""
        if jobs != self._paused:
            self._paused = jobs
            self.version += 1

    def fit(self, counts: Iterable[int]) -> int:
        """Count the jobs that could be allocated now, in order; `counts` are their row counts."""
        rows, fitting = list(self._row_is_free), 0
        for count in counts:
            first = _first_run(rows, count) if fitting < self.free else None
            if first is None:
                break
            rows[first : first + count] = [False] * count
            fitting += 1
        return fitting

    def acquire(self, job_id: int, count: int = 1) -> SlotAllocation:
        """Allocate the lowest free slot and rows to a job, which must fit and own nothing yet."""
        owned = self._allocations.get(job_id)
        assert owned is None, f"job {job_id} has {owned} already"
        first = _first_run(self._row_is_free, count)
        assert first is not None, f"job {job_id} needs {count} rows side by side"
        allocation = SlotAllocation(heapq.heappop(self._free_slots), first, count)
        self._row_is_free[first : first + count] = [False] * count
        self._allocations[job_id] = allocation
        self.version += 1
        return allocation

    def hand_over(self, job_id: int, next_id: int) -> None:
        """Transfer a job's slot and rows to another job, which owns nothing yet.

        The new id separates steps that were launched for the first job from later ones.
        """
        owned = self._allocations.get(next_id)
        assert owned is None, f"job {next_id} has {owned} already"
        self._allocations[next_id] = self._allocations.pop(job_id)
        self.version += 1

    def release(self, job_id: int) -> None:
        """Free a job's slot and rows, if it owns any."""
        allocation = self._allocations.pop(job_id, None)
        if allocation is not None:
            heapq.heappush(self._free_slots, allocation.slot)
            rows = allocation.rows
            self._row_is_free[rows.start : rows.stop] = [True] * len(rows)
            self.version += 1


def _first_run(free: list[bool], count: int) -> int | None:
    """Return the first of `count` adjacent free rows; None if there are none."""
    if count == 1:  # the usual case; the list's own search is faster
        return free.index(True) if True in free else None
    length = 0
    for row, is_free in enumerate(free):
        length = length + 1 if is_free else 0
        if length == count:
            return row - count + 1
    return None
