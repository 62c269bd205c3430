"""Order the windows that wait: urgent ones first, without starvation of the others."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from serve.native.prefill import rows_of
from serve.native.slots import SlotPool
from serve.runtime.protocol import Job

_MIN_SLOTS_TO_SPARE = 4  # with fewer slots, keeping one of them free costs too much


@dataclasses.dataclass
class _QueuedJob:
    job: Job
    overtaken: int = 0  # the number of urgent jobs that went first


class WaitingQueue:
    """The jobs that wait for a slot, in the order in which they get one.

    Args:
        patience: the number of urgent jobs that may overtake one other job.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._queue: collections.deque[_QueuedJob] = collections.deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Job]:
        return (waiting.job for waiting in self._queue)

    def add(self, job: Job) -> None:
        """Add a job at the end, or before the jobs that it may overtake."""
        index = len(self._queue)
        while job.urgent and index and not (before := self._queue[index - 1]).job.urgent:
            if before.overtaken == self._patience:
                break
            before.overtaken += 1
            index -= 1
        self._queue.insert(index, _QueuedJob(job))

    def remove(self, *job_ids: int) -> bool:
        """Remove jobs from the queue; return whether any was queued."""
        remaining = [waiting for waiting in self._queue if waiting.job.id not in job_ids]
        was_queued = len(remaining) < len(self._queue)
        self._queue = collections.deque(remaining)
        return was_queued

    def clear(self) -> None:
        self._queue.clear()


class UrgentStepPolicy:
    """A policy that serves urgent windows early on a CPU with crowded slots.

    A CPU cannot interrupt an encoder batch or a decoder step, and both take longer with more
    windows. Urgent windows are therefore encoded in separate batches, and one slot stays free for
    them. Steps that decode only urgent windows get half of the decoding time, and steps that decode
    all windows get the other half. This costs throughput. The policy applies only while the slots
    are crowded, that is, while the other windows leave no slot free.

    Args:
        waiting: the queue of windows without a slot.
        slots: the slots in which windows decode.
    """

    def __init__(self, waiting: WaitingQueue, slots: SlotPool) -> None:
        self._waiting = waiting
        self._slots = slots
        # Seconds of urgent steps minus seconds of steps of all windows.
        self._urgent_balance_s = 0.0

    def fit(self, decoding: Sequence[Job]) -> int:
        """Count the queued windows that can start now.

        If the slots are crowded, a batch has either urgent windows or other windows, never both.
        Other windows wait while urgent windows decode. They leave one slot free, unless there are
        fewer than `_MIN_SLOTS_TO_SPARE`.
        """
        if not self._crowded(decoding):
            return self._slots.fit(map(rows_of, self._waiting))
        urgent = any(job.urgent for job in itertools.islice(self._waiting, 1))
        same_kind = itertools.takewhile(lambda job: job.urgent == urgent, self._waiting)
        rows = [rows_of(job) for job in same_kind]
        if urgent:
            return self._slots.fit(rows)
        if any(job.urgent for job in decoding):
            return 0
        capacity = min(self._slots.slots, self._slots.rows // max(rows, default=1))
        spare = 1 if capacity >= _MIN_SLOTS_TO_SPARE else 0
        fitting = self._slots.fit([*rows, *rows[:spare]]) - spare
        return max(fitting, 0 if decoding else self._slots.fit(rows[:1]))

    def paused(self, decoding: Sequence[Job]) -> Collection[int]:
        """Return the ids of the jobs that the next step skips."""
        not_urgent = {job.id for job in decoding if not job.urgent}
        if len(not_urgent) in (0, len(decoding)) or not self._crowded(decoding):
            self._urgent_balance_s = 0.0
            return ()
        return () if self._urgent_balance_s > 0 else not_urgent

    def record(self, seconds: float, *, urgent_only: bool) -> None:
        """Record the duration of a step and whether it decoded only urgent windows."""
        self._urgent_balance_s += seconds if urgent_only else -seconds

    def _crowded(self, decoding: Sequence[Job]) -> bool:
        """Return whether the other windows leave no slot for one more window of the same size."""
        rows = [rows_of(job) for job in (*self._waiting, *decoding) if not job.urgent]
        needed_rows = sum(rows) + max(rows, default=0)
        return len(rows) >= self._slots.slots or needed_rows > self._slots.rows
