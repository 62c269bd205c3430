"""Budgets of event-loop time: a connection that takes much of it waits for the others.

One event loop serves all clients, and hostile input costs milliseconds of it. Examples are a body
in chunks of one byte, a flood of pings, a JSON of a million numbers, and a series of rejected
requests. So each connection has a small token bucket of loop time. Connections that have emptied
their buckets take turns in a third of the loop, however many they are. Honest requests cost less
than a bucket and have the rest of the loop.
"""

import asyncio
import select
import time
from collections.abc import Callable
from typing import Any

OWN_S = 0.002
"""Capacity of a connection's bucket; the bytes of a clip cost less."""
OWN_SHARE = 0.02
"""Share of the loop's time with which the bucket is refilled."""
REJECTED_S = 0.001
"""Cost of a rejected request beside its bytes, about as measured."""

JSON_S_PER_BYTE = 2e-8
"""Cost of JSON of a request or a live event, which is charged before it is parsed."""
EVENT_S = 1e-4
"""Cost of a live event beside its bytes."""
LINGER_S = 2.0
"""Seconds for which a client may go on sending a request that was rejected."""

_TIMES = 3.0  # seconds of the loop for a second of work beyond the connections' own buckets
_MAX_DEBT_S = 0.1  # of a connection, so that it is paid back within seconds
_TURN_S = 0.002
_READ_S = 2e-5  # cost of a read, however little it brings


class SharedBudget:
    """The share of the loop for all connections beyond their own buckets. For one event loop.

    Args:
        clock: seconds, as the event loop's.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.waiting = 0
        """Connections that wait for a turn."""
        self._free_s = 0.0  # the time of the next turn

    def call(self, work: Callable[[], object], cost_s: float | None = None) -> None:
        """Call a function in its turn.

        Args:
            work: the function.
            cost_s: the cost of what the function begins; None: its own time, which is measured.
        """
        now_s, reserved_s = self.clock(), _TURN_S if cost_s is None else cost_s
        self._free_s = max(self._free_s, now_s)
        asyncio.get_running_loop().call_later(self._free_s - now_s, self._run, work, cost_s)
        self._free_s += _TIMES * reserved_s
        self.waiting += 1

    def _run(self, work: Callable[[], object], cost_s: float | None) -> None:
        self.waiting -= 1
        began_s = self.clock()
        try:
            work()
        finally:
            if cost_s is None:
                self._free_s += _TIMES * (self.clock() - began_s - _TURN_S)


class ConnectionBudget:
    """The token bucket of one connection.

    Args:
        shared: the budget of all connections that are beyond theirs.
    """

    def __init__(self, shared: SharedBudget) -> None:
        self.shared = shared
        self._tokens_s = OWN_S
        self._updated_s = shared.clock()

    def charge(self, cost_s: float) -> None:
        """Take tokens; there may be a debt."""
        self._tokens_s = max(self._left_s() - cost_s, -_MAX_DEBT_S)

    @property
    def spent(self) -> bool:
        """Whether no tokens are left, so that further work waits for a turn."""
        return self._left_s() <= 0

    async def pay(self, cost_s: float) -> None:
        """Charge the cost of work; return when the work may begin."""
        self.charge(cost_s)
        if self.spent:
            turn = asyncio.Event()
            self.shared.call(turn.set, cost_s)
            await turn.wait()

    def _left_s(self) -> float:
        now_s = self.shared.clock()
        self._tokens_s = min(OWN_S, self._tokens_s + (now_s - self._updated_s) * OWN_SHARE)
        self._updated_s = now_s
        return self._tokens_s


def is_readable(connection: Any) -> bool:
    """Return whether a socket has data that was not read yet."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class ThrottledConnection(asyncio.Protocol):
    """Stands between a transport and its protocol, and passes data on within the budget.

    It is the transport that the protocol sees, so a protocol that pauses reading gets no further
    data, not even data that has been read already. If the protocol closes a connection while its
    client is sending, the data is discarded for a moment. A reset at once would make the client
    lose its answer.

    Args:
        budget: the connection's.
        protocol: a protocol of asyncio with three more attributes. `piece_bytes` is the maximum
            that it gets at a time. `unread` tells whether the client may go on sending after the
            protocol has closed the connection. `linger_s` limits how long such data is discarded;
            the connection ends earlier once nothing comes for `LINGER_S`.
    """

    def __init__(self, budget: ConnectionBudget, protocol: Any) -> None:
        self.budget = budget
        self._protocol = protocol
        self._transport: Any = None
        self._pending = bytearray()  # read and not passed on yet
        self._paused = False  # by the protocol
        self._closing = False
        self._received = False  # anything since the last look
        self._waits = False  # for a turn
        self._reads = True

    # ------------------------------------------------------------ as the transport's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._pending.clear()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._received = True
        self.budget.charge(_READ_S)
        if not self._closing:
            self._pending += data
        self._deliver_pending()

    # ------------------------------------------------------------ as the protocol's transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def holds(self) -> bool:
        """Whether data has come that was not passed on yet."""
        return bool(self._pending) or is_readable(self._transport.get_extra_info("socket"))

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._deliver_pending)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing or bool(self._transport.is_closing())

    def close(self) -> None:
        must_linger = self._protocol.unread and not self._closing
        self._closing = True
        self._pending.clear()
        if not must_linger:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._linger(asyncio.get_running_loop().time() + self._protocol.linger_s)
        self._deliver_pending()

    # ------------------------------------------------------------ in between

    def _linger(self, end_s: float) -> None:
        """Close the connection once the client has stopped sending, or at `end_s`."""
        loop = asyncio.get_running_loop()
        self._received = False

        def close_if_idle() -> None:
            if self._received and loop.time() < end_s and not self._transport.is_closing():
                self._linger(end_s)
            else:
                self._transport.close()

        loop.call_later(LINGER_S, close_if_idle)

    def _deliver_pending(self) -> None:
        if not self._waits:
            self._pass_on(lambda: self.budget.spent)
        self._set_reading()

    def _turn(self) -> None:
        self._waits = False
        clock = self.budget.shared.clock
        end_s = clock() + _TURN_S
        self._pass_on(lambda: clock() > end_s)
        self._set_reading()

    def _pass_on(self, enough: Callable[[], bool]) -> None:
        """Pass data on until none is left, reading is paused, or the next turn is to be awaited."""
        clock = self.budget.shared.clock
        while self._closing or (self._pending and not self._paused):
            if enough():
                self._waits = True
                self.budget.shared.call(self._turn)
                return
            if self._closing:
                return
            piece = bytes(self._pending[: self._protocol.piece_bytes])
            del self._pending[: len(piece)]
            began_s = clock()
            self._protocol.data_received(piece)
            self.budget.charge(clock() - began_s)

    def _set_reading(self) -> None:
        """Read from the connection while all data has been passed on."""
        wanted = not (self._waits or self._pending or (self._paused and not self._closing))
        if wanted != self._reads and not self._transport.is_closing():
            self._reads = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()
