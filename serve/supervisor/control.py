"""Send reload requests to a running server over a socket in its folder, for its own user only.

A request is a line of JSON, and so is each progress report; the last one has the outcome.
"""

import contextlib
import dataclasses
import queue
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path

from serve.contract.codec import from_json, to_json
from serve.contract.config import Config, load_config
from serve.contract.errors import EarshotError, UnavailableError
from serve.wire.folder import CONFIG, CONTROL, runs

_ORDER_BYTES = 2**20
_CONNECT_S = 5.0
_POLL_S = 0.1  # longest wait of closing


MAX_CER = 0.25  # character error rate of a new engine on the clips


@dataclasses.dataclass(frozen=True)
class ReloadRequest:
    """A request to replace the engine."""

    config: Config  # the present config; only its `engine` may differ from the server's
    engine: str  # absolute path of the new engine's folder
    clips: str  # absolute path of the manifest of clips to transcribe; "" = none
    max_cer: float  # the highest character error rate on the clips
    in_place: bool  # whether the old engine ends before the new one starts


@dataclasses.dataclass(frozen=True)
class ReloadProgress:
    """A report of a request's progress; the last one has `done`."""

    text: str
    done: bool = False
    failed: bool = False


Tell = Callable[[ReloadProgress], object]
"""A function that receives reports, in any thread."""


def order_for(
    config: Config,
    engine: str = "",
    clips: str = "",
    max_cer: float = MAX_CER,
    in_place: bool = False,
) -> ReloadRequest:
    """Make the request for the engine that `engine`, or else the config, names."""
    return ReloadRequest(
        config,
        str(Path(engine or config.engine).absolute()),
        str(Path(clips).absolute()) if clips else "",
        max_cer,
        in_place,
    )


class Control:
    """A server of reload requests, with a thread for each request, until it is closed.

    Args:
        folder: the folder of the run.
        take: receives each request and the function for its reports.
    """

    def __init__(self, folder: Path, take: Callable[[ReloadRequest, Tell], object]) -> None:
        class ControlHandler(socketserver.StreamRequestHandler):
            timeout = _CONNECT_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client has disconnected
                    _answer(self, take)

        self._server = _ControlServer(str(folder / CONTROL), ControlHandler)
        (folder / CONTROL).chmod(0o600)
        # A second Ctrl-C may interrupt `close` while it holds a lock that this thread needs. The
        # process therefore does not wait for this thread.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="earshot-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ControlServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False


def _answer(
    asked: socketserver.StreamRequestHandler, take: Callable[[ReloadRequest, Tell], object]
) -> None:
    news: queue.SimpleQueue[ReloadProgress] = queue.SimpleQueue()
    try:
        take(
            from_json(ReloadRequest, asked.rfile.readline(_ORDER_BYTES), "the reload request"),
            news.put,
        )
    except EarshotError as error:
        news.put(ReloadProgress(str(error), done=True, failed=True))
    last = False
    while not last:
        told = news.get()
        asked.wfile.write(f"{to_json(told)}\n".encode())
        last = told.done


def give(order: ReloadRequest, say: Callable[[str], object]) -> None:
    """Send a request to the server that runs with its config, and wait for the outcome.

    Raises:
        UnavailableError: no such server runs, or it ended meanwhile.
        EarshotError: the request was refused, or the reload failed; the old engine serves on.
    """
    with _connected(order.config) as connection, connection.makefile("rwb") as file:
        file.write(f"{to_json(order)}\n".encode())
        file.flush()
        for line in file:
            news = from_json(ReloadProgress, line, "the server's answer")
            if news.failed:
                raise EarshotError(news.text)
            say(news.text)
            if news.done:
                return
    raise UnavailableError("the server ended before it had replaced its engine; see its log")


def _connected(config: Config) -> socket.socket:
    for folder in runs():
        with contextlib.suppress(EarshotError, OSError):
            server = load_config(folder / CONFIG).server
            if (server.host, server.http_port) == (config.server.host, config.server.http_port):
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(_CONNECT_S)
                connection.connect(str(folder / CONTROL))
                connection.settimeout(None)  # the server limits the time of each step
                return connection
    raise UnavailableError(
        f"no server of this user runs at {config.server.host}:{config.server.http_port}; expected "
        "the config, the user and the TMPDIR of the running server"
    )
