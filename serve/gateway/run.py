"""The gateway's process: open the services, listen, answer, drain, end."""

import asyncio
import dataclasses
import functools
import logging
import math
import pkgutil
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import disable_created_metrics

from serve.contract.config import Config, load_config
from serve.contract.devices import names_of
from serve.contract.server_config import ServerConfig
from serve.gateway import errors
from serve.gateway.context import Services
from serve.gateway.edge.listen import HttpServer, listening_socket, unix_listener
from serve.gateway.edge.uploads import prepare_memory
from serve.gateway.engines import EngineAddress
from serve.gateway.http import build_app, build_monitoring_app
from serve.gateway.kserve.grpc import open_server
from serve.gateway.observe import log
from serve.gateway.observe.pages import add_gauges
from serve.gateway.page.state import EngineStateReader
from serve.wire.folder import CONFIG, engine_links, gateway_socket

if TYPE_CHECKING:
    from serve.gateway.jobs.routes import JobRoutes

logger = logging.getLogger("earshot.gateway")

NOT_ALL_ANSWERED = 3
"""Exit status where the drain's limit came before the last answer."""

_SHARED_LIMITS = {  # keys of the config by section
    "server": ("max_inflight", "max_inflight_mb"),
    "live": ("max_streams",),
    "jobs": ("workers",),
}
_END_S = 2.0  # limit of answers on their way, once all requests have ended
SPARE_CONNECTIONS = 256  # beyond one for each request
_SPARE_DESCRIPTORS = 256  # for files other than connections and uploads


class GatewayServer:
    """Listens at three addresses and in the run's folder, and drains. For one event loop.

    Args:
        config: the whole configuration.
        folder: the run's folder, with links to Triton's sockets.
        engines: the addresses of the run's engines.

    Raises:
        UnavailableError: it cannot listen.
        ConfigError: the keys cannot be read, or are needed and missing.
    """

    def __init__(self, config: Config, folder: Path, engines: Sequence[EngineAddress]) -> None:
        config = share_of(config)
        server, shared = config.server, config.gateway.processes > 1
        self.services = services = Services(config, folder, engines)
        add_gauges(services)
        tasks = services.watch, services.usage, services.uploads, *services.engines.all
        self.state = EngineStateReader(services)
        self._tasks = (*tasks, services.shadow, self.state)
        self._drain_s, self._end_s = server.drain_timeout_s, 0.0
        connections = _max_connections(server)
        self.jobs = _open_jobs(self.services) if config.jobs.folder else None
        jobs = self.jobs.routes if self.jobs else ()
        clients = build_app(services, self.state, jobs)
        monitoring = build_monitoring_app(services)
        serving = functools.partial(HttpServer, services, connections)
        self.http = [
            serving(clients, listening_socket(server, "http_port", shared)),
            serving(monitoring, listening_socket(server, "metrics_port", shared)),
            serving(monitoring, unix_listener(gateway_socket(folder, services.process_number))),
        ]
        self._grpc = open_server(self.services, connections, shared)

    async def start(self) -> None:
        """Start all services, and accept connections."""
        await self.services.usage.exchange()  # the usage of the day
        for task in self._tasks:
            task.start()
        for server in self.http:
            server.start()
        await self._grpc.start()
        if self.jobs:
            self.jobs.start()

    async def drain(self) -> bool:
        """Reject new requests and wait for the others; return whether all of them were answered.

        Requests that have not ended within `server.drain_timeout_s` are ended with an error.
        """
        services = self.services
        self._end_s = asyncio.get_running_loop().time() + self._drain_s
        services.admission.draining = True
        services.admission.end_uploads(errors.stopping())
        services.streams.end_all()
        if await services.admission.wait_until_empty(self._drain_s):
            return True
        services.admission.drain_over.set()
        message = f"the server stops (server.drain_timeout_s = {self._drain_s:g}); try again later"
        services.engines.end_all(errors.overloaded(message, "draining"))
        return False

    async def close(self) -> None:
        """Close all connections; wait until the drain's end for clients that still send."""
        if self.jobs:
            await self.jobs.close()
        remaining_s = max(_END_S, self._end_s - asyncio.get_running_loop().time())
        closing = [server.close(remaining_s) for server in self.http]
        await asyncio.gather(self._grpc.stop(_END_S), *closing)
        for task in reversed(self._tasks):
            await task.close()
        await self.services.tracer.close()


def _open_jobs(services: Services) -> "JobRoutes":
    """Open the jobs; a server without jobs does not load their code."""
    jobs: JobRoutes = pkgutil.resolve_name("serve.gateway.jobs.routes:JobRoutes")(services)
    return jobs


def share_of(config: Config) -> Config:
    """Return a configuration with the limits of a single gateway process, rounded up."""
    shares = {}
    for section, keys in _SHARED_LIMITS.items():
        limits = getattr(config, section)
        share = {key: math.ceil(getattr(limits, key) / config.gateway.processes) for key in keys}
        shares[section] = dataclasses.replace(limits, **share)
    return dataclasses.replace(config, **shares)


def _max_connections(server: ServerConfig) -> int:
    """Return the maximum of connections of each address, which the descriptors may limit."""
    wanted = server.max_inflight + SPARE_CONNECTIONS
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    possible = max(1, (descriptors - _SPARE_DESCRIPTORS) // 4)
    if possible < wanted:
        logger.warning(
            "accepting at most %d connections instead of %d: the process may open %d files; "
            "raise the limit with ulimit -n %d",
            *(possible, wanted, descriptors, 4 * wanted + _SPARE_DESCRIPTORS),
        )
    return min(wanted, possible)


def serve_folder(folder: Path, number: int = 0, access_log_fd: int | None = None) -> int:
    """Serve the run in this folder until SIGTERM or SIGINT; return the exit status.

    Args:
        folder: the run's folder.
        number: the number of this process among the `gateway.processes`.
        access_log_fd: descriptor for the log's lines of requests; None: stderr.

    Raises:
        ConfigError: the folder's configuration cannot be read or used.
        UnavailableError: it cannot listen.
    """
    config = load_config(folder / CONFIG)
    log.prepare(config.gateway.log, access_log_fd)
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # one for each connection
    prepare_memory()
    # They would be a second series of each counter.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    names = names_of(config.runtime.device)
    links = engine_links(folder, len(names))
    engines = [EngineAddress(name, link, number) for name, link in zip(names, links, strict=True)]
    return asyncio.run(_serve(config, folder, engines))


async def _serve(config: Config, folder: Path, engines: Sequence[EngineAddress]) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    gateway = GatewayServer(config, folder, engines)
    await gateway.start()
    await stop.wait()
    loop.remove_signal_handler(signal.SIGINT)
    logger.info("stopping when all requests are answered")
    answered = await gateway.drain()
    await gateway.close()
    logger.info("stopped; %s", "all was answered" if answered else "not all was answered")
    return 0 if answered else NOT_ALL_ANSWERED
