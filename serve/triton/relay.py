"""Requests and cancels from other processes to the process of `whisper`, which has the engine.

Triton runs each Python model in a process of its own, and the engine must be loaded once. Of the
ways to join the two models this one was chosen by measuring. A call from model to model inside
Triton works, but Triton 24.10 cannot cancel such a call, so that a client that goes away would
keep its slot; it also costs 2 ms and twice the time under 200 requests at once. So `whisper`,
which takes most requests, owns the engine, and `whisper_stream` reaches it through a Unix socket,
whose end cancels whatever came through it.

Through the same socket the gateway cancels requests by their keys; see `serve.triton.keys`.

The socket lies in the server's own folder, which only its user can enter, and only its user may
connect. Even so neither side trusts what it reads: see `serve.triton.frames` and
`serve.triton.channel`.
"""

import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from serve.errors import EarshotError, UnavailableError
from serve.messages import Failed, Finished, OnEvent, RequestHandle, TranscriberEvent
from serve.triton.channel import RETRY_S, Channel, connect
from serve.triton.frames import Cancel, CancelKey, Event, Hello, Message, Start, check_inputs
from serve.triton.wire import Tensor

logger = logging.getLogger("earshot")

Inputs = Mapping[str, Tensor]
StartRequest = Callable[[Inputs, OnEvent, str | None], RequestHandle]
"""Starts a request under a key, if it has one; raises an EarshotError, and nothing else, where it
is refused at once."""

MAX_CONNECTIONS = 16  # whisper_stream and the gateway are two
MAX_BYTES = 2**30  # of one request's tensors
_MODE = 0o600
_JOIN_S = 5.0  # most that the end waits for a thread


class RelayServer:
    """Starts and cancels what comes through the socket at `path`, until closed.

    Args:
        path: of the Unix socket to create.
        start: called with a request's inputs and its key on the connection's thread.
        cancel_key: ends the request of a key.
        cancel_owner: ends every request whose key has this sender, who is gone.
    """

    def __init__(
        self,
        path: Path,
        start: StartRequest,
        cancel_key: Callable[[str], None],
        cancel_owner: Callable[[str], None],
    ) -> None:
        self._path = path
        self._start = start
        self._cancel_key = cancel_key
        self._cancel_owner = cancel_owner
        self._closed = False
        self._lock = threading.Lock()
        self._sessions: set[_Session] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        os.fchmod(self._listener.fileno(), _MODE)  # Linux: `bind` makes the file with this mode
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="earshot-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections. Those that exist end with their other side."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join(timeout=_JOIN_S)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._accept()
            except OSError as error:  # no file descriptor is free, say: another time
                if not self._closed:
                    logger.warning("the relay cannot take a connection: %s", error.strerror)
                    time.sleep(RETRY_S)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with self._lock:
            full = len(self._sessions) >= MAX_CONNECTIONS
        if full:
            connection.close()
            logger.warning("the relay refuses a connection: %d are open", MAX_CONNECTIONS)
            return
        session = _Session(
            connection, self._start, self._cancel_key, self._cancel_owner, self._remove
        )
        with self._lock:
            self._sessions.add(session)
        session.begin()

    def _remove(self, session: "_Session") -> None:
        with self._lock:
            self._sessions.discard(session)


class _Session:
    """One connection to the server, and the requests that came through it."""

    def __init__(
        self,
        connection: socket.socket,
        start: StartRequest,
        cancel_key: Callable[[str], None],
        cancel_owner: Callable[[str], None],
        on_end: Callable[["_Session"], None],
    ) -> None:
        self._start = start
        self._cancel_key = cancel_key
        self._cancel_owner = cancel_owner
        self._report_end = on_end
        self._owner: str | None = None
        self._lock = threading.Lock()
        self._running: dict[int, RequestHandle | None] = {}  # None until `start` has returned
        self._channel = Channel(connection, self._handle, self._end, MAX_BYTES, hello=True)

    def begin(self) -> None:
        self._channel.start()

    def _handle(self, message: Message) -> None:
        match message:
            case Hello(owner):
                self._owner = owner
            case Start(id, inputs, key):
                self._begin_request(id, inputs, key)
            case Cancel(id):
                with self._lock:
                    handle = self._running.get(id)
                if handle is not None:
                    handle.cancel()
            case CancelKey(key):
                self._cancel_key(key)
            case Event(id):
                raise EarshotError(f"an event of request {id} came to the engine's side")

    def _begin_request(self, request_id: int, inputs: Inputs, key: str | None) -> None:
        with self._lock:
            if request_id in self._running:
                raise EarshotError(f"there are two requests with the id {request_id}")
            self._running[request_id] = None
        try:
            handle = self._start(inputs, functools.partial(self._on_event, request_id), key)
        except EarshotError as error:
            self._on_event(request_id, Failed(error))
            return
        with self._lock:
            if request_id in self._running:  # else it has ended already
                self._running[request_id] = handle

    def _on_event(self, request_id: int, event: TranscriberEvent) -> None:
        if isinstance(event, Finished | Failed):
            with self._lock:
                self._running.pop(request_id, None)
        self._channel.send(Event(request_id, event))

    def _end(self) -> None:
        """The other side is gone, and so are its clients."""
        if self._owner is not None:
            self._cancel_owner(self._owner)
        with self._lock:
            running = [handle for handle in self._running.values() if handle is not None]
        for handle in running:
            handle.cancel()
        self._report_end(self)


class RelayClient:
    """Starts requests in the process behind the socket at `path`. Thread-safe.

    Args:
        path: of the Unix socket.
        timeout_s: how long to wait until somebody listens there.

    Raises:
        UnavailableError: nobody does.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        connection = connect(path, timeout_s)
        self._lock = threading.Lock()
        self._listeners: dict[int, OnEvent] = {}
        self._last_id = 0
        self._lost = False
        self._channel = Channel(connection, self._handle, self._end, MAX_BYTES)
        self._channel.send(Hello(secrets.token_hex(8)))
        self._channel.start()

    def start(self, inputs: Inputs, on_event: OnEvent, key: str | None = None) -> RequestHandle:
        """Send a request; its events, the refusal too, come on another thread.

        Raises:
            UnavailableError: the other process is gone.
            RequestError: the inputs are not the models', or too large.
        """
        check_inputs(inputs, MAX_BYTES)
        with self._lock:
            if self._lost:
                raise engine_gone()
            self._last_id += 1
            request_id = self._last_id
            self._listeners[request_id] = on_event
        self._channel.send(Start(request_id, inputs, key))
        return RequestHandle(functools.partial(self._channel.send, Cancel(request_id)))

    def close(self) -> None:
        """Hang up; whatever is pending fails here and is cancelled over there."""
        self._channel.close()

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Event):
            raise EarshotError(f"a {type(message).__name__} came from the engine's side")
        self._deliver(message.id, message.event)

    def _end(self) -> None:
        with self._lock:
            self._lost = True
            pending = list(self._listeners)
        for request_id in pending:
            self._deliver(request_id, Failed(engine_gone()))

    def _deliver(self, request_id: int, event: TranscriberEvent) -> None:
        with self._lock:
            on_event = self._listeners.get(request_id)
            if isinstance(event, Finished | Failed):
                self._listeners.pop(request_id, None)
        if on_event is not None:
            on_event(event)


def engine_gone() -> UnavailableError:
    """What the requests of a lost connection end with."""
    return UnavailableError("the process that has the engine is gone; start the server again")
