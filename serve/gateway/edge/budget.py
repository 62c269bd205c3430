"""Between a connection and its protocol: passes on what is read piece by piece, turn by turn.

So the event loop's time is shared out: who takes much of it waits for the others.

Whatever a client does, reading it costs milliseconds of the one loop that serves everybody: a body
in chunks of one byte, a flood of pings, a JSON of a million numbers, requests that are refused one
after another. So each connection has an account of the time that it has cost. A little is its own,
again and again; whoever is beyond that waits in one queue for a turn, and after each turn the loop
rests from them twice as long as the turn took. All of them together thus have a third of the loop,
however many they are, and honest requests, which cost less than a connection's own, the rest.
"""

import asyncio
import collections
import select
import time
from collections.abc import Callable
from typing import Any, Protocol

OWN_S = 0.002
"""The most that a connection may cost at once; the bytes of a clip take less."""
OWN_SHARE = 0.02
"""Of the loop's time, with which that comes back."""
REFUSED_S = 0.001
"""The cost of a refused request: about what it takes beside its bytes."""

JSON_S_PER_BYTE = 2e-8
"""Of a request's JSON, and of a live event's; what is not read as it comes is paid for before."""
EVENT_S = 1e-4
"""Of a live event beside that."""
LINGER_S = 2.0
"""A client that is refused before all has come may go on sending for so long."""

_REST = 2.0  # so many times a turn's length
_MOST_OWED_S = 0.1  # beyond which a debt does not grow: it is paid back within seconds
_TURN_S = 0.002
_READ_S = 2e-5  # what a read costs, however little it brings

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
        """Count those that wait."""
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
    """One connection's share of the loop.

    Args:
        turns: of all of them.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._left_s = OWN_S
        self._at_s = turns.clock()

    def charge(self, cost_s: float) -> None:
        """Note that it has cost so much."""
        self._left_s = max(self._left() - cost_s, -_MOST_OWED_S)

    @property
    def spent(self) -> bool:
        """Tell whether it has had all that is its own: what comes next waits for a turn."""
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


class Behind(Protocol):
    """A protocol of asyncio's behind a gate, its other methods apart."""

    @property
    def piece_bytes(self) -> int:
        """Most that it is given at a time: what takes a few milliseconds at worst."""

    @property
    def unread(self) -> bool:
        """Tell whether its client may still be sending what it will not read."""

    @property
    def linger_s(self) -> float:
        """Seconds for which that is thrown away; from `LINGER_S` on, while something comes."""


def is_readable(connection: Any) -> bool:
    """Tell whether something has come by a socket that was not read yet."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class Gate(asyncio.Protocol):
    """Passes on what a connection brings.

    A protocol that asks for a pause gets no further piece, not even of what has been read already.
    Where it hangs up on a client that is still sending, what comes is thrown away for a moment: the
    client finds its answer then, where a connection that was reset would have lost it.

    Args:
        share: of this connection.
        behind: the protocol; see `Behind`.
    """

    def __init__(self, share: Share, behind: Any) -> None:
        self.share = share
        self.behind = behind
        self._paused = False  # by the protocol
        self._leaving = False
        self._came = False  # something, since it was looked at
        self._read = bytearray()  # and not passed on yet
        self._waits = False  # for its turn
        self._reads = True
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self.behind.connection_made(_Outlet(self, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._leaving = True
        self._read.clear()
        self.behind.connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.behind.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.behind.resume_writing()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._came = True
        self.share.charge(_READ_S)
        if not self._leaving:
            self._read += data
        self._go_on()

    @property
    def leaving(self) -> bool:
        """Tell whether the protocol hears no more."""
        return self._leaving

    @property
    def holds(self) -> bool:
        """Tell whether something has come that was not passed on yet."""
        return bool(self._read) or is_readable(self._transport.get_extra_info("socket"))

    def pause(self) -> None:
        """Pass nothing on for now."""
        self._paused = True

    def resume(self) -> None:
        """Go on with that, soon."""
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._go_on)

    def hang_up(self) -> None:
        """End the connection."""
        lingers = self.behind.unread and not self._leaving
        self._leaving = True
        self._read.clear()
        if not lingers:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger(asyncio.get_running_loop().time() + self.behind.linger_s)
        self._go_on()

    def _linger(self, end_s: float) -> None:
        """Look again whether it still sends."""
        loop = asyncio.get_running_loop()
        self._came = False

        def look() -> None:
            if self._came and loop.time() < end_s and not self._transport.is_closing():
                self._linger(end_s)
            else:
                self._transport.close()

        loop.call_later(LINGER_S, look)

    def _go_on(self) -> None:
        if not self._waits:
            self._pass_on(lambda: self.share.spent)
        self._set_reading()

    def _turn(self) -> None:
        self._waits = False
        clock = self.share.turns.clock
        end_s = clock() + _TURN_S
        self._pass_on(lambda: clock() > end_s)
        self._set_reading()

    def _pass_on(self, enough: Callable[[], bool]) -> None:
        """Pass on until nothing is left or a pause is asked for, or wait for the next turn."""
        clock = self.share.turns.clock
        while self._leaving or (self._read and not self._paused):
            if enough():
                self._waits = True
                self.share.turns.queue(self._turn, _READ_S)
                return
            if self._leaving:
                return
            piece = bytes(self._read[: self.behind.piece_bytes])
            del self._read[: len(piece)]
            began_s = clock()
            self.behind.data_received(piece)
            self.share.charge(clock() - began_s)

    def _set_reading(self) -> None:
        """Read from the connection while all of it has been passed on."""
        wanted = not (self._waits or self._read or (self._paused and not self._leaving))
        if wanted != self._reads and not self._transport.is_closing():
            self._reads = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()


class _Outlet:
    """The transport that a protocol behind a gate has: the connection's, but for these methods."""

    def __init__(self, gate: Gate, transport: Any) -> None:
        self._gate = gate
        self._transport = transport
        self.share = gate.share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def holds(self) -> bool:
        return self._gate.holds

    def pause_reading(self) -> None:
        self._gate.pause()

    def resume_reading(self) -> None:
        self._gate.resume()

    def set_protocol(self, protocol: Any) -> None:
        self._gate.behind = protocol

    def get_protocol(self) -> Any:
        return self._gate.behind

    def is_closing(self) -> bool:
        return self._gate.leaving or bool(self._transport.is_closing())

    def close(self) -> None:
        self._gate.hang_up()


class Idle:
    """Connections that have no request in work, the one that has had none for longest first.

    Args:
        most: so many connections of all kinds may be open; beyond that the first here is closed
            for each one that comes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: dict[Any, None] = {}

    def add(self, connection: Any) -> None:
        """Note that it has none from now on."""
        self._connections[connection] = None

    def remove(self, connection: Any) -> None:
        """Note that it has one, or is closed."""
        self._connections.pop(connection, None)

    def make_room(self, newcomer: Any, open_now: int) -> None:
        """Note that one more has come, which may say something yet; there are so many now."""
        first = next(iter(self._connections), newcomer)
        if open_now > self.most and first is not newcomer:
            first.hang_up()
