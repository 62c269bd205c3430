"""Listening sockets, and the HTTP servers behind them.

An idle HTTP connection, which sends nothing or its headers byte by byte, is closed after the time
limit of an upload, and before that if others need its place.
"""

import asyncio
import asyncio.sslproto
import functools
import select
import socket
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.contract.errors import UnavailableError
from serve.contract.server_config import ServerConfig
from serve.gateway.context import Services
from serve.gateway.edge.budget import ConnectionBudget, ThrottledConnection
from serve.gateway.edge.connection import HttpLimits, HttpProtocol, WebSocketProtocol

MAX_MESSAGE_BYTES = 2**24
"""Maximum bytes of a WebSocket's message; OpenAI's clients expect at least 15 MiB."""

TOO_MANY_CONNECTIONS = "earshot.crowded"
"""Key in a scope; whether more connections are open than the maximum."""

_BACKLOG = 1024
_ACCEPTS = 64  # maximum of connections that asyncio accepts in a turn of the loop
_TLS_READ_BYTES = 2**14
_KEEP_ALIVE_S = 60
PING_S = 10.0
_STOP_S = 2  # limit of answers on their way
_TURNS = 3  # turns of the loop in which an accepted connection gets its protocol
_LOOK_S = 0.02  # between two looks at connections that are to end
_FIRST_REQUEST_S = 1.0  # within which a new client sends its request


def listening_socket(server: ServerConfig, key: str, shared: bool = False) -> socket.socket:
    """Open a TCP socket that listens at one of the configured addresses.

    Args:
        server: the config with the host and the ports.
        key: the config key of the port.
        shared: whether other processes of the gateway listen on the same port.

    Raises:
        UnavailableError: the address cannot be used.
    """
    port = getattr(server, key)
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        listener = socket.create_server(
            (server.host, port), family=family, backlog=_BACKLOG, reuse_port=shared
        )
    except OSError as error:
        found = f"cannot listen on {server.host}:{port}: {error.strerror}"
        raise UnavailableError(f"{found}; set another server.{key}") from error
    # Connections inherit this option. asyncio does not set it, because the protocol number of this
    # socket is 0. Without it, the body of an answer waits 40 ms for the client to acknowledge the
    # headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def unix_listener(path: Path) -> socket.socket:
    """Bind a Unix socket; replace the file that an earlier gateway has left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


class HttpServer(uvicorn.Server):
    """Serves an application at a socket; it handles no signals.

    Args:
        services: the gateway's services.
        max_connections: the maximum, beyond which idle connections are closed. If none is idle,
            the application is told by `TOO_MANY_CONNECTIONS`, and rejects the request.
        app: the application.
        listener: a socket of `listening_socket` or `unix_listener`, which speaks no TLS; it is
            closed with the server.

    Raises:
        UnavailableError: the files for TLS cannot be used.
    """

    def __init__(
        self, services: Services, max_connections: int, app: ASGIApp, listener: socket.socket
    ) -> None:
        admission, server = services.admission, services.config.server
        tls = server.tls_certificate != "" and listener.family != socket.AF_UNIX
        self.limits = HttpLimits(max_connections, admission, server.upload_timeout_s)
        # Under TLS too, a connection reads pieces that cost few milliseconds.
        asyncio.sslproto.SSLProtocol.max_size = _TLS_READ_BYTES

        def protocol(**options: Any) -> ThrottledConnection:
            connection = HttpProtocol(self.limits, **options)
            return ThrottledConnection(ConnectionBudget(services.budget), connection)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            scope[TOO_MANY_CONNECTIONS] = len(self.server_state.connections) > max_connections
            await app(scope, receive, send)

        config = uvicorn.Config(
            counted,
            http=cast(Any, protocol),
            ws=cast(Any, functools.partial(WebSocketProtocol, admission)),
            ws_max_size=MAX_MESSAGE_BYTES,
            # Pongs of a throttled client are not read, so they have no limit of time; but a ping
            # that the client does not take ends the connection.
            ws_ping_interval=PING_S,
            ws_ping_timeout=None,
            ws_per_message_deflate=False,
            lifespan="off",
            backlog=_ACCEPTS,
            log_config=None,
            log_level="warning",  # without a line for each WebSocket
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
            ssl_certfile=server.tls_certificate if tls else None,
            ssl_keyfile=server.tls_key if tls else None,
        )
        try:
            config.load()
        except OSError as error:  # of ssl, too
            files = f"{server.tls_certificate} with server.tls_key = {server.tls_key}"
            message = f"server.tls_certificate = {files} cannot be used: {error}"
            raise UnavailableError(message) from error
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; asyncio has taken its limit of a turn as the backlog, too."""
        await super().startup(sockets)
        self._listener.listen(_BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that have been idle for too long; uvicorn calls this every 0.1 s."""
        idle, now_s = self.limits.idle, asyncio.get_running_loop().time()
        for connection, since_s in list(idle.items()):
            if now_s - since_s > self.limits.patience_s:
                del idle[connection]
                connection.transport.abort()
        return await super().on_tick(counter)

    def start(self) -> None:
        """Start to accept connections; signals are left to the gateway's own handlers."""
        self._task = asyncio.create_task(self._serve([self._listener]))

    async def close(self, patience_s: float = 0.0) -> None:
        """Accept no more connections, and close the others once no answer is due.

        Args:
            patience_s: the longest wait for answers that are due.
        """
        if self.should_exit:
            return
        await self._accept_last()
        for server in self.servers:
            server.close()
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while (waited_s := clock() - began_s) < patience_s and self._answer_is_due(waited_s):
            await asyncio.sleep(_LOOK_S)
        self.should_exit = True
        await self._task

    def _answer_is_due(self, waited_s: float) -> bool:
        """Return whether a client expects an answer or is getting it, or may be about to ask."""
        return any(
            connection not in self.limits.idle
            or connection.transport.is_closing()
            or connection.transport.turn_pending
            or (connection.cycle is None and waited_s < _FIRST_REQUEST_S)
            for connection in self.server_state.connections
            if isinstance(connection, HttpProtocol)  # live sessions have ended before
        )

    async def _accept_last(self) -> None:
        """Accept the connections that clients take for established; they would be reset."""
        listener = select.poll()
        listener.register(self._listener, select.POLLIN)
        for _ in range(_BACKLOG):  # without a free descriptor, nothing is accepted
            if not listener.poll(0):
                break
            await asyncio.sleep(0)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
