"""Places in time, that refused requests are given: who comes back then is let in.

Each key's places lie behind one another, as far apart as the key's share of the rate says. A place
is known by its key and by what the request holds, so that a client needs to send nothing but the
same request. It lapses a moment after its time. Of places that are due and not taken up yet others
leave so much free as by experience of their keys will be taken up.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Hashable

GRACE_S = 1.5
"""A place is kept so long: who asks before its time is told whole seconds, rounded up."""
EARLY_S = 0.05
"""Before its time it counts as due."""
LONGEST_S = 600.0
"""The latest that a place may lie ahead."""
MOST = 10_000
"""Places that there may be."""

_LEARNED = 0.05  # of each place, whether they are taken up
_LEAST_KEPT = 0.05


@dataclasses.dataclass(eq=False)
class Place:
    """A refused request's place."""

    key: str
    mark: int
    work: float
    due_s: float = 0.0
    held: float = 0.0  # work that is left free for it, while it is due


@dataclasses.dataclass
class _Line:
    """One key's places."""

    count: int = 0
    next_s: float = 0.0
    kept: float = 1.0  # of them, that are taken up


class Places:
    """All places of one model. For one event loop."""

    def __init__(self) -> None:
        self.held = 0.0
        """Work that is left free for those that are due."""
        self.kept = self.lapsed = self.moved = 0
        """Places that were taken up, that were not, and that could not be had in time."""
        self._places: dict[Hashable, Place] = {}
        self._coming: list[tuple[float, int, Place]] = []
        self._due: dict[Place, None] = {}
        self._lines: dict[str, _Line] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Count them."""
        return len(self._places)

    def find(self, key: str, mark: int) -> Place | None:
        """Find the place of a request that comes again; None: it has none."""
        return self._places.get((key, mark))

    def waits(self, key: str) -> bool:
        """Tell whether a key has some."""
        return key in self._lines and self._lines[key].count > 0

    def give(self, place: Place, from_s: float, rate: float, now: float) -> int:
        """Give a place; return in how many seconds.

        Args:
            place: new, or one that could not be had.
            from_s: not before this.
            rate: work that its key may have done in a second.
            now: the time.
        """
        line = self._lines.setdefault(place.key, _Line())
        if self._drop(place):
            self.moved += 1
        elif line.count:
            from_s = max(from_s, line.next_s)
        wait_s = max(1, math.ceil(from_s - now))
        if wait_s > LONGEST_S or len(self) >= MOST:
            return min(wait_s, int(LONGEST_S))
        line.next_s = max(from_s, line.next_s) + line.kept * place.work / rate
        line.count += 1
        place.due_s = now + wait_s
        self._places[place.key, place.mark] = place
        heapq.heappush(self._coming, (place.due_s, next(self._numbers), place))
        return wait_s

    def take(self, place: Place) -> None:
        """Take a place up."""
        self._drop(place)
        self._learn(place.key, 1.0)
        self.kept += 1

    def advance(self, now: float) -> None:
        """Let time pass: places come due, and lapse."""
        while self._coming and self._coming[0][0] <= now + EARLY_S:
            due_s, _, place = heapq.heappop(self._coming)
            if self._places.get((place.key, place.mark)) is place and place.due_s == due_s:
                place.held = place.work * self._lines[place.key].kept
                self.held += place.held
                self._due[place] = None
        while self._due and (place := next(iter(self._due))).due_s + GRACE_S < now:
            self._drop(place)
            self._learn(place.key, 0.0)
            self.lapsed += 1

    def _drop(self, place: Place) -> bool:
        """Have it no longer; return whether it was there."""
        if self._places.get((place.key, place.mark)) is not place:
            return False
        del self._places[place.key, place.mark]
        self._lines[place.key].count -= 1
        if place in self._due:
            del self._due[place]
            self.held = self.held - place.held if self._due else 0.0
        return True

    def _learn(self, key: str, kept: float) -> None:
        line = self._lines[key]
        line.kept = max(_LEAST_KEPT, line.kept + _LEARNED * (kept - line.kept))
