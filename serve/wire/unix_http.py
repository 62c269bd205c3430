"""Send small HTTP requests over Unix sockets between the processes of a run."""

from pathlib import Path

import httpcore2

_FAILED = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)


def ask(path: Path, address: str, timeout_s: float) -> bytes:
    """Send a GET request over a Unix socket.

    Args:
        path: the socket.
        address: the URL path, such as /metrics.
        timeout_s: the timeout of connecting and of each read.

    Raises:
        OSError: the connection fails, or the status is not 200.
    """
    timeouts = {"timeout": dict.fromkeys(("connect", "write", "read"), timeout_s)}
    try:
        with httpcore2.ConnectionPool(uds=str(path)) as pool:
            answer = pool.request("GET", f"http://localhost{address}", extensions=timeouts)
    except _FAILED as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    if answer.status != 200:
        raise ConnectionError(f"{address} has status {answer.status}")
    return answer.content
