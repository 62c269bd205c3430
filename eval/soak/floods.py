"""The scenario of floods that need no key: how long others wait for a text beside each."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

from eval.record import Check
from eval.server import connect
from eval.soak.client import Ending, all_answered, counted
from eval.soak.findings import Found
from eval.soak.stage import Stage

MAX_RATIO = 2.0
_SECONDS = 6.0  # for which each flood lasts
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


def floods(stage: Stage) -> Found:
    """Ask for a short clip over and over, in quiet and beside each flood."""
    quiet = _asked(stage)
    yield all_answered(quiet)
    quiet_s = statistics.median(ending.seconds for ending in quiet)
    yield "quiet: median, s", quiet_s
    for name in FLOODS:
        # Spawned, because this process has threads of gRPC; daemonic, to end with it.
        spawn = multiprocessing.get_context("spawn")
        flooding = spawn.Process(target=_flood, args=(name, stage.at.http), daemon=True)
        flooding.start()
        try:
            time.sleep(_BEFORE_S)
            beside = _asked(stage)
        finally:
            flooding.kill()
            flooding.join()
            time.sleep(_BEFORE_S)
        median_s = statistics.median(ending.seconds for ending in beside)
        stage.say(f"floods: {name}: {median_s:.2f} s; {counted(beside)}")
        yield f"{name}: median, s", median_s
        held = median_s <= MAX_RATIO * quiet_s and all(e.kind == "answered" for e in beside)
        detail = f"{median_s:.2f} s against {quiet_s:.2f} s; {counted(beside)}"
        yield Check(f"{name}: others wait at most {MAX_RATIO:g} times as long", held, detail)


def _asked(stage: Stage) -> list[Ending]:
    """Ask for `_SECONDS`, at least once."""
    endings, end_s = [stage.ask(_WAIT_S)], time.monotonic() + _SECONDS
    while time.monotonic() < end_s:
        endings.append(stage.ask(_WAIT_S))
    return endings


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
