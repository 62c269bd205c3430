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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tomli_w

from serve.contract.config import Config, table_of
from serve.contract.errors import UnavailableError
from serve.supervisor.installation import find_installation
from serve.supervisor.processes import ManagedProcess, SupervisedProcess, live_children
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
    values = {"name": MODEL, "config": toml, "engine": engine.resolve(), "folder": folder}
    escaped = {
        key: str(value).replace("\\", "\\\\").replace('"', '\\"') for key, value in values.items()
    }
    template = string.Template((_TEMPLATE / "config.pbtxt").read_text(encoding="utf-8"))
    # A client may omit any input; `wire.request_from_inputs` checks which belong together.
    lines = [f"input {{ {_fields(spec)} optional: true }}" for spec in INPUTS.values()]
    lines += [f"output {{ {_fields(spec)} }}" for spec in OUTPUTS.values()]
    text = template.substitute(escaped) + "\n".join(lines)
    (repository / MODEL / "config.pbtxt").write_text(text, encoding="utf-8")
    (code / "model.py").symlink_to(_TEMPLATE / "1" / "model.py")
    (code / "serve").symlink_to(_SERVE)
    return repository


def _fields(spec: TensorSpec) -> str:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return f'name: "{spec.name}" data_type: TYPE_{datatype} dims: {list(spec.dims)}'


@dataclasses.dataclass(frozen=True)
class TritonLaunch:
    """The command and the files of a `TritonServer`; made by `prepare`."""

    folder: Path
    config: Config
    engine: Path  # the engine's folder, with links resolved
    command: tuple[str, ...]
    environment: dict[str, str]


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
    _require_shared_memory(inflight_mib + count * _REGIONS_MIB)
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
    variables = {**installation.environment(), **(environment or {})}
    return TritonLaunch(folder, config, resolved, command, variables)


def config_to_toml(config: Config) -> str:
    """Return the TOML text from which `load_config` reads the same config."""
    return tomli_w.dumps(table_of(config))


class TritonServer(ManagedProcess):
    """A started tritonserver, without any state of an earlier process.

    Args:
        launch: the command and the files.
        log_path: the log file.

    Raises:
        UnavailableError: the program cannot be started.
    """

    def __init__(self, launch: TritonLaunch, log_path: Path) -> None:
        self._folder = folder = launch.folder
        names.remove_shared_memory(folder)
        sockets = (f"{names.GRPC_SOCKET}:{names.GRPC_PORT}", names.METRICS_SOCKET)
        for name in (*sockets, names.FAILURE, names.ALIVE):
            (folder / name).unlink(missing_ok=True)
        super().__init__(launch.command, log_path, launch.environment)
        self._stall_timeout_s = launch.config.server.stall_timeout_s
        self._has_been_ready = False
        # The number of abandoned requests at the last reading with a recent heartbeat.
        self._known_abandoned = 0.0

    def ready(self) -> bool:
        if not self._has_been_ready and self._loaded():
            # Triton creates the shared memory of requests readable by all, with any umask. It
            # creates none after this.
            for region in names.shared_memory(self._folder):
                region.chmod(0o600)
            self._has_been_ready = True
        return self._has_been_ready and self._silent_s() < STALE_S

    def failure(self) -> str | None:
        if reason := self._written_failure():
            return reason
        status = self.status()
        if status is not None:
            return f"it ended with status {status}: {self._cause()}"
        return self._breakdown() if self._has_been_ready else None

    def _loaded(self) -> bool:
        present = (self._folder / names.METRICS_SOCKET, self._folder / names.ALIVE)
        if not all(path.exists() for path in present) or _metrics(self._folder) is None:
            return False
        with TritonClient(names.grpc_target(self._folder)) as client:
            return client.ready()

    def _silent_s(self) -> float:
        return heartbeat_age_s(self._folder / names.ALIVE)

    def _cause(self) -> str:
        return cause(self.log()) or f"its log ends:\n{self.log_tail()}"

    def _written_failure(self) -> str | None:
        """Return the failure that the engine's process has written."""
        path = self._folder / names.FAILURE
        with contextlib.suppress(FileNotFoundError):
            age_s = abs(time.time() - path.stat().st_mtime)  # the clock may have been set back
            text = path.read_text(encoding="utf-8")
            if text or age_s > _TELLING_S:  # empty if the disk is full
                return text or "a model's process has failed; see its log"
        return None

    def _breakdown(self) -> str | None:
        """Return what has failed in the model while Triton itself still runs."""
        if not live_children(self.pid):
            return f"a model's process ended: {self._cause()}"
        silent_s = self._silent_s()
        if silent_s > self._stall_timeout_s:
            return (
                f"a model's process had no heartbeat for {silent_s:.0f} s; the maximum is "
                f"server.stall_timeout_s = {self._stall_timeout_s:g}"
            )
        return self._abandoned_requests(silent_s)

    def _abandoned_requests(self, silent_s: float) -> str | None:
        """Return whether Triton has abandoned requests that a silent process has not read yet.

        Triton waits one second for a stopped process, which no option changes, and then forgets the
        request. If the process runs again it answers the request, and Triton crashes.
        """
        page = _metrics(self._folder) or ""
        counts = re.findall(r'^nv_inference_request_failure{.*"BACKEND".*} (\S+)', page, re.M)
        abandoned = sum(map(float, counts))
        if silent_s < INTERVAL_S:  # nothing since the last heartbeat can be abandoned yet
            self._known_abandoned = abandoned
        elif silent_s > STALE_S and abandoned > self._known_abandoned:
            return "a model's process was stopped, and Triton abandoned requests that it still has"
        return None


def cause(log: Sequence[str]) -> str | None:
    """Return the reason for Triton's end from its log, as a sentence; None if it has none."""
    rejected = re.findall(r"failed to load '\w+' version \d+: (.*)", "\n".join(log))
    if rejected:
        return str(rejected[0]).rstrip('"')
    for line in log:
        if match := re.match(r"Signal \((\d+)\) received", line):
            return f"it crashed with signal {match.group(1)}"
    errors = [line for line in log if re.match(r"E\d{4} |error|Failed to", line)]
    errors = [line for line in errors if not any(noise in line for noise in _NOISE)]
    return errors[-1].split("] ", 1)[-1] if errors else None


class SupervisedTriton(SupervisedProcess):
    """A Triton through all its restarts.

    Args:
        title: the name in messages.
        launch: the command and the files.
        log_path: the log file.
        needed: see `SupervisedProcess`.
    """

    def __init__(
        self, title: str, launch: TritonLaunch, log_path: Path, needed: Callable[[], bool]
    ) -> None:
        timeout_s = launch.config.server.start_timeout_s
        super().__init__(title, lambda: TritonServer(launch, log_path), timeout_s, needed)
        self.launch = launch

    def failure(self) -> str | None:
        """Return why the running Triton has failed; None if it has not, or none runs."""
        running = self.running
        return None if running is None else running.failure()

    def has_requests(self) -> bool:
        """Return whether Triton runs and a gateway awaits answers from it."""
        running = self.running is not None and self.failure() is None
        return running and names.is_held(self.launch.folder)

    def stop(self) -> None:
        """End Triton for good; its requests are lost."""
        if (running := self.running) is not None:
            running.terminate(_STOP_S)
        self.kill()


def _require_shared_memory(needed_mib: int) -> None:
    """Check that shared memory can hold the requests in flight and what the engines need.

    Raises:
        UnavailableError: too little shared memory is free.
    """
    status = os.statvfs(names.SHARED_MEMORY)
    free_mib = status.f_bavail * status.f_frsize // _MIB
    if free_mib < needed_mib:
        raise UnavailableError(
            f"{names.SHARED_MEMORY}, which holds requests, has {free_mib} MiB free; expected "
            f"{needed_mib} MiB; enlarge it (containers: --shm-size {needed_mib}m or more), lower "
            "server.max_inflight_mb, or reload with --in-place"
        )


def _metrics(folder: Path) -> str | None:
    """Return Triton's metrics page; None while there is none."""
    with contextlib.suppress(OSError):
        return ask(folder / names.METRICS_SOCKET, "/metrics", _METRICS_TIMEOUT_S).decode()
    return None
