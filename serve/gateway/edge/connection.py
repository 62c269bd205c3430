"""Connections of HTTP and WebSockets: uvicorn's, with the limits of a public server.

httptools parses requests in C, where h11 does it in Python. But it accepts heads and trailers of
any length, reports an error before the answers that are due first, and ignores that a client may go
on sending a rejected request.
"""

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Sized
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from serve.gateway.edge.budget import LINGER_S, REJECTED_S, ConnectionBudget
from serve.gateway.errors import ApiError
from serve.gateway.limits import LARGE_BYTES, Admission

CONNECTION_LOST = "earshot.lost"
"""Key in a WebSocket's scope of the event that its connection is lost."""

BUDGET = "earshot.budget"
"""Key of the connection's budget in a scope."""

MAX_HEAD_BYTES = 2**16
"""Maximum bytes of a request outside its body, such as its head and trailers."""
MAX_HEADERS = 256
MAX_QUEUED = 128
"""Maximum of pipelined requests that wait on a connection for an earlier answer."""
MAX_FRAGMENTS = 1024
"""Maximum frames of a WebSocket's message: each takes memory besides its bytes."""
SEND_S = 60.0
"""Seconds after which a client that takes no answer counts as gone."""
MAX_CONTROLS = 100
"""Maximum pings and pongs of a WebSocket in a second."""

_FEW_QUEUED = 16  # up to this length of the pipeline, reading goes on to notice a client's end
_UNREAD_BYTES = 2**16  # of a WebSocket, which the kernel keeps while nothing is read


class SlowClientError(Exception):
    """A client does not take its answer: its connection was closed, or it left before."""


class _Flow(FlowControl):
    """Flow control that stops reading while many requests wait in the pipeline.

    uvicorn itself resumes reading after each answer, and whenever a request asks for its body.
    """

    def __init__(self, transport: Any, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) <= _FEW_QUEUED:
            super().resume_reading()


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """The limits of a server's HTTP connections, and those that are idle."""

    max_connections: int  # beyond it the longest idle one is closed for each new connection
    admission: Admission  # tells whether the server drains
    # Seconds for which a client may go on sending a request that a draining server has rejected,
    # and for which a connection may be idle.
    patience_s: float
    # Connections without a request, the longest idle one first: the loop's time since which.
    idle: dict["HttpProtocol", float] = dataclasses.field(default_factory=dict)


class HttpProtocol(HttpToolsProtocol):
    """An HTTP connection over a `ThrottledConnection`.

    Args:
        limits: the server's.
        options: uvicorn's options.
    """

    def __init__(self, limits: HttpLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._idle = limits.idle
        self._answering = self.cycle  # the request that began last; `cycle` is the latest one
        self._head_complete = False  # the head of the request that is being received is complete
        self._head_bytes = 0  # bytes since the last part of a request
        self._invalid_reason: str | None = None  # the error after which nothing is read
        self.transport: Any

    # ------------------------------------------------------------ as a connection

    @property
    def piece_bytes(self) -> int:
        """16 KiB of a body, 2 ms in chunks of one byte; and 1 KiB of heads, for few requests."""
        return 2**14 if self.cycle is not None and self.cycle.more_body else 2**10

    @property
    def unfinished(self) -> bool:
        return self._invalid_reason is not None or (self.cycle is not None and self.cycle.more_body)

    @property
    def linger_s(self) -> float:
        """Longer while the server drains: then rejected requests are no flood."""
        return self._limits.patience_s if self._limits.admission.draining else LINGER_S

    def connection_made(self, transport: Any) -> None:
        self.budget: ConnectionBudget = transport.budget
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        if self._idle and len(self.connections) > self._limits.max_connections:
            longest_idle = next(iter(self._idle))
            del self._idle[longest_idle]
            longest_idle.transport.abort()
        self._idle[self] = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cycle = self._answering  # it is told, and not the latest request
        super().connection_lost(exc)
        self._idle.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._invalid_reason is not None:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and self._invalid_reason is None:
            self.send_400_response(f"More than {MAX_HEAD_BYTES} bytes of headers.")

    # ------------------------------------------------------------ as a parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_complete = False
        cast(dict[str, Any], self.scope)[BUDGET] = self.budget

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, and drop a trailer."""
        if self._head_complete:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_QUEUED:
            raise ValueError("too many requests wait")
        self._head_complete = True
        self._head_bytes = 0
        super().on_headers_complete()
        if self.parser.should_upgrade() and not self._should_upgrade():
            self.cycle.keep_alive = False  # the parser takes the rest for another protocol

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def handle_websocket_upgrade(self) -> None:
        """Make the connection a WebSocket."""
        if self not in self._idle:
            self.send_400_response("A WebSocket cannot begin before the last answer is there.")
            return
        # Pings queue behind unread data, so keep the receive buffer small.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_BYTES)
        self._idle.pop(self, None)  # a WebSocket session has its own idle timeout
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request, after the answers that are due before."""
        self._invalid_reason = msg
        in_body = self._head_complete and self._answering is self.cycle and self.cycle.more_body
        if in_body and self.cycle.response_started:
            self.transport.close()
        elif in_body:  # the rest of the request's body will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            super().send_400_response(msg)
        elif self not in self._idle:
            self.flow.pause_reading()
        else:
            super().send_400_response(msg)

    # ------------------------------------------------------------ as a server

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._idle.pop(self, None)
        super()._start_asgi_task(cycle, cast(Any, functools.partial(self._watched, app, cycle)))

    async def _watched(
        self, app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Close the connection after an answer that precedes the end of the request's body.

        A client that does not take an answer counts as gone.
        """

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                if cycle.more_body:
                    cycle.keep_alive = False
                if message["status"] >= 400:
                    self.budget.charge(REJECTED_S)
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                cycle.disconnected = True
                self.transport.abort()
                raise SlowClientError from None

        await app(scope, receive, watch)

    def on_response_complete(self) -> None:
        """Go on with the next request, within the budget."""
        if self.pipeline and self.budget.spent:
            self.budget.call(self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        super().on_response_complete()
        if self._answering.response_complete and not self.pipeline:
            self._idle[self] = self.loop.time()
            if self._invalid_reason is not None and not self.transport.is_closing():
                super().send_400_response(self._invalid_reason)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket over a `ThrottledConnection`.

    It tells its application that the connection is lost, even while that receives nothing. Pings
    of a client that takes nothing are not answered: the answers would pile up.

    Args:
        admission: counts the bytes of messages that were not taken yet.
        options: uvicorn's options.
    """

    piece_bytes = 2**11  # 5 ms in frames of 2 bytes
    unfinished = False

    def __init__(self, admission: Admission, **options: Any) -> None:
        super().__init__(**options)
        self._admission = admission
        self._counted_bytes = 0  # bytes of `_admission` that are this connection's
        self._waiting_bytes = 0  # bytes of complete messages that the application has not taken
        self._pings, self._pings_second = 0, 0
        self._accepted = False
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._count()
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        try:
            self._count()
        except ApiError:
            self._end(1008, "there is no room for the message")

    async def send(self, message: Any) -> None:
        """Send a message of ASGI to the client; the first one answers the handshake.

        Raises:
            SlowClientError: the client takes nothing, or left during the handshake.
        """
        if not self.handshake_complete and self.transport.is_closing():
            self.disconnected = True
        try:
            async with asyncio.timeout(SEND_S):
                await super().send(message)
        except TimeoutError:
            self.transport.abort()
            raise SlowClientError from None
        except ClientDisconnected:
            self.handshake_complete = True
            if self._accepted:
                raise
            raise SlowClientError from None
        self._accepted = self._accepted or message["type"] == "websocket.accept"
        if self.close_sent:  # by a rejection, which uvicorn does not count as an answer
            self.handshake_complete = True

    async def receive(self) -> Any:
        """Return the next message, which its receiver counts from now on."""
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._waiting_bytes -= len(message.get("text") or message.get("bytes") or "")
            self._count()
        return message

    def _count(self) -> None:
        """Count the bytes that the application has not taken as in flight.

        Raises:
            ApiError: 413 or 429, they or all bytes in flight exceed a limit.
        """
        incomplete = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        size = 0 if self.disconnected else incomplete + self._waiting_bytes
        more = size - self._counted_bytes
        if more > 0:
            self._admission.require_room(size, more)
        self._admission.trim_due |= -more >= LARGE_BYTES
        self._admission.bytes += more
        self._counted_bytes = size

    def _end(self, code: int, reason: str) -> None:
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.send_close(code, reason)
            self.handle_parser_exception()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):  # the handshake was right
            scope = cast(dict[str, Any], self.scope)
            scope[CONNECTION_LOST], scope[BUDGET] = self.lost, cast(Any, self.transport).budget

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._end(1008, f"a message came in more than {MAX_FRAGMENTS} frames")
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        whole = b"".join(self.frames)
        try:
            size = len(whole.decode() if self.curr_msg_data_type == "text" else whole)
        except UnicodeDecodeError:  # which uvicorn would log with the text
            self._end(1007, "")
            return
        if not self.close_sent:
            self._waiting_bytes += size
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, where the answer is taken."""
        self._control()
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_pong(self, event: Any) -> None:
        self._control()
        super().handle_pong(event)

    def _control(self) -> None:
        second = int(self.loop.time())
        self._pings = self._pings + 1 if second == self._pings_second else 1
        self._pings_second = second
        if self._pings > MAX_CONTROLS:
            self._end(1008, f"more than {MAX_CONTROLS} pings in a second")
