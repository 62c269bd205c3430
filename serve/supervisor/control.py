"""Send reload requests to a running server over a socket in its folder, for its own user only.

A request is a line of JSON, and so is each progress report; the last one has the outcome.
"""

import contextlib
import dataclasses
import queue
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from serve.contract.codec import from_json, to_json
from serve.contract.config import Config, load_config
from serve.contract.errors import EarshotError, UnavailableError
from serve.wire.folder import CONFIG, CONTROL, runs

_REQUEST_BYTES = 2**20
_CONNECT_S = 5.0
_POLL_S = 0.1  # longest wait at the end


MAX_CER = 0.25  # character error rate of a new engine on the clips


@dataclasses.dataclass
class ReloadRequest:
    """A request to replace the engine; its paths become absolute."""

    config: Config  # the present config; only its `engine` may differ from the server's
    engine: str = ""  # path of the new engine's folder; "" = the config's
    clips: str = ""  # path of the manifest of clips to transcribe; "" = none
    max_cer: float = MAX_CER  # the highest character error rate on the clips
    in_place: bool = False  # whether the old engine ends before the new one starts

    def __post_init__(self) -> None:
        self.engine = str(Path(self.engine or self.config.engine).absolute())
        self.clips = self.clips and str(Path(self.clips).absolute())


@dataclasses.dataclass(frozen=True)
class ReloadProgress:
    """A report of a request's progress; the last one has `done`."""

    text: str
    done: bool = False
    failed: bool = False


Report = Callable[[ReloadProgress], object]
"""A function that receives reports, in any thread."""


@contextlib.contextmanager
def serve_requests(folder: Path, ask: Callable[[ReloadRequest, Report], object]) -> Iterator[None]:
    """Accept reload requests inside a `with` block, with a thread for each.

    Args:
        folder: the folder of the run.
        ask: receives each request and the function for its reports.
    """

    class ControlHandler(socketserver.StreamRequestHandler):
        timeout = _CONNECT_S

        def handle(self) -> None:
            reports: queue.SimpleQueue[ReloadProgress] = queue.SimpleQueue()
            with contextlib.suppress(OSError):  # the client has disconnected
                line = self.rfile.readline(_REQUEST_BYTES)
                try:
                    ask(from_json(ReloadRequest, line, "the reload request"), reports.put)
                except EarshotError as error:
                    reports.put(ReloadProgress(str(error), done=True, failed=True))
                done = False
                while not done:
                    report = reports.get()
                    self.wfile.write(f"{to_json(report)}\n".encode())
                    done = report.done

    server = _ControlServer(str(folder / CONTROL), ControlHandler)
    (folder / CONTROL).chmod(0o600)
    # A second Ctrl-C may interrupt the end of the block while it holds a lock that this thread
    # needs. The process therefore does not wait for this thread.
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_S,), name="earshot-control", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _ControlServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False


def send_request(request: ReloadRequest, say: Callable[[str], object]) -> None:
    """Send a request to the server that runs with its config, and wait for the outcome.

    Raises:
        UnavailableError: no such server runs, or it ended meanwhile.
        EarshotError: the request was refused, or the reload failed; the old engine serves on.
    """
    with _connected(request.config) as connection, connection.makefile("rwb") as file:
        file.write(f"{to_json(request)}\n".encode())
        file.flush()
        for line in file:
            report = from_json(ReloadProgress, line, "the server's answer")
            if report.failed:
                raise EarshotError(report.text)
            say(report.text)
            if report.done:
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
