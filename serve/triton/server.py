"""Triton Inference Server as a child process: started, watched, drained and stopped.

Everything that the server needs besides its installation goes into a folder of the run's own,
which disappears with the run.
"""

import contextlib
import dataclasses
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import tomli_w

from serve.config import Config, ServerConfig
from serve.errors import EarshotError, UnavailableError
from serve.triton.installation import find_installation, require_numpy_1
from serve.triton.processes import live_children, peak_memory_bytes
from serve.triton.repository import write_repository

_MODELS = 2  # each in a process below the server
_POLL_S = 0.1
_KILL_S = 10.0  # beyond the drain's limit, after which the server is killed
_PR_SET_PDEATHSIG = 1
_MAX_PATH = 90  # a Unix socket's whole path has room for 107 bytes

# Replaces itself by the server. SIGTERM comes when whoever started it is gone, however that ended;
# the check after it is for a parent that went before the call.
_LAUNCH = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server."""

    http: str  # host:port
    grpc: str
    metrics: str  # host:port; the page is /metrics
    pid: int
    log_path: Path
    folder: Path
    process: "subprocess.Popen[bytes]"

    def peak_memory_bytes(self) -> int:
        """Largest resident memory of the server and its models, each at its own peak."""
        return sum(peak_memory_bytes(pid) for pid in (self.pid, *live_children(self.pid)))

    def failure(self) -> str | None:
        """Why the server, once ready, cannot go on; None while it can."""
        reason = self.startup_failure()
        if reason is None and len(live_children(self.pid)) < _MODELS:
            reason = f"a model's process ended; the log ends:\n{_tail(self.log_path)}"
        return reason

    def startup_failure(self) -> str | None:
        """Why the server will not become ready, or None while it may."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "failure").read_text(encoding="utf-8")
        if self.process.poll() is not None:
            return _explain_exit(self.process.returncode, self.log_path)
        return None

    def stop(self, timeout_s: float) -> None:
        """Let it finish what it has accepted, for at most `timeout_s`, and end it."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def kill(self) -> None:
        """End it and its models now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(_KILL_S)


@contextlib.contextmanager
def running_server(
    config: Config, engine: str | None = None, log_path: Path | None = None
) -> Iterator[Server]:
    """A server for the length of a `with` block; it is ready, and is drained at the end.

    Start it from a thread that lasts as long as the server, such as the main thread: the server
    stops when that thread ends.

    Args:
        config: addresses and limits; passed on to the model.
        engine: the engine's folder; None takes `config.engine`.
        log_path: file for the server's log; None keeps it only while the server runs.

    Raises:
        UnavailableError: the machine lacks what the server needs, or a port is taken.
        EarshotError: the server did not start; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        server = _launch(folder, config, engine or config.engine, log_path or folder / "server.log")
        try:
            _wait_until_ready(server, config.server.start_timeout_s)
            yield server
            server.stop(config.server.drain_timeout_s + _KILL_S)
        finally:
            server.kill()
            for left in Path("/dev/shm").glob(f"{folder.name}*"):  # after a crash
                left.unlink(missing_ok=True)


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on, for servers that need no well-known address."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return tuple(one.getsockname()[1] for one in sockets)


def on_free_ports(server: ServerConfig) -> ServerConfig:
    """The same server on ports that nobody listens on, to run beside one on the configured ones."""
    http, grpc, metrics = free_ports(server.host, 3)
    return dataclasses.replace(server, http_port=http, grpc_port=grpc, metrics_port=metrics)


def config_to_toml(config: Config) -> str:
    """The text of a file from which `load_config` reads the same configuration."""
    return tomli_w.dumps(dataclasses.asdict(config))


# ---------------------------------------------------------------- before the start


def _prepare(folder: Path, config: Config, engine: str) -> tuple[list[str], dict[str, str]]:
    """Write the run's folder; returns the server's command line and environment."""
    require_numpy_1()
    if len(str(folder)) > _MAX_PATH:
        raise UnavailableError(
            f"{folder} is too long a path for the socket in it; set TMPDIR to a shorter folder"
        )
    _check_ports(config.server)
    toml = folder / "config.toml"
    toml.write_text(config_to_toml(config), encoding="utf-8")
    repository = write_repository(folder, toml, Path(engine), config.runtime)
    installation = find_installation(folder)
    server = config.server
    command = [
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-directory={installation.backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.name}",
        f"--http-address={server.host}",
        f"--http-port={server.http_port}",
        f"--grpc-address={server.host}",
        f"--grpc-port={server.grpc_port}",
        f"--metrics-address={server.host}",
        f"--metrics-port={server.metrics_port}",
        f"--exit-timeout-secs={math.ceil(server.drain_timeout_s)}",
    ]
    return command, installation.environment()


def _check_ports(server: ServerConfig) -> None:
    for key in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(server, key)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server.host, port))
            except OSError as error:
                raise UnavailableError(
                    f"cannot listen on {server.host}:{port}: {error.strerror}; stop what runs "
                    f"there or set another server.{key} in the config"
                ) from error


# ---------------------------------------------------------------- start and stop


def _launch(folder: Path, config: Config, engine: str, log_path: Path) -> Server:
    server = config.server
    command, environment = _prepare(folder, config, engine)
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then stops the server
            )
    except OSError as error:
        raise UnavailableError(f"cannot start Triton Inference Server: {error}") from error
    return Server(
        http=f"{server.host}:{server.http_port}",
        grpc=f"{server.host}:{server.grpc_port}",
        metrics=f"{server.host}:{server.metrics_port}",
        pid=process.pid,
        log_path=log_path,
        folder=folder,
        process=process,
    )


def _wait_until_ready(server: Server, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not (is_ready(server.http) and _listens(server.metrics)):
        reason = server.startup_failure()
        if reason is not None:
            raise EarshotError(f"Triton Inference Server did not start: {reason}")
        if time.monotonic() > end:
            raise EarshotError(
                f"Triton Inference Server was not ready within {timeout_s:g} s "
                f"(server.start_timeout_s); its log ends:\n{_tail(server.log_path)}"
            )
        time.sleep(_POLL_S)


def is_ready(http: str) -> bool:
    """Whether a server answers at this HTTP address and both models are loaded."""
    url = f"http://{http}/v2/health/ready"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def _listens(address: str) -> bool:
    """Whether somebody listens at host:port; Triton's metrics begin a little after the rest."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


def _explain_exit(code: int, log_path: Path) -> str:
    """The lines of the log that say why the server ended."""
    log = log_path.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in log.splitlines() if re.match(r"E\d{4} |error", line)]
    found = "\n".join(errors[-3:]) if errors else _tail(log_path)
    return f"it ended with status {code}; its log says:\n{found}"


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-5:])
