"""HTTP by hand: what no library would send."""

import contextlib
import dataclasses
import http.client
import socket
import time
from collections.abc import Iterable, Iterator

from eval.server import connect
from eval.soak.client import INFER_PATH, Ending, ended_by_http, lost

_PIECE_S = 10.0  # longest wait for room to send one piece


@dataclasses.dataclass(frozen=True)
class Upload:
    """An upload that ended, and what it had sent until then."""

    ending: Ending
    sent_bytes: int


def head(host: str, **headers: object) -> bytes:
    """Write the head of a POST to the model; underscores in names stand for dashes."""
    lines = [f"POST {INFER_PATH} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def chunked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces as chunks of a body without a length."""
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def upload(address: str, head: bytes, pieces: Iterable[bytes], timeout_s: float) -> Upload:
    """Send a head and pieces of a body until the server answers or hangs up, then read the answer.

    Args:
        address: host:port.
        head: up to the empty line.
        pieces: of the body as they go over the wire; they may be endless.
        timeout_s: how long all of it may take.
    """
    began, sent = time.monotonic(), 0
    with contextlib.closing(connect(address, timeout_s)) as connection:
        try:
            connection.sendall(head)
            for piece in pieces:
                if time.monotonic() - began > timeout_s:
                    break
                if _has_answer(connection):
                    break
                connection.settimeout(_PIECE_S)
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass  # a refusal may be followed by a hang-up; the answer can still be read
        left_s = max(1.0, timeout_s - (time.monotonic() - began))
        return Upload(_answer(connection, began, left_s), sent)


def _has_answer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) is not None
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


def _answer(connection: socket.socket, began: float, timeout_s: float) -> Ending:
    connection.settimeout(timeout_s)
    answer = http.client.HTTPResponse(connection, method="POST")
    try:
        answer.begin()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    return ended_by_http(answer.status, body, time.monotonic() - began)
