"""One connection of the relay: a thread that reads frames, and one that writes them.

Nothing that arrives can do more than end its own connection: a frame that is malformed, too long
or not whole in time does, and so does a first one that does not come.
"""

import contextlib
import logging
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serve.errors import EarshotError, UnavailableError
from serve.triton import frames
from serve.triton.frames import Bytes, Hello, Message

logger = logging.getLogger("earshot")

FIRST_S = 5.0  # most that a connection may take to say who it is
_FRAME_S = 60.0  # most that a frame may take from its first byte to its last
_SEND_S = 60  # most that the other side may leave what was sent to it unread
_JOIN_S = 5.0  # most that the end waits for a thread
RETRY_S = 0.1  # between two tries to connect
_NAME = "earshot-relay"


class Channel:
    """Messages over a connected socket, which it owns. Thread-safe.

    Args:
        connection: the socket.
        on_message: called with each message that arrives, on the reading thread. If it raises,
            the connection ends.
        on_end: called once on that thread when no more can arrive, whoever ended it.
        max_bytes: most that the tensors of one message may have together.
        hello: whether the first message must be a `Hello` and come within FIRST_S.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[Message], None],
        on_end: Callable[[], None],
        max_bytes: int,
        hello: bool = False,
    ) -> None:
        self._socket = connection
        self._on_message = on_message
        self._on_end = on_end
        self._max_bytes = max_bytes
        self._expects_hello = hello
        # For sending alone: reading has limits of its own, and none between two frames.
        limit = struct.pack("ll", _SEND_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        # Frames wait here, because who sends must not wait for a slow reader.
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=_NAME, daemon=True)
        self._writer = threading.Thread(target=self._write, name=_NAME, daemon=True)

    def start(self) -> None:
        """Begin to read and write."""
        self._writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Have a message sent; returns at once, also when the other side is gone."""
        self._outbox.put(message)

    def close(self) -> None:
        """Hang up, and wait for the threads."""
        self._shut_down()
        # It is not alive before `start`; it then ends at once.
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(_JOIN_S)

    def _shut_down(self) -> None:
        """End both directions, which wakes both threads, as closing would not."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                for part in frames.encode(message):
                    self._socket.sendall(part)
                del message, part  # they may hold a request's audio, and the next may take long
        except OSError:
            self._shut_down()
        except Exception:
            logger.exception("a connection of the relay ends")
            self._shut_down()

    def _read(self) -> None:
        try:
            while self._take_message():
                pass
        except OSError:
            pass  # the other side is gone, and that is all
        except EarshotError as error:
            logger.warning("a connection of the relay ends: %s", error)
        except Exception:
            logger.exception("a connection of the relay ends")
        finally:
            self._shut_down()
            self._outbox.put(None)
            self._on_end()
            self._writer.join(_JOIN_S)
            self._socket.close()

    def _take_message(self) -> bool:
        """Whether there was one; a method, so that no name keeps a request's audio meanwhile."""
        wait_s = FIRST_S if self._expects_hello else None
        found = _receive(self._socket, wait_s, self._max_bytes)
        if found is None:
            return False
        message = frames.decode(*found)
        if isinstance(message, Hello) != self._expects_hello:
            raise EarshotError("it said hello too late or twice; expected it first, and once")
        self._expects_hello = False
        self._on_message(message)
        return True


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to who listens at `path`, or will do so in time.

    Raises:
        UnavailableError: nobody does.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)  # else a full backlog would be waited for
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if time.monotonic() >= end_s:
                raise UnavailableError(
                    f"the model that has the engine did not start within {timeout_s:g} s "
                    f"({error.strerror})"
                ) from error
        else:
            connection.setblocking(True)
            return connection
        time.sleep(RETRY_S)


def _receive(
    connection: socket.socket, wait_s: float | None, max_bytes: int
) -> tuple[Bytes, memoryview] | None:
    """The JSON and the tensors of the next frame; None at the connection's end.

    Raises:
        EarshotError: it is too long, was not whole in time, or did not begin within `wait_s`.
    """
    if not _readable(connection, wait_s):
        raise EarshotError(f"it said nothing for {wait_s:g} s")
    end_s = time.monotonic() + _FRAME_S
    lengths = _receive_bytes(connection, frames.LENGTHS.size, end_s)
    if lengths is None:
        return None
    json_bytes, tensor_bytes = frames.LENGTHS.unpack(lengths)
    if json_bytes > frames.MAX_JSON_BYTES or tensor_bytes > max_bytes:
        raise EarshotError(
            f"a frame has {json_bytes} bytes of JSON and {tensor_bytes} of tensors; expected at "
            f"most {frames.MAX_JSON_BYTES} and {max_bytes}"
        )
    parts = [_receive_bytes(connection, size, end_s) for size in (json_bytes, tensor_bytes)]
    text, tensors = parts
    if text is None or tensors is None:
        raise EarshotError("it ended in the middle of a frame")
    return text, tensors


def _receive_bytes(connection: socket.socket, size: int, end_s: float) -> memoryview | None:
    """So many bytes, or None where the connection ends before them."""
    data = memoryview(bytearray(size))
    filled = 0
    while filled < size:
        if not _readable(connection, max(0.0, end_s - time.monotonic())):
            raise EarshotError(f"a frame was not whole after {_FRAME_S:g} s")
        count = connection.recv_into(data[filled:])
        if count == 0:
            return None
        filled += count
    return data


def _readable(connection: socket.socket, wait_s: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if wait_s is None else wait_s * 1000))
