"""Run a server, Triton with the gateway in front of it, and supervise its processes.

Each device has its own Triton, with the engine in a separate process. The gateway sends a
request to the engine with the fewest requests. One Triton with an instance of `whisper` per device
would have fewer processes, but three disadvantages:

- It would end as a whole, with all requests, when one engine fails.
- It sends requests to any idle instance, and decoupled instances always count as idle.
- A process that sees all GPUs takes memory on each of them.

The reference engine of the shadow monitor has a Triton, too. If it fails, the server continues
without it. The first engine starts alone and compiles the kernels. The others then start together
and use the compiled kernels.

One thread, the supervisor, starts and ends all processes: a process that should die with its parent
dies with the thread that started it.
"""

import contextlib
import dataclasses
import functools
import logging
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from serve.contract.config import Config
from serve.contract.devices import counted
from serve.contract.errors import DeadlineError, EarshotError, UnavailableError
from serve.contract.fields import MAX_BEAMS
from serve.contract.manifest import read_manifest
from serve.contract.server_config import ServerConfig
from serve.supervisor.control import Control, ReloadRequest
from serve.supervisor.engines import TRITON, EngineManager
from serve.supervisor.gateway import GatewayProcess, address, check_ports, is_ready
from serve.supervisor.page import SupervisorMetrics, page_of
from serve.supervisor.server import TritonLaunch, TritonServer, config_to_toml, prepare
from serve.supervisor.supervised_process import SupervisedProcess
from serve.wire.folder import CONFIG, reference_folder, run_folder

logger = logging.getLogger("earshot")

_LOOK_S = 0.1
_PORTS = range(10_000, 32_768)

T = TypeVar("T")

_REFERENCE_MEMORY_SHARE = 0.2  # of a GPU's memory
_REFERENCE_SLOTS = 4  # it has one request at a time, with few windows


def prepare_reference(folder: Path, config: Config) -> TritonLaunch | None:
    """Prepare the Triton of the shadow monitor's reference; None if the monitor opens no engine.

    Raises:
        EarshotError: see `prepare`.
    """
    shadow, runtime = config.shadow, config.runtime
    if not shadow.opens_engine:
        return None
    own = reference_folder(folder)
    own.mkdir(mode=0o700)
    runtime = dataclasses.replace(
        runtime,
        device=shadow.device,
        memory_share=_REFERENCE_MEMORY_SHARE,
        slots=_REFERENCE_SLOTS,
        rows=_REFERENCE_SLOTS * MAX_BEAMS,
        encoder_batch=1,
        draft_tokens=0,
        # In full precision, and without options that only a GPU has.
        kernels="auto",
        compute_type="float32" if shadow.device == "cpu" else "auto",
        cuda_graph=runtime.cuda_graph and shadow.device.startswith("cuda"),
        cross_kv="full",
        encoder_precision="full",
    )
    live = dataclasses.replace(config.live, short_encoder="auto")
    config = dataclasses.replace(config, runtime=runtime, live=live)
    return prepare(own, config, shadow.engine)


def from_here(config: Config) -> Config:
    """Return the config with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if path else ""

    return dataclasses.replace(
        config,
        server=dataclasses.replace(
            config.server,
            keys_file=absolute(config.server.keys_file),
            usage_file=absolute(config.server.usage_file),
            tls_certificate=absolute(config.server.tls_certificate),
            tls_key=absolute(config.server.tls_key),
        ),
    )


class Supervisor:
    """A started server and its supervisor."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        engines: EngineManager,
        log_path: Path,
        requests_to: int | None = None,
        reference: TritonLaunch | None = None,
    ) -> None:
        server = config.server
        self.http = address(server.host, server.http_port)
        self.grpc = address(server.host, server.grpc_port)
        self.metrics = address(server.host, server.metrics_port)  # the page is /metrics
        self.log_path = log_path
        self.folder = folder
        self._tls = bool(server.tls_certificate)
        self._start_timeout_s = server.start_timeout_s
        self._engines = engines
        self._gateways = tuple(
            self._gateway(number, config.gateway.processes, server, requests_to)
            for number in range(config.gateway.processes)
        )
        self._reference = None if reference is None else self._shadow(reference)
        self._others = (*self._gateways, *([self._reference] if self._reference else []))
        self._page = SupervisorMetrics(folder)
        self._error: EarshotError | None = None
        self._complete = True  # whether every accepted request was answered
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._killed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="earshot-supervisor")

    def _shadow(self, launch: TritonLaunch) -> SupervisedProcess:
        """Make the process of the shadow monitor's reference, which the server does not need."""
        log = Path(f"{self.log_path}.shadow")
        log.write_bytes(b"")
        title, start = f"{TRITON} of shadow.engine", functools.partial(launch.start, log)
        return SupervisedProcess("server", title, start, self._start_timeout_s, lambda: False)

    def _gateway(
        self, number: int, processes: int, server: ServerConfig, requests_to: int | None
    ) -> SupervisedProcess:
        """Make one of the gateway's processes."""
        return SupervisedProcess(
            "gateway",
            "the gateway" if processes == 1 else f"the gateway's process {number}",
            lambda: GatewayProcess(self.folder, server, self.log_path, requests_to, number),
            server.start_timeout_s,
            lambda: not any(part.up for part in self._gateways),
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the running tritonservers, which a restart changes.

        Raises:
            EarshotError: none runs now.
        """
        return tuple(triton.pid for triton in self._tritons())

    @property
    def restarts(self) -> int:
        """The number of restarts of all processes."""
        others = sum(part.restarts for part in self._others)
        return others + sum(engine.restarts for engine in self._engines.all)

    def require_unbroken(self) -> None:
        """Check that no process has failed since the start, for measurements.

        Raises:
            EarshotError: a process has failed, even if it was restarted.
        """
        if self.restarts:
            raise EarshotError(
                f"a process of the server failed and was restarted; see {self.log_path}"
            )

    def peak_memory_bytes(self) -> int:
        """Return the sum of the peak resident memory of Triton and its model."""
        return sum(triton.peak_memory_bytes() for triton in self._tritons())

    def failure(self) -> str | None:
        """Return why the server was given up; None while it runs or restarts."""
        return None if self._error is None else str(self._error)

    def start(self) -> None:
        """Start the server and wait until all of it is ready.

        Raises:
            EarshotError: the server did not start; the message says why.
        """
        # The first engine must be ready before the others start.
        timeout_s = self._start_timeout_s * min(2, len(self._engines.all))
        end = time.monotonic() + timeout_s
        self._thread.start()
        while not (self._ready.is_set() and is_ready(self.http, self._tls)):
            if not self._thread.is_alive() and self._error is not None:
                raise self._error
            if time.monotonic() > end:
                raise EarshotError(
                    f"the server was not ready within {timeout_s:g} s (server.start_timeout_s)"
                )
            self._ready.wait(_LOOK_S)

    def reload(self, order: ReloadRequest) -> None:
        """Queue a reload of the engine; the log has the outcome."""
        self._engines.ask(order, lambda news: None)

    def stop(self) -> None:
        """Drain and end the server.

        Raises:
            DeadlineError: a request was not answered within server.drain_timeout_s.
        """
        self._stopping.set()
        # Do not `join`: after an interrupted join, Python 3.11 takes the thread for ended.
        self._ended.wait()
        if not self._complete:
            raise DeadlineError(
                "accepted requests were not answered before the server stopped; to wait longer, "
                "raise server.drain_timeout_s"
            )

    def kill(self) -> None:
        self._killed.set()
        self._stopping.set()
        for part in (*self._engines.parts, *self._others):
            part.kill()  # so that the supervisor's thread does not wait for it
        if self._thread.ident is not None:
            self._ended.wait()

    def _tritons(self) -> list[TritonServer]:
        running = _running((engine.part for engine in self._engines.all), TritonServer)
        if not running:
            raise EarshotError(f"{TRITON} does not run; {self.failure() or 'it starts again'}")
        return running

    # ------------------------------------------------------------ the supervisor's thread

    def _supervise(self) -> None:
        try:
            self._publish()
            while not self._stopping.wait(_LOOK_S):
                self._engines.look()
                for part in self._others if self._engines.ever_ready else self._gateways:
                    part.look()
                self._publish()
                parts = (*(engine.part for engine in self._engines.all), *self._others)
                if all(part.up for part in parts):
                    self._ready.set()
            if not self._killed.is_set():
                self._drain()
        except EarshotError as error:
            self._error = error
        except Exception as error:
            logger.exception("the supervisor failed")
            self._error = EarshotError(f"the supervisor failed: {error!r}")
        finally:
            try:
                for part in self._others:
                    part.kill()
                self._engines.close()
            finally:
                self._ended.set()

    def _drain(self) -> None:
        """End the gateway first: it needs Triton to answer its accepted requests."""
        gateways = _running(self._gateways, GatewayProcess)
        running = (*self._engines.parts, *self._others)
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            drained = [pool.submit(gateway.drain) for gateway in gateways]
            while not all(each.done() for each in drained):
                self._engines.go_on(draining=True)  # requests may wait for an engine to load
                time.sleep(_LOOK_S)
            self._complete = all(each.result() for each in drained)
            tritons = (*self._engines.parts, *self._others)
            list(pool.map(TritonServer.stop, _running(tritons, TritonServer)))

    def _publish(self) -> None:
        self._page.write(page_of(self._engines, self._gateways, self._reference))


def _running(parts: Iterable[SupervisedProcess], kind: type[T]) -> list[T]:
    processes = [part.running for part in parts]  # read once: another thread changes it
    return [process for process in processes if isinstance(process, kind)]


@contextlib.contextmanager
def running_server(
    config: Config,
    engine: str | None = None,
    log_path: Path | None = None,
    requests_to: int | None = None,
) -> Iterator[Supervisor]:
    """Run a server inside a `with` block; it is ready at the start and drained at the end.

    Args:
        config: the config of the server, the model and the gateway.
        engine: the engine's folder; None: `config.engine`.
        log_path: the log file; None: the logs exist only while the server runs. With several
            engines, each has its own log beside it, with the engine's number as suffix.
        requests_to: file descriptor for the access log; None: it goes to the log file.

    Raises:
        UnavailableError: the machine lacks something that the server needs, or a port is in use.
        EngineError: there is no engine, or its manifest cannot be read.
        DeadlineError: the server stopped before it had answered every accepted request.
        EarshotError: the server did not start; the message says why.
    """
    check_ports(config.server)
    whole = from_here(dataclasses.replace(config, runtime=counted(config.runtime)))
    with run_folder() as folder:
        log = (log_path or folder / "server.log").absolute()
        log.write_bytes(b"")
        (folder / CONFIG).write_text(config_to_toml(whole), encoding="utf-8")
        read_manifest(Path(engine or config.engine))  # report a missing engine at once
        engines = EngineManager(folder, config, whole, engine or config.engine, log)
        reference = prepare_reference(folder, whole)
        server = Supervisor(folder, whole, engines, log, requests_to, reference)
        try:
            server.start()
            with contextlib.closing(Control(folder, engines.ask)):
                yield server
            server.stop()
        finally:
            server.kill()


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Find free ports for servers without a fixed address.

    The ports are below the range of outgoing connections; otherwise a connection could take a port
    before its server listens.

    Raises:
        UnavailableError: too few of a thousand random ports were free.
    """
    ports = list[int]()
    for port in random.sample(_PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind((host, port))
            ports.append(port)
        if len(ports) == count:
            return tuple(ports)
    raise UnavailableError(f"found {len(ports)} free ports of {host}, expected {count}")


def on_free_ports(server: ServerConfig) -> ServerConfig:
    """Return the config on free ports, to run beside a server on the configured ports."""
    http, grpc, metrics = free_ports(server.host, 3)
    return dataclasses.replace(server, http_port=http, grpc_port=grpc, metrics_port=metrics)


def for_this_machine(server: ServerConfig) -> ServerConfig:
    """Return the config on free ports of loopback, without keys or TLS, for measurements."""
    plain = dataclasses.replace(
        server, host="127.0.0.1", keys_file="", usage_file="", tls_certificate="", tls_key=""
    )
    return on_free_ports(plain)
