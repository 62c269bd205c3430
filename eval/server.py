"""Start a server as a user does, by `python -m serve start`, and look at it from outside."""

import contextlib
import dataclasses
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from eval.config import EvaluationProduct
from eval.processes import descendants, kill
from serve.contract.errors import EarshotError, UnavailableError
from serve.contract.keys import add_key, hash_of, new_key
from serve.supervisor.processes import ManagedProcess, peak_memory_bytes
from serve.supervisor.server import config_to_toml
from serve.supervisor.supervisor import for_this_machine

POLL_S = 0.1
_READY_GRACE_S = 10.0
_STOP_GRACE_S = 30.0  # beyond the drain's limit
_TIMEOUT_S = 10.0  # for the metrics page


@dataclasses.dataclass(frozen=True)
class Addresses:
    """The addresses that a server listens on, host:port, and the API key to send; "" for none."""

    http: str
    grpc: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that carry the key."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


class RunningServer:
    """A server in its own process group; `running` makes it.

    Args:
        config: with the ports that it listens on.
        folder: for its config, its logs and scratch files.
        keys: its API keys.
    """

    def __init__(self, config: EvaluationProduct, folder: Path, keys: Sequence[str]) -> None:
        server = config.server
        self.config, self.folder = config, folder
        ports = server.http_port, server.grpc_port, server.metrics_port
        self.http, self.grpc, self.metrics = (f"{server.host}:{port}" for port in ports)
        # One for each API key.
        self.addresses = [Addresses(self.http, self.grpc, key) for key in keys or ("",)]
        self.toml, self.log = folder / "server.toml", folder / "log"
        self.toml.write_text(config_to_toml(config), encoding="utf-8")
        command = [sys.executable, "-m", "serve", "start", "--config", str(self.toml)]
        # `self.log` gets the output of `serve start`; Triton and the engine have their own log.
        self._command = [*command, "--log", str(folder / "server.log")]
        self.process = ManagedProcess(self._command, self.log)

    def ready(self) -> bool:
        """Return whether the server says over HTTP that it is ready, and all its engines work."""
        with contextlib.suppress(httpx2.TransportError):
            if request(self.http, "GET", "/v2/health/ready", _TIMEOUT_S).is_success:
                return all(sample.value for sample in samples(self.page(), "earshot_engine_up"))
        return False

    def wait_until_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            EarshotError: it is not ready in time; the message ends with its last lines.
        """
        end_s = time.monotonic() + self.config.server.start_timeout_s + _READY_GRACE_S
        while not self.ready():
            if self.process.status() is not None or time.monotonic() > end_s:
                raise EarshotError(f"the server did not start: {self.process.log_tail()}")
            time.sleep(POLL_S)

    def processes(self) -> dict[str, psutil.Process]:
        """Return its living processes by role; further ones of a role carry their id."""
        by_role: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(self.process.pid), *descendants(self.process.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        role = role_of(process.cmdline())
                        by_role[f"{role} {process.pid}" if role in by_role else role] = process
        return by_role

    def pids(self) -> dict[str, int]:
        """Return the process ids by role, without the sandboxes that each read one file."""
        processes = self.processes().items()
        return {role: process.pid for role, process in processes if "sandbox " not in role}

    def page(self) -> str:
        """Read the metrics page; "" while the server does not answer."""
        with contextlib.suppress(httpx2.TransportError):
            answer = request(self.metrics, "GET", "/metrics", _TIMEOUT_S)
            return answer.text if answer.is_success else ""
        return ""

    def require_unbroken(self) -> None:
        """Check that neither the server nor a process of it was started again.

        Raises:
            EarshotError: it ended, or a process of it was started again.
        """
        if failure := self.process.failure():
            raise EarshotError(f"the server ended by itself: {failure}")
        if restarts := total(self.page(), "earshot_restarts_total"):
            raise EarshotError(f"the server failed and was started {restarts:g} times; {self.log}")

    def counters(self, *names: str) -> dict[str, float]:
        """Read counters of the metrics page, each summed over its labels.

        Raises:
            EarshotError: the page cannot be read, or as `require_unbroken`.
        """
        self.require_unbroken()
        page = self.page()
        if not page:
            raise UnavailableError(f"the server's metrics at {self.metrics} cannot be read")
        return {name: total(page, name) for name in names}

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time so far by role, summed over the processes of a role."""
        spent_s = defaultdict[str, float](float)
        for role, process in self.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                spent_s[role.partition(" ")[0]] += sum(process.cpu_times()[:2])
        return spent_s

    def peak_memory_bytes(self) -> int:
        """Sum its processes' largest resident memory, each at its own peak."""
        return sum(peak_memory_bytes(process.pid) for process in self.processes().values())

    def restart(self) -> None:
        """Kill it and start it again."""
        self.end()
        self.process = ManagedProcess(self._command, self.log)

    def stop(self) -> float:
        """Send SIGTERM and wait for the drain; return the seconds."""
        began_s = time.monotonic()
        self.process.terminate(self.config.server.drain_timeout_s + _STOP_GRACE_S)
        return time.monotonic() - began_s

    def end(self) -> None:
        """Kill everything that still runs."""
        kill(descendants(self.process.pid))
        self.process.kill()


@contextlib.contextmanager
def running(config: EvaluationProduct, *, keys: int = 0) -> Iterator[RunningServer]:
    """Run a server on free ports of loopback, without TLS; it is ready, and ends with the block.

    Args:
        config: the server's config.
        keys: number of API keys that it has; 0 asks for none.

    Raises:
        EarshotError: the server did not become ready; the message ends with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-eval-", ignore_cleanup_errors=True) as name:
        folder, key_list = Path(name), [new_key() for _ in range(keys)]
        keys_file = folder / "keys.toml"
        for number, key in enumerate(key_list):
            add_key(keys_file, f"client-{number}", {"sha256": hash_of(key)})
        section = dataclasses.replace(
            for_this_machine(config.server),
            usage_file=config.server.usage_file,
            keys_file=str(keys_file) if keys else "",
        )
        config = dataclasses.replace(config, server=section)
        server = RunningServer(config, folder, key_list)
        try:
            server.wait_until_ready()
            yield server
        finally:
            # The first signal asks for a drain, the second cuts it short; files are removed.
            if server.process.terminate(POLL_S) is None:
                server.process.terminate(_STOP_GRACE_S)
            server.end()


# ---------------------------------------------------------------- processes and metrics


def role_of(command: Sequence[str]) -> str:
    """Name the role of a server's process by its command line."""
    line = " ".join(command)
    if match := re.search(r"python_backend_stub \S*/models/(\w+)/", line):
        return match[1]
    if "serve.gateway" in line:
        return "gateway"
    if "sandbox.server" in line:
        return "sandbox"
    if "serve.native import process" in line:
        return "runtime"
    if command and Path(command[0]).name == "tritonserver":
        return "tritonserver"
    return "supervisor" if "-m serve start" in line else line[:60] or "unnamed"


def samples(page: str, name: str) -> list[Sample]:
    """Return the samples of a name in a page of metrics, in Prometheus' text format."""
    families = text_string_to_metric_families(page)
    return [sample for family in families for sample in family.samples if sample.name == name]


def total(page: str, name: str) -> float:
    """Return the sum of a metric over all its labels; 0 if the page lacks it."""
    return sum(sample.value for sample in samples(page, name))


def request(
    address: str, method: str, path: str, timeout_s: float, **content: Any
) -> httpx2.Response:
    """Send one HTTP request over a new connection.

    Args:
        address: host:port.
        method: of HTTP.
        path: with its query.
        timeout_s: the longest wait for the server, again after each part of the answer.
        content: further arguments of `httpx2.request`.

    Raises:
        httpx2.TransportError: there is no whole answer.
    """
    options: dict[str, Any] = {"timeout": timeout_s, "trust_env": False, "verify": False}
    return httpx2.request(method, f"http://{address}{path}", **options, **content)
