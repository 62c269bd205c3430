"""Budgets of event-loop time: a connection that takes much of it waits for the others.

One event loop serves all clients, and hostile input costs milliseconds of it. Examples are a body
in chunks of one byte, a flood of pings, a JSON of a million numbers, and a series of rejected
requests. So each connection has a small token bucket of loop time. All connections with empty
buckets together get at most a third of the loop's time, in turns. Honest requests cost less than a
bucket and have the rest of the loop.
"""

import asyncio
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

_SHARED_PART = 3.0  # all connections beyond their own buckets have one part in three of the loop
_MAX_DEBT_S = 0.5  # more than the largest JSON costs
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

    def call(self, work: Callable[[], object], cost_s: float) -> None:
        """Call a function in its turn; `cost_s` delays the turns after it."""
        now_s = self.clock()
        self._free_s = max(self._free_s, now_s)
        asyncio.get_running_loop().call_later(self._free_s - now_s, self._run, work)
        self._free_s += _SHARED_PART * cost_s
        self.waiting += 1

    def _run(self, work: Callable[[], object]) -> None:
        self.waiting -= 1
        work()


class ConnectionBudget:
    """The token bucket of one connection.

    Args:
        shared: the budget of all connections that are beyond theirs.
    """

    def __init__(self, shared: SharedBudget) -> None:
        self._shared = shared
        self.clock = shared.clock
        self._tokens_s = OWN_S
        self._updated_s = self.clock()

    def charge(self, cost_s: float) -> None:
        """Take tokens; there may be a debt."""
        self._tokens_s = max(self._refill() - cost_s, -_MAX_DEBT_S)

    @property
    def spent(self) -> bool:
        """Whether no tokens are left, so that further work waits for a turn."""
        return self._refill() <= 0

    def call(self, work: Callable[[], object]) -> None:
        """Call a function in its turn; fill the bucket from the shared budget."""
        missing_s, self._tokens_s = OWN_S - self._tokens_s, OWN_S
        self._shared.call(work, missing_s)

    async def pay(self, cost_s: float) -> None:
        """Charge the cost of work; return when the work may begin."""
        self.charge(cost_s)
        if self.spent:
            turn = asyncio.Event()
            self.call(turn.set)
            await turn.wait()

    def _refill(self) -> float:
        now_s = self.clock()
        self._tokens_s = min(OWN_S, self._tokens_s + (now_s - self._updated_s) * OWN_SHARE)
        self._updated_s = now_s
        return self._tokens_s


class ThrottledConnection(asyncio.Protocol):
    """Stands between a transport and its protocol; reads nothing while the budget is spent.

    It is the transport that the protocol sees. If the protocol closes a connection while its
    client is sending, the data is discarded for a moment. A reset at once would make the client
    lose its answer.

    Args:
        budget: the connection's.
        protocol: a protocol of asyncio with three more attributes. `piece_bytes` is the maximum
            that is read at a time. `unfinished` tells whether the client may go on sending once
            the protocol has closed the connection. `linger_s` limits how long such data is
            discarded; the connection ends earlier once nothing comes for `LINGER_S`.
    """

    def __init__(self, budget: ConnectionBudget, protocol: Any) -> None:
        self.budget = budget
        self._protocol = protocol
        self._transport: Any = None
        self._paused = False  # by the protocol
        self._closing = False
        self._received = False  # whether data came since the last look of `_linger`
        self.turn_pending = False
        """Whether reading waits for a turn."""

    # ------------------------------------------------------------ as the transport's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.max_size = self._protocol.piece_bytes
        if hasattr(transport, "set_read_buffer_limits"):  # TLS, which reads ahead
            self._transport.set_read_buffer_limits(self._protocol.piece_bytes)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._received = True
        self.budget.charge(_READ_S)
        if not self._closing:
            began_s = self.budget.clock()
            self._protocol.data_received(data)
            self.budget.charge(self.budget.clock() - began_s)
            self._transport.max_size = self._protocol.piece_bytes
        if self.budget.spent and not self.turn_pending:
            self.turn_pending = True
            self.budget.call(self._go_on)
            self._set_reading()

    # ------------------------------------------------------------ as the protocol's transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._paused = True
        self._set_reading()

    def resume_reading(self) -> None:
        self._paused = False
        self._set_reading()

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing or bool(self._transport.is_closing())

    def close(self) -> None:
        must_linger = self._protocol.unfinished and not self._closing
        self._closing = True
        if not must_linger:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._received = True
        self._linger(asyncio.get_running_loop().time() + self._protocol.linger_s)
        self._set_reading()

    # ------------------------------------------------------------ in between

    def _linger(self, end_s: float) -> None:
        """Close the connection once nothing has come for `LINGER_S`, or at `end_s`."""
        loop = asyncio.get_running_loop()
        if self._received and loop.time() < end_s and not self._transport.is_closing():
            self._received = False
            loop.call_later(LINGER_S, self._linger, end_s)
        else:
            self._transport.close()

    def _go_on(self) -> None:
        self.turn_pending = False
        self._set_reading()

    def _set_reading(self) -> None:
        if self.turn_pending or (self._paused and not self._closing):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
