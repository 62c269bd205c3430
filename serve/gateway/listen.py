"""Where clients reach the gateway: sockets that listen, and patience with what comes through them.

An HTTP connection that has no request in work, because it says nothing, sends its headers byte by
byte or goes on sending what was refused, is closed after the time that an upload has.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from serve.config import ServerConfig
from serve.errors import UnavailableError

MAX_MESSAGE_BYTES = 2**24
"""Most bytes of a message over a WebSocket, which OpenAI's clients take to be 15 MiB and more."""

LOST = "earshot.lost"
"""Key in a WebSocket's scope of the event that its connection is lost."""

CROWDED = "earshot.crowded"
"""Key in a scope of whether more connections are open than there may be."""

_BACKLOG = 1024
_KEEP_ALIVE_S = 60
_PING_S = 10.0
_UNREAD_BYTES = 2**16  # of a WebSocket, that the system keeps while nothing is read from it
_SEND_S = 60.0  # a client that takes no answer for so long counts as gone
_STOP_S = 2  # for answers on their way


def listening_socket(server: ServerConfig, key: str) -> socket.socket:
    """A TCP socket that listens at one of the configured addresses.

    Args:
        server: names host and ports.
        key: of the port.

    Raises:
        UnavailableError: it cannot.
    """
    port = getattr(server, key)
    try:
        listener = socket.create_server(
            (server.host, port),
            family=socket.AF_INET6 if ":" in server.host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {server.host}:{port}: {error.strerror}; stop what runs there or "
            f"set another server.{key} in the config"
        ) from error
    # Its connections inherit it. asyncio sets it where a socket says that its protocol is TCP;
    # this one leaves that to the system, and the body of an answer would wait 40 ms for its head
    # to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def grpc_credentials(server: ServerConfig) -> grpc.ServerCredentials:
    """The files for TLS, as gRPC takes them.

    Raises:
        UnavailableError: they cannot be read.
    """
    try:
        key, chain = Path(server.tls_key).read_bytes(), Path(server.tls_certificate).read_bytes()
    except OSError as error:
        raise UnavailableError(f"{_tls_files(server)} cannot be used: {error}") from error
    return grpc.ssl_server_credentials([(key, chain)])


def _tls_files(server: ServerConfig) -> str:
    return (
        f"server.tls_certificate = {server.tls_certificate} with server.tls_key = {server.tls_key}"
    )


class HttpServer(uvicorn.Server):
    """An application behind a socket; signals are for others to handle.

    Args:
        app: answers requests.
        listener: from `listening_socket`; closed with the server.
        server: says how patient it is with a connection without a request in work, and names the
            files for TLS.
        max_connections: beyond so many the application is told, which refuses.

    Raises:
        UnavailableError: the files for TLS cannot be used.
    """

    def __init__(
        self, app: ASGIApp, listener: socket.socket, server: ServerConfig, max_connections: int
    ) -> None:
        class Protocol(_PatientProtocol):
            patience = server.upload_timeout_s

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            scope[CROWDED] = len(self.server_state.connections) > max_connections
            await app(scope, receive, send)

        config = uvicorn.Config(
            _with_send_limit(counted),
            http=Protocol,
            ws=_WatchedWebSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            # A client that is made to wait is not read from, and so its answers are not; but a
            # ping that nobody takes ends its connection.
            ws_ping_interval=_PING_S,
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="warning",  # without a line for each WebSocket
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
            ssl_certfile=server.tls_certificate or None,
            ssl_keyfile=server.tls_key or None,
        )
        try:
            config.load()
        except OSError as error:  # of ssl, too
            raise UnavailableError(f"{_tls_files(server)} cannot be used: {error}") from error
        super().__init__(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self.serve(sockets=[self._listener]))

    async def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self.should_exit = True
        if self._task is not None:
            await self._task


class _PatientProtocol(H11Protocol):
    patience: float
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_idleness()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_idleness()

    def handle_websocket_upgrade(self, event: Any) -> None:
        # What a client has sent lies before its pings: it must not be more than is soon read.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_BYTES)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_limit()

    def _limit_idleness(self) -> None:
        """From the first look that finds no request in work to the first that finds one.

        A connection that has become a WebSocket has another protocol, and limits of its own.
        """
        if self._busy() or self._upgraded():
            self._end_limit()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.patience, self._hang_up)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _upgraded(self) -> bool:
        return self.transport.get_protocol() is not self

    def _hang_up(self) -> None:
        self._limit = None
        if not (self._busy() or self._upgraded()):
            self.transport.abort()


class _WatchedWebSocket(WebSocketsSansIOProtocol):
    """Tells its application that the connection is lost, even while that receives nothing.

    Pings of a client that takes nothing are not answered: the answers would pile up.
    """

    def handle_connect(self, event: Any) -> None:
        self.lost = asyncio.Event()
        super().handle_connect(event)
        if hasattr(self, "scope"):  # the handshake was right
            cast(dict[str, Any], self.scope)[LOST] = self.lost

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # of which uvicorn would log where it was found
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if hasattr(self, "lost"):
            self.lost.set()


def _with_send_limit(app: ASGIApp) -> ASGIApp:
    """An application whose answers are given up where the client does not take them."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_S):
                await send(message)

        await app(scope, receive, send_in_time)

    return limited
