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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve.contract.config import Config
from serve.contract.devices import with_gpu_numbers
from serve.contract.errors import DeadlineError, EarshotError, FileError, UnavailableError
from serve.contract.fields import MAX_BEAMS
from serve.contract.files import write_text
from serve.contract.manifest import read_manifest
from serve.contract.server_config import ServerConfig
from serve.supervisor.control import ReloadRequest, serve_requests
from serve.supervisor.engines import TRITON, EngineManager
from serve.supervisor.gateway import GatewayProcess, answers_get, check_ports
from serve.supervisor.processes import SupervisedProcess
from serve.supervisor.server import SupervisedTriton, TritonLaunch, config_to_toml, prepare
from serve.wire.folder import CONFIG, SUPERVISOR_PAGE, gateway_socket, reference_folder, run_folder

logger = logging.getLogger("earshot")

_POLL_S = 0.1
_PORTS = range(10_000, 32_768)

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
    reference = reference_folder(folder)
    reference.mkdir(mode=0o700)
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
    return prepare(reference, config, shadow.engine)


def _with_absolute_paths(config: Config) -> Config:
    names = ("keys_file", "usage_file", "tls_certificate", "tls_key")
    paths: dict[str, Any] = {
        name: str(Path(path).absolute()) for name in names if (path := getattr(config.server, name))
    }
    return dataclasses.replace(config, server=dataclasses.replace(config.server, **paths))


class Supervisor:
    """A started server and its supervisor; made by `running_server`.

    Args:
        folder: the folder of the run.
        config: the config, with absolute paths and resolved devices.
        engines: the engines.
        log_path: the log file.
        access_log_fd: see `running_server`.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        engines: EngineManager,
        log_path: Path,
        access_log_fd: int | None,
    ) -> None:
        server, count = config.server, config.gateway.processes
        self.http = f"{server.host}:{server.http_port}"
        self.grpc = f"{server.host}:{server.grpc_port}"
        self.metrics = f"{server.host}:{server.metrics_port}"  # the page is /metrics
        self.log_path = log_path
        self.folder = folder
        self._start_timeout_s = server.start_timeout_s
        self._engines = engines
        self._gateways = tuple(
            SupervisedProcess(
                "the gateway" if count == 1 else f"the gateway's process {number}",
                functools.partial(GatewayProcess, folder, server, log_path, access_log_fd, number),
                server.start_timeout_s,
                lambda: not any(gateway.up for gateway in self._gateways),
            )
            for number in range(count)
        )
        launch = prepare_reference(folder, config)
        self._reference: SupervisedTriton | None = None
        if launch is not None:
            log = Path(f"{log_path}.shadow")
            log.write_bytes(b"")
            title = f"{TRITON} of shadow.engine"
            self._reference = SupervisedTriton(title, launch, log, lambda: False)
        self._others = (*self._gateways, *filter(None, [self._reference]))
        self._page = SupervisorMetrics(folder)
        self._error: EarshotError | None = None
        self._complete = True  # whether every accepted request was answered
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._killed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="earshot-supervisor")

    @property
    def restarts(self) -> int:
        """The number of restarts of all processes."""
        tritons = (engine.triton for engine in self._engines.all)
        return sum(process.restarts for process in (*self._others, *tritons))

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
        deadline_s = time.monotonic() + timeout_s
        self._thread.start()
        while not (self._ready.is_set() and answers_get(gateway_socket(self.folder), "/health")):
            if not self._thread.is_alive() and self._error is not None:
                raise self._error
            if time.monotonic() > deadline_s:
                raise EarshotError(
                    f"the server was not ready within {timeout_s:g} s (server.start_timeout_s)"
                )
            self._ready.wait(_POLL_S)

    def reload(self, request: ReloadRequest) -> None:
        """Queue a reload of the engine; the log has the outcome."""
        self._engines.ask(request, lambda report: None)

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
        for process in (*self._engines.processes, *self._others):
            process.kill()  # so that the supervisor's thread does not wait for it
        if self._thread.ident is not None:
            self._ended.wait()

    # ------------------------------------------------------------ the supervisor's thread

    def _supervise(self) -> None:
        try:
            self._publish()
            while not self._stopping.wait(_POLL_S):
                self._engines.poll()
                for process in self._others if self._engines.ever_ready else self._gateways:
                    process.poll()
                self._publish()
                tritons = (engine.triton for engine in self._engines.all)
                if all(process.up for process in (*tritons, *self._others)):
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
                for process in self._others:
                    process.kill()
                self._engines.close()
            finally:
                self._ended.set()

    def _drain(self) -> None:
        """End the gateway first: it needs Triton to answer its accepted requests."""
        running = [gateway.running for gateway in self._gateways]
        gateways = [process for process in running if isinstance(process, GatewayProcess)]
        with ThreadPoolExecutor(len(self._others) + len(self._engines.processes)) as pool:
            drained = [pool.submit(gateway.drain) for gateway in gateways]
            while not all(future.done() for future in drained):
                self._engines.continue_chore(draining=True)  # an engine may load for a request
                time.sleep(_POLL_S)
            self._complete = all(future.result() for future in drained)
            tritons = (*self._engines.processes, *filter(None, [self._reference]))
            list(pool.map(SupervisedTriton.stop, tritons))

    def _publish(self) -> None:
        self._page.write(page_of(self._engines, self._gateways, self._reference))


class SupervisorMetrics:
    """The supervisor's metrics file, written when it changes.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUPERVISOR_PAGE
        self._page = self._unwritten = ""

    def write(self, page: str) -> None:
        """Write the file; log the first failure."""
        if page == self._page:
            return
        try:
            write_text(self._path, page, "the server tries again")
            self._page = page
        except FileError as error:  # for example a full disk; the next poll tries again
            if page != self._unwritten:
                logger.warning("%s", error)
            self._unwritten = page


def page_of(
    engines: EngineManager,
    gateways: Sequence[SupervisedProcess],
    reference: SupervisedProcess | None,
) -> str:
    """Render the metrics of a server's processes; the shadow reference counts as an engine."""
    restarts = [
        (f'{{part="server",device="{engine.name}"}}', engine.triton.restarts)
        for engine in engines.all
    ]
    works = [(f'{{device="{engine.name}"}}', engines.works(engine)) for engine in engines.all]
    loaded = [(f'{{device="{engine.name}"}}', engines.loaded(engine)) for engine in engines.all]
    up = any(gateway.up for gateway in gateways) and any(map(engines.works, engines.all))
    if reference is not None:
        restarts.append(('{part="server",device="shadow"}', reference.restarts))
        works.append(('{device="shadow"}', reference.up))
    restarts.append(('{part="gateway"}', sum(gateway.restarts for gateway in gateways)))
    reloads = [(f'{{outcome="{outcome}"}}', n) for outcome, n in engines.reloads.items()]
    engine_up = "Whether the engine of a device works, or is unloaded while idle"
    engine_loaded = "Whether the engine of a device is in memory"
    server_up = "Whether the gateway and at least one engine work"
    return (
        _family("earshot_restarts_total", "counter", "Restarts of a process", restarts)
        + _family("earshot_up", "gauge", server_up, [("", up)])
        + _family("earshot_engine_up", "gauge", engine_up, works)
        + _family("earshot_engine_loaded", "gauge", engine_loaded, loaded)
        + _family("earshot_reloads_total", "counter", "Reloads of the engine", reloads)
    )


def _family(name: str, kind: str, description: str, samples: Iterable[tuple[str, int]]) -> str:
    """Render a metric in Prometheus's text format, with the labels and value of each sample."""
    lines = [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{labels} {int(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def running_server(
    config: Config,
    engine: str | None = None,
    log_path: Path | None = None,
    access_log_fd: int | None = None,
) -> Iterator[Supervisor]:
    """Run a server inside a `with` block; it is ready at the start and drained at the end.

    Args:
        config: the config of the server, the model and the gateway.
        engine: the engine's folder; None: `config.engine`.
        log_path: the log file; None: the logs exist only while the server runs. With several
            engines, each has its own log beside it, with the engine's number as suffix.
        access_log_fd: file descriptor for the access log; None: it goes to the log file.

    Raises:
        UnavailableError: the machine lacks something that the server needs, or a port is in use.
        EngineError: there is no engine, or its manifest cannot be read.
        DeadlineError: the server stopped before it had answered every accepted request.
        EarshotError: the server did not start; the message says why.
    """
    check_ports(config.server)
    runtime = with_gpu_numbers(config.runtime)
    resolved = _with_absolute_paths(dataclasses.replace(config, runtime=runtime))
    with run_folder() as folder:
        log = (log_path or folder / "server.log").absolute()
        log.write_bytes(b"")
        (folder / CONFIG).write_text(config_to_toml(resolved), encoding="utf-8")
        engine = engine or config.engine
        read_manifest(Path(engine))  # report a missing engine at once
        engines = EngineManager(folder, config, resolved, engine, log)
        server = Supervisor(folder, resolved, engines, log, access_log_fd)
        try:
            server.start()
            with serve_requests(folder, engines.ask):
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


def for_this_machine(server: ServerConfig) -> ServerConfig:
    """Return the config on free ports of loopback, without keys or TLS, for measurements."""
    host = "127.0.0.1"
    http, grpc, metrics = free_ports(host, 3)
    return dataclasses.replace(
        server,
        host=host,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        keys_file="",
        usage_file="",
        tls_certificate="",
        tls_key="",
    )
