"""Floods, none of which needs a key: how long others wait for a text meanwhile."""

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from eval.gateway.ways import Ask
from eval.server import connect
from serve.contract.errors import EarshotError

_BEFORE_S = 4.0  # for a flood to rise, and for what it has left to go
_WAIT_S = 30.0
_CONNECTIONS = 8  # of each flood; a crowd has more
_CROWD = 1300
_MASK = bytes(4)  # that of a WebSocket's frames
_UNKNOWN = "POST /nothing HTTP/1.1\r\nHost: localhost\r\n"
_INFER = "POST /v2/models/whisper/infer HTTP/1.1\r\nHost: localhost\r\n"
_LIVE = (
    "GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)

Client = Callable[[socket.socket], None]


@dataclasses.dataclass(frozen=True)
class Flood:
    """Figures of requests beside a flood, or beside none."""

    name: str
    answers: int
    failures: int
    median_ms: float
    longest_ms: float

    def __str__(self) -> str:
        """Write a line of the report."""
        return (
            f"{self.name:28} {self.answers:4} answers, {self.failures} failures: median "
            f"{self.median_ms:.0f} ms, longest {self.longest_ms:.0f} ms"
        )


def measure_floods(address: str, ask: Ask, clip: bytes, seconds: float) -> Iterator[Flood]:
    """Ask for one clip over and over: in quiet, and beside each flood.

    Args:
        address: of the gateway's HTTP.
        ask: gives a text.
        clip: a short recording's bytes.
        seconds: for which each lasts.
    """
    yield _beside("quiet", ask, clip, seconds)
    for name in FLOODS:
        # Spawned, for this process has threads of gRPC; and daemonic, to end with it.
        spawn = multiprocessing.get_context("spawn")
        flooding = spawn.Process(target=_flood, args=(name, address), daemon=True)
        flooding.start()
        try:
            time.sleep(_BEFORE_S)
            yield _beside(name, ask, clip, seconds)
        finally:
            flooding.kill()
            flooding.join()
            time.sleep(_BEFORE_S)


def _beside(name: str, ask: Ask, clip: bytes, seconds: float) -> Flood:
    took_s, failures, end_s = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        try:
            ask(clip)
            took_s.append(time.perf_counter() - began_s)
        except EarshotError:
            failures += 1
    times = np.array(took_s or [np.inf]) * 1e3
    return Flood(name, len(took_s), failures, float(np.median(times)), float(times.max()))


def _flood(name: str, address: str) -> None:
    """Flood until this process is killed."""
    os.nice(10)  # the clients' own work is not what is measured
    made, connections = FLOODS[name]
    flood = made()

    def again() -> None:
        while True:
            with contextlib.suppress(OSError), connect(address, _WAIT_S) as connection:
                flood(connection)
            time.sleep(0.01)

    threads = [threading.Thread(target=again, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def flood_once(name: str, address: str, seconds: float) -> None:
    """Do what a client of a flood does, once and for so long; where it is a crowd, what all do."""
    _, connections = FLOODS[name]
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        sockets = [
            stack.enter_context(connect(address, seconds))
            for _ in range(connections if connections == _CROWD else 1)
        ]
        ending = threading.Timer(seconds, _hang_up, (sockets[0],))
        stack.callback(ending.cancel)
        ending.start()
        _client(name)(sockets[0])


def _hang_up(connection: socket.socket) -> None:
    """Shut it down and do not close it, for threads may wait for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@functools.cache
def _client(name: str) -> Client:
    return FLOODS[name][0]()  # some make megabytes


def _bytes_apart(head: str) -> Client:
    """Send a body in chunks of one byte."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(100):
            connection.sendall(b"1\r\n \r\n" * 10_000)

    return flood


def _silence(connection: socket.socket) -> None:
    """Say nothing until the server hangs up."""
    connection.recv(1)


def _refused(connection: socket.socket) -> None:
    """Send requests that are refused, one behind the other."""
    drain = threading.Thread(target=_take_all, args=(connection,), daemon=True)
    drain.start()
    while True:
        connection.sendall(f"{_UNKNOWN}Content-Length: 0\r\n\r\n".encode() * 1000)


def _json(piece: str, size: int) -> Client:
    """Send a request whose JSON is a list of so many bytes."""
    data = '{"inputs":[{"name":"SAMPLES","shape":[1],"datatype":"FP32","data":['
    body = data + ",".join(itertools.repeat(piece, size // (len(piece) + 1))) + "]}]}"
    request = f"{_INFER}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def flood(connection: socket.socket) -> None:
        connection.sendall(request)
        connection.recv(10_000)

    return flood


def _frames(first: bytes, further: bytes) -> Client:
    """Send a WebSocket's first frames once, and further ones over and over."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(_LIVE.encode() + first)
        threading.Thread(target=_take_all, args=(connection,), daemon=True).start()
        while True:
            connection.sendall(further)

    return flood


def _unfinished(connection: socket.socket) -> None:
    """Send a message that is never whole."""
    connection.sendall(_LIVE.encode())
    connection.sendall(_frame(1, bytes(2**24 - 2**16), length=2**24))
    _take_all(connection)


def _frame(opcode: int, data: bytes, fin: bool = True, length: int | None = None) -> bytes:
    length = len(data) if length is None else length
    head = bytes([opcode | (0x80 if fin else 0)])
    if length < 126:
        return head + bytes([0x80 | length]) + _MASK + data
    return head + bytes([0x80 | 127]) + length.to_bytes(8, "big") + _MASK + data


def _take_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def _update() -> Client:
    keys = ",".join(f'"k{number}":1' for number in range(700_000))
    return _frames(b"", _frame(1, ('{"type":"session.update","session":{' + keys + "}}").encode()))


FLOODS: dict[str, tuple[Callable[[], Client], int]] = {
    "bytes apart, refused": (lambda: _bytes_apart(_UNKNOWN), _CONNECTIONS),
    "bytes apart, taken": (lambda: _bytes_apart(_INFER), _CONNECTIONS),
    "refusals": (lambda: _refused, _CONNECTIONS),
    "a crowd that says nothing": (lambda: _silence, _CROWD),
    "JSON of empty objects": (lambda: _json("{}", 15_000_000), _CONNECTIONS),
    "JSON of numbers": (lambda: _json("0.123456", 9_000_000), _CONNECTIONS),
    "settings of 700,000 keys": (_update, _CONNECTIONS),
    "pings": (lambda: _frames(b"", _frame(9, b"x") * 10_000), _CONNECTIONS),
    "frames of 2 bytes": (
        lambda: _frames(_frame(1, b"  ", fin=False), _frame(0, b"  ", fin=False) * 10_000),
        _CONNECTIONS,
    ),
    "messages never whole": (lambda: _unfinished, 24),
}
"""What makes the behaviour of a connection, and how many behave so, each again and again."""
