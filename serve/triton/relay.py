"""Requests from the process of `whisper_stream` to the process of `whisper`, which has the engine.

Triton runs each Python model in a process of its own, and the engine must be loaded once. Of the
ways to join the two models this one was chosen by measuring. A call from model to model inside
Triton works, but Triton 24.10 cannot cancel such a call, so that a client that goes away would
keep its slot; it also costs 2 ms and twice the time under 200 requests at once. So `whisper`,
which takes most requests, owns the engine and hears of cancels by itself, and `whisper_stream`
reaches it through a Unix socket, whose end cancels whatever came through it.

The socket lies in the server's own folder, which only its user can enter: both sides trust what
they read.
"""

import contextlib
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from serve.errors import EarshotError, UnavailableError
from serve.messages import Failed, Finished, OnEvent, RequestHandle, TranscriberEvent
from serve.triton.wire import Tensor

Inputs = Mapping[str, Tensor]
Start = Callable[[Inputs, OnEvent], RequestHandle]
"""Starts a request; raises an EarshotError, and nothing else, where it is refused at once."""

_RETRY_S = 0.1  # between two tries to connect
_JOIN_S = 5.0  # most that the end waits for a thread


class RelayServer:
    """Starts the requests that come through the socket at `path`, until closed.

    Args:
        path: of the Unix socket to create.
        start: called with a request's inputs on the connection's thread.
    """

    def __init__(self, path: Path, start: Start) -> None:
        self._path = str(path)
        self._start = start
        self._closed = False
        self._listener = Listener(self._path, "AF_UNIX", backlog=8)
        self._thread = threading.Thread(target=self._accept, name="earshot-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections. Those that exist end with their other side."""
        self._closed = True
        with contextlib.suppress(OSError):
            Client(self._path, "AF_UNIX").close()  # wakes `accept`
        self._thread.join(timeout=_JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            connection: Connection[Any, Any] = self._listener.accept()
            session = _Session(connection, self._start)
            for target in (session.read, session.write):
                threading.Thread(target=target, name="earshot-relay", daemon=True).start()


class _Session:
    """One connection: a thread reads requests and cancels, another writes events."""

    def __init__(self, connection: "Connection[Any, Any]", start: Start) -> None:
        self._connection = connection
        self._start = start
        # Events wait here, because the device thread must not wait for a slow reader.
        self._outbox: queue.SimpleQueue[tuple[int, TranscriberEvent] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, RequestHandle | None] = {}  # None until `start` has returned

    def read(self) -> None:
        try:
            while True:
                request_id, inputs = self._connection.recv()
                if inputs is None:
                    self._cancel(request_id)
                else:
                    self._begin(request_id, inputs)
        except (EOFError, OSError):  # the other side is gone, and so are its clients
            with self._lock:
                running = [handle for handle in self._running.values() if handle is not None]
            for handle in running:
                handle.cancel()
            self._outbox.put(None)

    def write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send(message)
        self._connection.close()

    def _begin(self, request_id: int, inputs: Inputs) -> None:
        with self._lock:
            self._running[request_id] = None
        try:
            handle = self._start(inputs, functools.partial(self._on_event, request_id))
        except EarshotError as error:
            self._on_event(request_id, Failed(error))
            return
        with self._lock:
            if request_id in self._running:  # else it has ended already
                self._running[request_id] = handle

    def _cancel(self, request_id: int) -> None:
        with self._lock:
            handle = self._running.get(request_id)
        if handle is not None:
            handle.cancel()

    def _on_event(self, request_id: int, event: TranscriberEvent) -> None:
        if isinstance(event, Finished | Failed):
            with self._lock:
                self._running.pop(request_id, None)
        self._outbox.put((request_id, event))


class RelayClient:
    """Starts requests in the process behind the socket at `path`. Thread-safe.

    Args:
        path: of the Unix socket.
        timeout_s: how long to wait until somebody listens there.

    Raises:
        UnavailableError: nobody does.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._connection = _connect(path, timeout_s)
        self._fd = self._connection.fileno()
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._listeners: dict[int, OnEvent] = {}
        self._last_id = 0
        self._lost = False
        self._thread = threading.Thread(target=self._read, name="earshot-relay", daemon=True)
        self._thread.start()

    def start(self, inputs: Inputs, on_event: OnEvent) -> RequestHandle:
        """Send a request; its events, the refusal too, come on another thread.

        Raises:
            UnavailableError: the other process is gone.
        """
        with self._lock:
            if self._lost:
                raise _engine_gone()
            self._last_id += 1
            request_id = self._last_id
            self._listeners[request_id] = on_event
        self._send((request_id, dict(inputs)))
        return RequestHandle(functools.partial(self._send, (request_id, None)))

    def close(self) -> None:
        """Hang up; whatever is pending fails here and is cancelled over there."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as other:
            other.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closing would not
        self._thread.join(timeout=_JOIN_S)
        self._connection.close()

    def _send(self, message: tuple[int, dict[str, Tensor] | None]) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the reader sees the end as well
            self._connection.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                request_id, event = self._connection.recv()
                self._deliver(request_id, event)
        with self._lock:
            self._lost = True
            pending = list(self._listeners)
        for request_id in pending:
            self._deliver(request_id, Failed(_engine_gone()))

    def _deliver(self, request_id: int, event: TranscriberEvent) -> None:
        with self._lock:
            on_event = self._listeners.get(request_id)
            if isinstance(event, Finished | Failed):
                self._listeners.pop(request_id, None)
        if on_event is not None:
            on_event(event)


def _connect(path: Path, timeout_s: float) -> "Connection[Any, Any]":
    end = time.monotonic() + timeout_s
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > end:
                raise UnavailableError(
                    f"the model that has the engine did not start within {timeout_s:g} s"
                ) from error
        time.sleep(_RETRY_S)


def _engine_gone() -> UnavailableError:
    return UnavailableError("the process that has the engine is gone; start the server again")
