"""Run the gateway, which clients connect to, as a child process."""

import contextlib
import http.client
import signal
import socket
import ssl
import sys
import time
import urllib.request
from pathlib import Path

from serve.contract.errors import UnavailableError
from serve.contract.server_config import ServerConfig
from serve.supervisor.processes import Child
from serve.supervisor.supervised_process import ManagedProcess
from serve.wire.folder import gateway_alive, gateway_door
from serve.wire.liveness import heartbeat_age_s
from serve.wire.tensors import MODEL
from serve.wire.unix_http import ask

_ROOT = Path(__file__).resolve().parents[2]
_LOOK_S = 2.0
_INTERVAL_S = 1.0  # seconds between health checks
_GRACE_S = 5.0  # time beyond the drain timeout, which the gateway itself keeps


class GatewayProcess(ManagedProcess):
    """A started process of the gateway.

    Args:
        folder: the folder of the run.
        config: the addresses to listen on.
        log_path: the log file, which the process appends to.
        requests_to: file descriptor for the access log; None: it goes to the log file.
        number: the index of this process if there are several.
    """

    def __init__(
        self,
        folder: Path,
        config: ServerConfig,
        log_path: Path,
        requests_to: int | None = None,
        number: int = 0,
    ) -> None:
        self._config = config
        kept = () if requests_to is None else (requests_to,)
        option = () if requests_to is None else ("--requests-to", str(requests_to))
        words = [*command(folder, number), *option]
        super().__init__(Child(words, log_path, folder=_ROOT, kept=kept))
        self._socket = gateway_door(folder, number)
        self._alive = gateway_alive(folder, number)
        self._answers = False
        self._has_answered = False
        self._next_look = 0.0

    def ready(self) -> bool:
        # At most once a second, over a separate socket that clients cannot block.
        now = time.monotonic()
        if now >= self._next_look:
            self._answers = is_live(self._socket) and (self._has_answered or self._listens)
            self._next_look = now + _INTERVAL_S
            self._has_answered |= self._answers
        return self._answers

    def failure(self) -> str | None:
        status = self._child.status()
        if status is not None:
            errors = [line for line in self._child.log() if line.startswith("error: ")]
            if errors:
                return errors[-1].removeprefix("error: ")
            return f"it ended with status {status}; its log ends:\n{self.log_tail()}"
        silent_s = heartbeat_age_s(self._alive) if self._has_answered else 0.0
        if silent_s > self._config.stall_timeout_s:  # a slow loop is not a failure
            return f"its event loop was blocked for {silent_s:.0f} s (server.stall_timeout_s)"
        return None

    def drain(self) -> bool:
        """Drain and end the process; return whether every accepted request was answered."""
        status = self._child.terminate(self._config.drain_timeout_s + _GRACE_S)
        # If the signal itself ended the process, it did not listen yet and has accepted nothing.
        return status in (0, -signal.SIGTERM)

    @property
    def _listens(self) -> bool:
        config = self._config
        ports = (config.http_port, config.grpc_port, config.metrics_port)
        return all(listens(config.host, port) for port in ports)


def command(folder: Path, number: int) -> list[str]:
    """Return the command that starts a gateway process for the run in this folder."""
    called = [sys.executable, "-m", "serve.gateway", "--folder", str(folder)]
    return [*called, "--number", str(number)]


def address(host: str, port: int) -> str:
    """Join host and port to host:port or [host]:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ready(at: str, tls: bool = False) -> bool:
    """Return whether a server at this HTTP address is ready to answer."""
    context = ssl.create_default_context() if tls else None
    if context is not None:  # it is this server, so the certificate's name does not matter
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    url = f"{'https' if tls else 'http'}://{at}/v2/models/{MODEL}/ready"
    # This host name is always allowed, for any server.allowed_hosts.
    request = urllib.request.Request(url, headers={"Host": "localhost"})
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        urllib.request.urlopen(request, timeout=_LOOK_S, context=context) as answer,
    ):
        return bool(answer.status == 200)
    return False


def is_live(path: Path) -> bool:
    """Return whether a gateway answers on this Unix socket."""
    try:
        ask(path, "/v2/health/live", _LOOK_S)
    except OSError:
        return False
    return True


def listens(host: str, port: int) -> bool:
    """Return whether a process listens on an address."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_LOOK_S):
        return True
    return False


def check_ports(server: ServerConfig) -> None:
    """Check that the addresses are free, before any long work.

    Raises:
        UnavailableError: an address is in use, or is not one of this machine.
    """
    for key in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(server, key)
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server.host, port))
            except OSError as error:
                raise UnavailableError(
                    f"cannot listen on {server.host}:{port}: {error.strerror}; stop the other "
                    f"process, or set another server.{key} in the config"
                ) from error
