"""Between a connection and its protocol: passes on what is read piece by piece, turn by turn."""

import asyncio
import select
from collections.abc import Callable
from typing import Any, Protocol

from serve.gateway.turns import Share

_TURN_S = 0.002
LINGER_S = 2.0
"""A client that is refused before all has come may go on sending for so long."""
_READ_S = 2e-5  # what a read costs, however little it brings


class Behind(Protocol):
    """A protocol of asyncio's behind a gate, its other methods apart."""

    @property
    def piece_bytes(self) -> int:
        """Most that it is given at a time: what takes a few milliseconds at worst."""

    @property
    def unread(self) -> bool:
        """Whether its client may still be sending what it will not read."""

    @property
    def linger_s(self) -> float:
        """How long that is thrown away, `LINGER_S` or more: then, while something comes."""


def is_readable(connection: Any) -> bool:
    """Whether something has come by a socket that was not read yet."""
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
        """Whether the protocol hears no more."""
        return self._leaving

    @property
    def holds(self) -> bool:
        """Whether something has come that was not passed on yet."""
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
        """Until nothing is left or a pause is asked for; or else wait for the next turn."""
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
        """It has none from now on."""
        self._connections[connection] = None

    def remove(self, connection: Any) -> None:
        """It has one, or is closed."""
        self._connections.pop(connection, None)

    def make_room(self, newcomer: Any, open_now: int) -> None:
        """One more has come, which says something yet perhaps; there are so many now."""
        first = next(iter(self._connections), newcomer)
        if open_now > self.most and first is not newcomer:
            first.hang_up()
