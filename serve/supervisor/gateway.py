"""Run the gateway, which clients connect to, as a child process."""

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path

from serve.contract.errors import UnavailableError
from serve.contract.server_config import ServerConfig
from serve.supervisor.processes import ManagedProcess
from serve.wire.folder import gateway_alive, gateway_socket
from serve.wire.liveness import heartbeat_age_s
from serve.wire.unix_http import ask

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 2.0
_INTERVAL_S = 1.0  # seconds between health checks
_GRACE_S = 5.0  # time beyond the drain timeout, which the gateway itself keeps


class GatewayProcess(ManagedProcess):
    """A started process of the gateway.

    Args:
        folder: the folder of the run.
        config: the addresses to listen on.
        log_path: the log file, which the process appends to.
        access_log_fd: file descriptor for the access log; None: it goes to the log file.
        number: the index of this process if there are several.
    """

    def __init__(
        self,
        folder: Path,
        config: ServerConfig,
        log_path: Path,
        access_log_fd: int | None = None,
        number: int = 0,
    ) -> None:
        command = [sys.executable, "-m", "serve.gateway", "--folder", str(folder)]
        command += ["--number", str(number)]
        descriptors = () if access_log_fd is None else (access_log_fd,)
        for descriptor in descriptors:
            command += ["--access-log-fd", str(descriptor)]
        super().__init__(command, log_path, folder=_ROOT, descriptors=descriptors)
        self._config = config
        self._socket = gateway_socket(folder, number)
        self._heartbeat = gateway_alive(folder, number)
        self._answers = False
        self._has_answered = False
        self._next_check_s = 0.0

    def ready(self) -> bool:
        # Check at most once a second, over a separate socket that clients cannot block.
        now_s = time.monotonic()
        if now_s >= self._next_check_s:
            self._answers = answers_get(self._socket, "/v2/health/live")
            self._next_check_s = now_s + _INTERVAL_S
            self._has_answered |= self._answers
        return self._answers

    def failure(self) -> str | None:
        reason = super().failure()
        if reason is not None:
            errors = [line for line in self.log() if line.startswith("error: ")]
            return errors[-1].removeprefix("error: ") if errors else reason
        silent_s = heartbeat_age_s(self._heartbeat) if self._has_answered else 0.0
        if silent_s > self._config.stall_timeout_s:  # a slow loop is not a failure
            return f"its event loop was blocked for {silent_s:.0f} s (server.stall_timeout_s)"
        return None

    def drain(self) -> bool:
        """Drain and end the process; return whether every accepted request was answered."""
        status = self.terminate(self._config.drain_timeout_s + _GRACE_S)
        # If the signal itself ended the process, it did not listen yet and has accepted nothing.
        return status in (0, -signal.SIGTERM)


def answers_get(path: Path, address: str) -> bool:
    """Return whether a gateway answers a GET request on this Unix socket with status 200."""
    with contextlib.suppress(OSError):
        ask(path, address, _TIMEOUT_S)
        return True
    return False


def check_ports(server: ServerConfig) -> None:
    """Check that the addresses are free, before any long work.

    Raises:
        UnavailableError: an address is in use, or is not one of this machine.
    """
    for name in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(server, name)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((server.host, port))
            except OSError as error:
                raise UnavailableError(
                    f"cannot listen on {server.host}:{port}: {error.strerror}; stop the other "
                    f"process, or set another server.{name} in the config"
                ) from error
