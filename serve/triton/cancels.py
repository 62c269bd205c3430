"""Cancels by key, for whoever sends requests to Triton; see `serve.triton.keys`."""

import contextlib
import secrets
import socket
import threading
from pathlib import Path

from serve.errors import EarshotError, UnavailableError
from serve.triton.channel import RETRY_S, Channel, connect
from serve.triton.frames import CancelKey, Hello, Message
from serve.triton.relay import MAX_BYTES, engine_gone

_JOIN_S = 5.0  # most that the end waits for the thread


class CancelClient:
    """Names requests, and cancels them by their names, in the process behind the socket at `path`.

    It connects by itself, as often as need be. When its connection ends, every request that it
    has named is cancelled. No method waits, so that all may be called from an event loop.

    Args:
        path: of the Unix socket, which may come later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # None while there is no connection
        self._owner = ""
        self._last = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-cancels", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether requests can be named, and so be cancelled."""
        return self._channel is not None

    def new_key(self) -> str:
        """A key for a request that is about to be sent to Triton.

        Raises:
            UnavailableError: the process that has the engine cannot be reached.
        """
        with self._lock:
            if self._channel is None:
                raise engine_gone()
            self._last += 1
            return f"{self._owner}-{self._last}"

    def cancel(self, key: str) -> None:
        """End the request of this key; does nothing once it has ended."""
        with self._lock:
            channel = self._channel
        if channel is not None:  # else the connection's end has cancelled it
            channel.send(CancelKey(key))

    def close(self) -> None:
        """Hang up, which cancels every request that was named and has not ended."""
        self._closed.set()
        self._hang_up()
        self._thread.join(_JOIN_S)

    def _hang_up(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(UnavailableError):
                self._use(connect(self._path, 0.0))
            self._closed.wait(RETRY_S)

    def _use(self, connection: socket.socket) -> None:
        """Name and cancel through a connection until it ends."""
        ended = threading.Event()
        owner = secrets.token_hex(8)
        channel = Channel(connection, _refuse, ended.set, MAX_BYTES)
        channel.send(Hello(owner))
        channel.start()
        with self._lock:
            self._channel, self._owner = channel, owner
        if self._closed.is_set():  # `close` may have come before the channel stood there
            self._hang_up()
        ended.wait()
        self._hang_up()


def _refuse(message: Message) -> None:
    raise EarshotError(f"a {type(message).__name__} came to who only cancels")
