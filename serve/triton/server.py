"""Triton Inference Server as a child process: write its model repository, start and stop it.

The server is the one that the wheel of `nvidia-pytriton` carries. What it needs around it:

- its Python backend folder with the stub for this Python beside it, which the wheel keeps apart;
- the wheel's own libraries and libpython in LD_LIBRARY_PATH;
- this environment's `python3` first in PATH: the stub ignores PYTHONPATH and takes its packages
  from the environment of the first `python3` that it finds;
- numpy below 2, for which the stub was compiled: with numpy 2 tensors arrive garbled.

All of it goes into a folder of the run's own, which disappears with the run.
"""

import contextlib
import ctypes.util
import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serve.config import Config, ServerConfig
from serve.errors import ConfigError, EarshotError, UnavailableError
from serve.triton.repository import write_repository

_MODELS = 2  # processes below the server
_CONTAINER = Path("/opt/tritonserver")  # in NVIDIA's images, which need none of the above
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
        return sum(_peak_bytes(pid) for pid in (self.pid, *_children(self.pid)))

    def failure(self) -> str | None:
        """Why the server, once ready, cannot go on; None while it can."""
        reason = self.startup_failure()
        if reason is None and len(_children(self.pid)) < _MODELS:
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
        engine: the engine's folder; None takes `config.build.engine`.
        log_path: file for the server's log; None keeps it only while the server runs.

    Raises:
        UnavailableError: the machine lacks what the server needs, or a port is taken.
        EarshotError: the server did not start; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command, environment = _prepare(folder, config, engine or config.build.engine)
        log_path = log_path or folder / "server.log"
        server = _launch(folder, config.server, command, environment, log_path)
        try:
            _wait_until_ready(server, config.server.start_timeout_s)
            yield server
            server.stop(config.server.drain_timeout_s + _KILL_S)
        finally:
            server.kill()
            for left in Path("/dev/shm").glob(f"{folder.name}*"):  # after a crash
                left.unlink(missing_ok=True)


def require_numpy_1(version: str) -> None:
    """Refuse a numpy that Triton's Python backend was not compiled for.

    Raises:
        UnavailableError: it is 2 or later.
    """
    if int(version.split(".")[0]) >= 2:
        raise UnavailableError(
            f"numpy {version} is installed, and Triton Inference Server's Python backend was "
            "compiled for numpy 1: it would send garbled tensors; install numpy below 2"
        )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on, for servers that need no well-known address."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return tuple(one.getsockname()[1] for one in sockets)


def config_to_toml(config: Config) -> str:
    """The text of a file from which `load_config` reads the same configuration."""
    return "\n".join(_toml_lines(dataclasses.asdict(config), "")) + "\n"


def _toml_lines(table: dict[str, Any], name: str) -> Iterator[str]:
    if name:
        yield f"[{name}]"
    for key, value in table.items():
        if not isinstance(value, dict):  # TOML's strings, numbers and lists are JSON's
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml_lines(value, f"{name}.{key}" if name else key)


# ---------------------------------------------------------------- before the start


def _prepare(folder: Path, config: Config, engine: str) -> tuple[list[str], dict[str, str]]:
    """Write the run's folder; returns the server's command line and environment."""
    require_numpy_1(np.__version__)
    if len(str(folder)) > _MAX_PATH:
        raise UnavailableError(
            f"{folder} is too long a path for the socket in it; set TMPDIR to a shorter folder"
        )
    _check_ports(config.server)
    toml = folder / "config.toml"
    toml.write_text(config_to_toml(config), encoding="utf-8")
    repository = write_repository(folder, toml, Path(engine), config.runtime)
    if (_CONTAINER / "bin" / "tritonserver").is_file():
        binary, backends, libraries = _CONTAINER / "bin", _CONTAINER / "backends", []
    else:
        wheel = _wheel()
        binary, backends = wheel / "tritonserver" / "bin", _link_backend(folder, wheel)
        libraries = [str(wheel.parent / "nvidia_pytriton.libs"), _libpython_folder()]
    server = config.server
    command = [
        str(binary / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.name}",
        f"--http-address={server.host}",
        f"--http-port={server.http_port}",
        f"--grpc-address={server.host}",
        f"--grpc-port={server.grpc_port}",
        f"--metrics-address={server.host}",
        f"--metrics-port={server.metrics_port}",
        f"--exit-timeout-secs={math.ceil(server.drain_timeout_s)}",
    ]
    path = [str(Path(sys.executable).parent)]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": _joined(libraries, "LD_LIBRARY_PATH"),
        "PATH": _joined(path, "PATH"),
    }
    return command, environment


def _joined(first: list[str], variable: str) -> str:
    return os.pathsep.join([*first, *filter(None, [os.environ.get(variable)])])


def _wheel() -> Path:
    found = importlib.util.find_spec("pytriton")
    if found is None or found.origin is None:
        raise UnavailableError(
            "Triton Inference Server is not installed: the wheel nvidia-pytriton is missing; "
            "install requirements.txt"
        )
    return Path(found.origin).parent


def _link_backend(folder: Path, wheel: Path) -> Path:
    """A backend folder as Triton expects it, with the stub for this Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = wheel / "tritonserver" / "backends" / "python"
    stub = wheel / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    target = folder / "backends" / "python"
    target.mkdir(parents=True)
    sources = (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub)
    for source in sources:
        if not source.is_file():
            raise UnavailableError(
                f"{source} is missing; expected nvidia-pytriton with a stub for Python {version}"
            )
        (target / source.name).symlink_to(source)
    return target.parent


def _libpython_folder() -> str:
    """Where the stub finds libpython; may be empty where the loader knows by itself."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"libpython{version}.so.1.0"
    folder = str(sysconfig.get_config_var("LIBDIR") or "")
    if (Path(folder) / name).is_file():
        return folder
    if ctypes.util.find_library(f"python{version}"):
        return ""
    raise UnavailableError(
        f"{name} was not found, and Triton's Python backend needs it; install this Python's "
        f"shared library (on Debian and Ubuntu: libpython{version})"
    )


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
            except OverflowError as error:
                raise ConfigError(f"server.{key} = {port}; expected a port below 65536") from error


# ---------------------------------------------------------------- start and stop


def _launch(
    folder: Path,
    server: ServerConfig,
    command: list[str],
    environment: dict[str, str],
    log_path: Path,
) -> Server:
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
    try:
        with urllib.request.urlopen(f"http://{http}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
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


def _children(pid: int) -> list[int]:
    """Direct children of a process that have not ended, whichever of its threads made them."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return [child for child in found if not _ended(child)]


def _ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has asked about."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(match.group(1)) * 1024 if match else 0
    return 0
