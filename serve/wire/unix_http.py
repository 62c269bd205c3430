"""HTTP over a Unix socket, for small requests between the processes of a run."""

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
        path: of the socket.
        address: such as /metrics.
        timeout_s: most that connecting takes, and that each piece of the page is waited for.

    Raises:
        OSError: there is nobody, or no page.
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
