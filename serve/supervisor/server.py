"""Run Triton Inference Server as a child process that only the gateway can reach.

It listens only on two Unix sockets in the folder of the run, for gRPC and metrics. Its HTTP port is
off, and the calls that change or reveal the server are locked.
"""

import contextlib
import dataclasses
import os
import re
import secrets
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from serve.contract.config import Config, table_of
from serve.contract.errors import UnavailableError
from serve.contract.server_config import ServerConfig
from serve.supervisor.installation import find_installation
from serve.supervisor.processes import (
    Child,
    live_children,
    log_tail,
    memory_bytes,
    peak_memory_bytes,
)
from serve.supervisor.supervised_process import ManagedProcess
from serve.wire import folder as names
from serve.wire.client import TritonClient
from serve.wire.liveness import INTERVAL_S, STALE_S, heartbeat_age_s
from serve.wire.tensors import INPUTS, MODEL, OUTPUTS, TensorSpec, require_numpy_1
from serve.wire.unix_http import ask

_MAX_PATH = 85  # the path of a Unix socket has at most 107 bytes
_MIB = 2**20
_REGIONS_MIB = 16  # shared memory of the model's process without requests, and some reserve
_METRICS_TIMEOUT_S = 2.0
# When Triton is told to end, the gateway has no requests in flight. Triton then waits only for
# requests that it has leaked, and always for the whole time.
_EXIT_S = 3
_TELLING_S = 1.0  # time for a process to write why it has failed
_STOP_S = 5.0  # time to close the model before the process is killed

# APIs that a client of the model does not need. They require a header with a secret name and value.
_LOCKED = "shared-memory,model-repository,model-config,statistics,trace,logging"
# Lines with which Triton explains itself but does not mean its end.
_NOISE = ("CudaDriverHelper has not been initialized",)
_SERVE = Path(__file__).resolve().parents[1]
_TEMPLATE = _SERVE / "triton" / "model_repository" / MODEL


def write_repository(folder: Path, toml: Path, engine: Path) -> Path:
    """Write `<folder>/models` with the model `whisper`.

    The package `serve` is linked beside the model's code, because the Python backend's stub looks
    for packages there.

    Args:
        folder: the folder of the run.
        toml: the configuration file that the model reads.
        engine: the engine's folder.

    Returns:
        The repository.
    """
    repository = folder / "models"
    code = repository / MODEL / "1"
    code.mkdir(parents=True)
    values = {
        "name": MODEL,
        "config": toml,
        "engine": engine.resolve(),
        "folder": folder,
    }
    text = _filled(_TEMPLATE / "config.pbtxt", values) + _tensor_lists()
    (repository / MODEL / "config.pbtxt").write_text(text, encoding="utf-8")
    (code / "model.py").symlink_to(_TEMPLATE / "1" / "model.py")
    (code / "serve").symlink_to(_SERVE)
    return repository


def _tensor_lists() -> str:
    """Return the inputs and outputs of config.pbtxt, which `serve.wire.tensors` lists."""
    # A client may omit any input; `wire.request_from_inputs` checks which belong together.
    inputs = "".join(f"input {{ {_fields(spec)} optional: true }}\n" for spec in INPUTS.values())
    outputs = "".join(f"output {{ {_fields(spec)} }}\n" for spec in OUTPUTS.values())
    return inputs + outputs


def _fields(spec: TensorSpec) -> str:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return f'name: "{spec.name}" data_type: TYPE_{datatype} dims: {list(spec.dims)}'


def _filled(template: Path, values: Mapping[str, Any]) -> str:
    """Fill in the $-names of a template, escaped for strings of config.pbtxt."""
    escaped = {
        key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()
    }
    return string.Template(template.read_text(encoding="utf-8")).substitute(escaped)


@dataclasses.dataclass(frozen=True)
class TritonLaunch:
    """The command and the files to start Triton repeatedly; made by `prepare`."""

    folder: Path
    config: Config
    engine: Path  # the engine's folder, with links resolved
    command: tuple[str, ...]
    environment: dict[str, str]

    def start(self, log_path: Path) -> "TritonServer":
        """Start Triton without any state of an earlier process.

        Raises:
            UnavailableError: the program cannot be started.
        """
        names.remove_shared_memory(self.folder)
        sockets = (f"{names.GRPC_SOCKET}:{names.GRPC_PORT}", names.METRICS_SOCKET)
        for name in (*sockets, names.FAILURE, names.ALIVE):
            (self.folder / name).unlink(missing_ok=True)
        child = Child(self.command, log_path, self.environment)
        return TritonServer(self.folder, self.config.server, child)


def prepare(
    folder: Path,
    config: Config,
    engine: str,
    environment: Mapping[str, str] | None = None,
    count: int = 1,
    beside: bool = False,
) -> TritonLaunch:
    """Write the files that Triton and the model read.

    Args:
        folder: the folder of this Triton.
        config: the whole configuration, with one device.
        engine: the engine's folder.
        environment: variables to add to this process's environment.
        count: the number of engines of the run.
        beside: whether it will replace Tritons that still run.

    Raises:
        UnavailableError: the machine lacks something that the server needs.
        EarshotError: the engine cannot run with this config.
    """
    require_numpy_1()
    if len(str(folder)) > _MAX_PATH:
        raise UnavailableError(
            f"{folder} is too long a path for the sockets in it; set TMPDIR to a shorter folder"
        )
    inflight_mib = 0 if beside else config.server.max_inflight_mb
    _require_shared_memory(inflight_mib, count * _REGIONS_MIB)
    toml = folder / names.CONFIG
    toml.write_text(config_to_toml(config), encoding="utf-8")
    resolved = Path(engine).resolve()
    repository = write_repository(folder, toml, resolved)
    installation = find_installation(folder)
    key = f"{secrets.token_hex(16)}={secrets.token_hex(16)}"
    command = (
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-directory={installation.backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.name}",
        "--allow-http=false",
        f"--grpc-address=unix:{folder / names.GRPC_SOCKET}",
        f"--grpc-port={names.GRPC_PORT}",
        f"--grpc-restricted-protocol={_LOCKED}:{key}",
        # By default Triton keeps the messages of 8 requests of any size for reuse.
        "--grpc-infer-allocation-pool-size=0",
        f"--metrics-address=unix:{folder / names.METRICS_SOCKET}",
        f"--metrics-port={names.METRICS_PORT}",
        f"--exit-timeout-secs={_EXIT_S}",
    )
    whole = {**installation.environment(), **(environment or {})}
    return TritonLaunch(folder, config, resolved, command, whole)


def config_to_toml(config: Config) -> str:
    """Return the TOML text from which `load_config` reads the same config."""
    return tomli_w.dumps(table_of(config))


class TritonServer(ManagedProcess):
    """A started tritonserver, which may become ready and may fail."""

    def __init__(self, folder: Path, config: ServerConfig, child: Child) -> None:
        super().__init__(child)
        self.pid = child.pid
        self._folder = folder
        self._config = config
        self._has_been_ready = False
        self._given_up = 0.0  # abandoned requests at the last reading while the model was healthy

    def ready(self) -> bool:
        if not self._has_been_ready and self._loaded():
            self._close_regions()
            self._has_been_ready = True
        return self._has_been_ready and self._silent_s() < STALE_S

    def failure(self) -> str | None:
        if reason := self._written_failure():
            return reason
        status = self._child.status()
        if status is not None:
            return f"it ended with status {status}: {cause(self._child.log())}"
        if self._has_been_ready:
            return self._breakdown()
        return None

    def peak_memory_bytes(self) -> int:
        """Return the sum of the peak resident memory of the server and its model."""
        return sum(peak_memory_bytes(pid) for pid in (self.pid, *live_children(self.pid)))

    def memory_bytes(self) -> int:
        """Return the present resident memory of the server and its model."""
        return sum(memory_bytes(pid) for pid in (self.pid, *live_children(self.pid)))

    def stop(self) -> None:
        """End Triton; its requests are lost."""
        self._child.terminate(_STOP_S)
        self.kill()

    def _loaded(self) -> bool:
        present = (self._folder / names.METRICS_SOCKET, self._folder / names.ALIVE)
        if not all(path.exists() for path in present) or _metrics(self._folder) is None:
            return False
        with TritonClient(names.grpc_target(self._folder)) as client:
            return client.ready()

    def _close_regions(self) -> None:
        """Make the shared memory of requests readable for this user only.

        Triton creates its regions readable by all, with any umask. It creates none after this.
        """
        for region in names.shared_memory(self._folder):
            region.chmod(0o600)

    def _silent_s(self) -> float:
        return heartbeat_age_s(self._folder / names.ALIVE)

    def _written_failure(self) -> str | None:
        """Return the failure that the engine's process has written."""
        path = self._folder / names.FAILURE
        with contextlib.suppress(FileNotFoundError):
            since_s = abs(time.time() - path.stat().st_mtime)  # the clock may have been set back
            text = path.read_text(encoding="utf-8")
            if text or since_s > _TELLING_S:  # empty if the disk is full
                return text or "a model's process has failed; see its log"
        return None

    def _breakdown(self) -> str | None:
        """Return what has failed in the model while Triton itself still runs."""
        if not live_children(self.pid):
            return f"a model's process ended: {cause(self._child.log())}"
        silent_s = self._silent_s()
        if silent_s > self._config.stall_timeout_s:
            return (
                f"a model's process had no heartbeat for {silent_s:.0f} s; the maximum is "
                f"server.stall_timeout_s = {self._config.stall_timeout_s:g}"
            )
        return self._abandoned_requests(silent_s)

    def _abandoned_requests(self, silent_s: float) -> str | None:
        """Return whether Triton has abandoned requests that a silent process has not read yet.

        Triton waits one second for a stopped process, which no option changes, and then forgets the
        request. If the process runs again it answers the request, and Triton crashes.
        """
        page = _metrics(self._folder) or ""
        counts = re.findall(r'^nv_inference_request_failure{.*"BACKEND".*} (\S+)', page, re.M)
        given_up = sum(map(float, counts))
        if silent_s < INTERVAL_S:  # nothing since the last heartbeat can be abandoned yet
            self._given_up = given_up
        elif silent_s > STALE_S and given_up > self._given_up:
            return "a model's process was stopped, and Triton abandoned requests that it still has"
        return None


def cause(log: Sequence[str]) -> str:
    """Return the reason for Triton's end from its log, as a sentence if possible."""
    refused = [re.search(r"failed to load '\w+' version \d+: (.*)", line) for line in log]
    reasons = [match.group(1).rstrip('"') for match in refused if match is not None]
    if reasons:
        return reasons[0]
    for line in log:
        if match := re.match(r"Signal \((\d+)\) received", line):
            return f"it crashed with signal {match.group(1)}"
    errors = [line for line in log if re.match(r"E\d{4} |error|Failed to", line)]
    meant = [line for line in errors if not any(noise in line for noise in _NOISE)]
    return meant[-1].split("] ", 1)[-1] if meant else f"its log ends:\n{log_tail(log)}"


def _require_shared_memory(inflight_mib: int, regions_mib: int) -> None:
    """Check that shared memory can hold the requests in flight.

    Args:
        inflight_mib: the maximum MiB of requests, for all engines together.
        regions_mib: the MiB that the engines need in addition.

    Raises:
        UnavailableError: too little shared memory is free.
    """
    status = os.statvfs(names.SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize // _MIB
    needed = inflight_mib + regions_mib
    if free < needed:
        raise UnavailableError(
            f"{names.SHARED_MEMORY}, which holds requests, has {free} MiB free; expected {needed} "
            f"MiB (server.max_inflight_mb and {regions_mib} more); enlarge it (containers: "
            f"--shm-size {needed}m or more) or lower server.max_inflight_mb"
            if inflight_mib
            else f"{names.SHARED_MEMORY} has {free} MiB free; expected {needed} for another "
            "engine; enlarge it, or reload with --in-place"
        )


def _metrics(folder: Path) -> str | None:
    """Return Triton's metrics page; None while there is none."""
    with contextlib.suppress(OSError):
        return ask(folder / names.METRICS_SOCKET, "/metrics", _METRICS_TIMEOUT_S).decode()
    return None
