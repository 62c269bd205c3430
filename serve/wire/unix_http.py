"""Send small HTTP requests over Unix sockets between the processes of a run."""

import contextlib
import http.client
import socket
from pathlib import Path


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, address: str, timeout_s: float) -> bytes:
    """Send a GET request over a Unix socket.

    Args:
        path: the socket.
        address: the URL path, such as /metrics.
        timeout_s: the timeout of connecting and of each read.

    Raises:
        OSError: the connection fails, or the status is not 200.
    """
    with contextlib.closing(_UnixConnection(path, timeout_s)) as connection:
        try:
            connection.request("GET", address)
            answer = connection.getresponse()
            page = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if answer.status != http.client.OK:
            raise ConnectionError(f"{address} has status {answer.status}")
    return page
