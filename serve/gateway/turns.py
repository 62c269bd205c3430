"""The event loop's time, shared out among connections: who takes much of it waits for the others.

Whatever a client does, reading it costs milliseconds of the one loop that serves everybody: a body
in chunks of one byte, a flood of pings, a JSON of a million numbers, requests that are refused one
after another. So each connection has an account of the time that it has cost. A little is its own,
again and again; whoever is beyond that waits in one queue for a turn, and after each turn the loop
rests from them twice as long as the turn took. All of them together thus have a third of the loop,
however many they are, and honest requests, which cost less than a connection's own, the rest.
"""

import asyncio
import collections
import time
from collections.abc import Callable

OWN_S = 0.002
"""What a connection may cost at once; the bytes of a clip take less."""
OWN_SHARE = 0.02
"""Of the loop's time, with which that comes back."""
REFUSED_S = 0.001
"""What a refused request is counted at: about what it costs beside its bytes."""

JSON_S_PER_BYTE = 2e-8
"""Of a request's JSON, and of a live event's; what is not read as it comes is paid for before."""
EVENT_S = 1e-4
"""Of a live event beside that."""

_REST = 2.0  # so many times a turn's length
_MOST_OWED_S = 0.1  # beyond which a debt does not grow: it is paid back within seconds

Work = Callable[[], object]


class Turns:
    """The queue of those that wait for a turn. For one event loop.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._queue: collections.deque[tuple[Work, float]] = collections.deque()
        self._due = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def queue(self, work: Work, cost_s: float = 0.0) -> None:
        """Have something done when it is its turn.

        Args:
            work: it; its time is measured.
            cost_s: what it sets in motion, and takes besides.
        """
        self._queue.append((work, cost_s))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        if not self._queue:
            self._due = False
            return
        work, cost_s = self._queue.popleft()
        began_s = self.clock()
        try:
            work()
        finally:
            rest_s = cost_s + _REST * (cost_s + self.clock() - began_s)
            asyncio.get_running_loop().call_later(rest_s, self._run)


class Share:
    """What one connection has of the loop.

    Args:
        turns: of all of them.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._left_s = OWN_S
        self._at_s = turns.clock()

    def charge(self, cost_s: float) -> None:
        """It has cost so much."""
        self._left_s = max(self._left() - cost_s, -_MOST_OWED_S)

    @property
    def spent(self) -> bool:
        """Whether it has had all that is its own, and waits for its turn with what comes next."""
        return self._left() <= 0

    async def pay(self, cost_s: float) -> None:
        """Return when something that costs so much may be done: at once, or in its turn."""
        self.charge(cost_s)
        if self.spent:
            turn = asyncio.Event()
            self.turns.queue(turn.set, cost_s)
            await turn.wait()

    def _left(self) -> float:
        now_s = self.turns.clock()
        self._left_s = min(OWN_S, self._left_s + (now_s - self._at_s) * OWN_SHARE)
        self._at_s = now_s
        return self._left_s
