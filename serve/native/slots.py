"""Which job owns which slot. Lowest free slot first, so that busy slots stay packed together."""

import heapq


class Slots:
    """A fixed number of slots, each free or owned by exactly one job.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._owner: dict[int, int] = {}  # slot -> job id
        self._slot: dict[int, int] = {}  # job id -> slot

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def busy(self) -> int:
        """How many slots are owned."""
        return len(self._owner)

    @property
    def span(self) -> int:
        """One more than the highest busy slot; a step over [0, span) reaches every busy one."""
        return max(self._owner, default=-1) + 1

    def owners(self) -> list[tuple[int, int]]:
        """(slot, job id) of every busy slot, in order."""
        return sorted(self._owner.items())

    def acquire(self, job_id: int) -> int:
        """Give the lowest free slot to a job; there must be one, and the job must have none."""
        assert job_id not in self._slot, f"job {job_id} has slot {self._slot[job_id]} already"
        slot = heapq.heappop(self._free)
        self._owner[slot] = job_id
        self._slot[job_id] = slot
        return slot

    def release(self, job_id: int) -> int | None:
        """Free a job's slot and return it; None if the job has none."""
        slot = self._slot.pop(job_id, None)
        if slot is not None:
            del self._owner[slot]
            heapq.heappush(self._free, slot)
        return slot

    def check(self) -> None:
        """Assert what must always hold: every slot is free or owned once, and both maps agree."""
        assert len(self._free) + len(self._owner) == self._count
        assert set(self._free).isdisjoint(self._owner)
        assert {job: slot for slot, job in self._owner.items()} == self._slot
