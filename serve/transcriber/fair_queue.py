"""A fair queue: whoever ranks lowest goes next, and now and then whoever has waited longest.

A rank begins with what somebody has had so far, and then says how much comes next: least attained
service first, of equals live text, and then the shortest. So short requests are answered as if no
long ones were there. Alone it would starve long requests under a stream of short ones, so every
fourth turn goes to whoever has waited longest, whatever it has had: a request among n others waits
at most 4 n turns for its next. Jobs go after all that are none, as if they had had more, and have
every sixteenth turn. Where there is no room for all, those alone may go that have had nothing.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from serve.contract.messages import Priority

T = TypeVar("T")
Rank = tuple[int, ...]

NEWCOMERS: Rank = (1,)  # below it are the ranks of those that have had nothing
LIVE: Rank = (0, True)  # and below this of live text that has not
_JOBS: Rank = (1_000_000,)  # and from here on those of jobs
_LONGEST_WAIT_EVERY = 4
_JOBS_EVERY = 16
_SPARE = 64  # of those that have left, so many need no looking for


def rank_of(priority: Priority, had: int, size: int) -> Rank:
    """Rank somebody who has had so much, and whose next is of this size."""
    if priority == "job":
        return (_JOBS[0] + had, size)
    return (had, priority != "live", size)


class FairQueue(Generic[T]):
    """Those that wait for a turn, by their id; each waits at most once. Not thread-safe."""

    def __init__(self) -> None:
        self._turns = 0
        # In the order in which they came to wait: rank, and who it is.
        self._waiting: dict[int, tuple[Rank, T]] = {}
        # (rank, id); of those that have left in another way, some stay behind.
        self._by_rank: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        """Count those that wait."""
        return len(self._waiting)

    def __contains__(self, id: int) -> bool:
        """Tell whether an id waits."""
        return id in self._waiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over those that wait, longest wait first."""
        return (who for _, who in self._waiting.values())

    def add(self, id: int, rank: Rank, who: T) -> None:
        """Let somebody wait, who must not wait already.

        Args:
            id: grows with arrival, which decides between equal ranks.
            rank: lowest goes first.
            who: what `pop` gives.
        """
        assert id not in self._waiting, f"{id} waits already"
        self._waiting[id] = (rank, who)
        heapq.heappush(self._by_rank, (rank, id))
        if len(self._by_rank) > 2 * len(self._waiting) + _SPARE:
            self._by_rank = [(rank, id) for id, (rank, _) in self._waiting.items()]
            heapq.heapify(self._by_rank)

    def remove(self, id: int) -> None:
        """Let somebody wait no longer; unknown ids do nothing."""
        self._waiting.pop(id, None)

    def clear(self) -> None:
        """Let nobody wait any longer."""
        self._waiting.clear()
        self._by_rank.clear()

    def pop(self, *, below: Rank | None = None) -> T | None:
        """Take out whoever goes next; None: nobody may.

        Args:
            below: only somebody who ranks lower than this, such as `NEWCOMERS`.
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
        """Find who has waited longest; jobs count every sixteenth turn, or where there are none."""
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
