"""Queue items by least attained service, without starvation.

The item with the lowest rank goes next. A rank starts with the service that the item has had so
far. Among equals live text goes first, then the smallest item. Short requests are thus answered as
if there were no long ones. A stream of short requests would starve long ones, so every fourth pop
takes the item that has waited longest: a request among n others waits at most 4 n pops. Batch jobs
rank behind all other requests and get every sixteenth pop. If the capacity is limited, `pop` can
be restricted to items that have had no service.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from serve.contract.messages import Priority

T = TypeVar("T")
Rank = tuple[int, ...]

NEWCOMERS: Rank = (1,)  # items without service so far rank below it
LIVE: Rank = (0, True)  # live text without service so far ranks below it
_JOBS: Rank = (1_000_000,)  # jobs have this rank or a higher one
_LONGEST_WAIT_EVERY = 4
_JOBS_EVERY = 16
_SPARE = 64  # stale heap entries that are tolerated before the heap is rebuilt


def rank_of(priority: Priority, had: int, size: int) -> Rank:
    """Return the rank of a request.

    Args:
        priority: the request's priority.
        had: the number of windows that it has had.
        size: how large its next piece of work is.
    """
    if priority == "job":
        return (_JOBS[0] + had, size)
    return (had, priority != "live", size)


class FairQueue(Generic[T]):
    """A queue of items by id; each id is queued at most once. Not thread-safe."""

    def __init__(self) -> None:
        self._turns = 0
        self._waiting: dict[int, tuple[Rank, T]] = {}  # in order of arrival
        # A heap of (rank, id); it may hold stale entries of items that were removed.
        self._by_rank: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items, longest wait first."""
        return (item for _, item in self._waiting.values())

    def add(self, id: int, rank: Rank, item: T) -> None:
        """Queue an item that is not queued yet.

        Args:
            id: the item's id; ids grow with arrival, and the lower one wins between equal ranks.
            rank: the lowest rank goes first.
            item: the value that `pop` returns.
        """
        assert id not in self._waiting, f"{id} is queued already"
        self._waiting[id] = (rank, item)
        heapq.heappush(self._by_rank, (rank, id))
        if len(self._by_rank) > 2 * len(self._waiting) + _SPARE:
            self._by_rank = [(rank, id) for id, (rank, _) in self._waiting.items()]
            heapq.heapify(self._by_rank)

    def remove(self, id: int) -> None:
        """Remove an item; unknown ids are ignored."""
        self._waiting.pop(id, None)

    def clear(self) -> None:
        self._waiting.clear()
        self._by_rank.clear()

    def pop(self, *, below: Rank | None = None) -> T | None:
        """Remove and return the next item; None if no item is eligible.

        Args:
            below: only items that rank lower than this are eligible, such as `NEWCOMERS`.
        """
        self._drop_stale()
        if not self._by_rank or (below is not None and self._by_rank[0][0] >= below):
            return None
        self._turns += 1
        if below is not None or self._turns % _LONGEST_WAIT_EVERY:
            _, id = heapq.heappop(self._by_rank)
        else:
            id = self._longest_wait()
        return self._waiting.pop(id)[1]

    def _longest_wait(self) -> int:
        """Return the id that has waited longest.

        Every sixteenth pop prefers jobs, the others prefer requests that are not jobs.
        """
        first = next(iter(self._waiting))
        if not self._turns % _JOBS_EVERY:
            jobs = (id for id, (rank, _) in self._waiting.items() if rank >= _JOBS)
            return next(jobs, first)
        return next((id for id, (rank, _) in self._waiting.items() if rank < _JOBS), first)

    def _drop_stale(self) -> None:
        while self._by_rank:
            rank, id = self._by_rank[0]
            if id in self._waiting and self._waiting[id][0] == rank:
                return
            heapq.heappop(self._by_rank)
