"""The order of windows: urgent ones first, without the others starving."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from serve.native.slots import Slots
from serve.native.start import rows_of
from serve.runtime.protocol import Job

_SPARE_ONE_OF = 4  # places; of fewer, one that stays empty is too many


@dataclasses.dataclass
class _Waiting:
    job: Job
    overtaken: int = 0  # by so many urgent ones


class Line:
    """Windows that wait, in the order in which they get a slot.

    Args:
        patience: an urgent window goes before the others, but none of them lets more pass than so
            many.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._line: collections.deque[_Waiting] = collections.deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Job]:
        return (waiting.job for waiting in self._line)

    def add(self, job: Job) -> None:
        """Let a window wait."""
        at = len(self._line)
        while job.urgent and at and not (before := self._line[at - 1]).job.urgent:
            if before.overtaken == self._patience:
                break
            before.overtaken += 1
            at -= 1
        self._line.insert(at, _Waiting(job))

    def remove(self, *job_ids: int) -> bool:
        """Let windows wait no longer; return whether any did."""
        kept = [waiting for waiting in self._line if waiting.job.id not in job_ids]
        waited = len(kept) < len(self._line)
        self._line = collections.deque(kept)
        return waited

    def clear(self) -> None:
        """Let none wait."""
        self._line.clear()


class Turns:
    """A CPU's way with urgent windows where the others crowd the slots.

    It cannot be interrupted in an encoder batch or a step, and both take the longer the more
    windows they hold. So urgent windows are encoded apart from the others, find a slot that these
    leave free, and share the time equally with them: as much is spent on steps that feed urgent
    windows alone as on steps that feed all. This costs throughput, most where few windows are left
    to decode together: while the others, with those that wait, would all find places and leave one
    free, every window is served alike.

    Args:
        waiting: the windows that wait for a slot, in their order.
        slots: where they decode.
    """

    def __init__(self, waiting: Line, slots: Slots) -> None:
        self._waiting = waiting
        self._slots = slots
        self._ahead_s = 0.0  # urgent windows' time alone, less that of all together since

    def fit(self, decoding: Sequence[Job]) -> int:
        """Count the next windows that can have their places now.

        Where it is crowded, all of them are as urgent as the first. Those that are not urgent get
        none while urgent ones decode, and leave room for one more like the first of them.
        """
        if not self._crowded(decoding):
            return self._slots.fit(map(rows_of, self._waiting))
        urgent = any(job.urgent for job in itertools.islice(self._waiting, 1))
        alike = itertools.takewhile(lambda job: job.urgent == urgent, self._waiting)
        rows = [rows_of(job) for job in alike]
        if urgent:
            return self._slots.fit(rows)
        if any(job.urgent for job in decoding):
            return 0
        places = min(self._slots.slots, self._slots.rows // max(rows, default=1))
        spare = 1 if places >= _SPARE_ONE_OF else 0
        fitting = self._slots.fit([*rows, *rows[:spare]]) - spare
        return max(fitting, 0 if decoding else self._slots.fit(rows[:1]))

    def resting(self, decoding: Sequence[Job]) -> Collection[int]:
        """Return the ids of the jobs that the next step is not to feed."""
        others = {job.id for job in decoding if not job.urgent}
        if len(others) in (0, len(decoding)) or not self._crowded(decoding):
            self._ahead_s = 0.0
            return ()
        return () if self._ahead_s > 0 else others

    def note(self, seconds: float, *, alone: bool) -> None:
        """Note how long a step has taken; `alone`: it fed only urgent windows."""
        self._ahead_s += seconds if alone else -seconds

    def _crowded(self, decoding: Sequence[Job]) -> bool:
        """Tell whether the others leave no place for one more like the largest of them."""
        rows = [rows_of(job) for job in (*self._waiting, *decoding) if not job.urgent]
        wanted = sum(rows) + max(rows, default=0)
        return len(rows) >= self._slots.slots or wanted > self._slots.rows
