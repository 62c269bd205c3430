"""The gateway's life: listen, answer, drain, end."""

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

import grpc
from prometheus_client import disable_created_metrics

from serve.contract.config import Config, load_config
from serve.contract.devices import names_of
from serve.contract.errors import UnavailableError
from serve.contract.server_config import ServerConfig
from serve.gateway.context import Services
from serve.gateway.edge import memory
from serve.gateway.edge.listen import HttpServer, grpc_credentials, listening_socket, own_door
from serve.gateway.http import build_app, build_watchers_app
from serve.gateway.kserve.grpc import Methods, server_options
from serve.gateway.observe import log
from serve.gateway.observe.metrics import tritons_page, whole_page
from serve.gateway.page.state import EngineStateReader
from serve.gateway.upstream.own import OwnEngine
from serve.wire.folder import (
    CONFIG,
    engine_links,
    gateway_alive,
    gateway_door,
)

if TYPE_CHECKING:
    from serve.gateway.jobs.routes import JobRoutes

logger = logging.getLogger("earshot.gateway")

NOT_ALL_ANSWERED = 3
"""Exit status where the drain's limit came before the last answer."""

_END_S = 2.0  # for answers on their way, once all that is left has been ended
SPARE_CONNECTIONS = 256  # beyond one for each request
_SPARE_DESCRIPTORS = 256  # for what is neither a connection nor an upload's file


class Gateway:
    """Listens at the three addresses of a configuration, and in its folder. For one event loop.

    Args:
        config: the whole configuration.
        folder: of the run, with links to Triton's sockets.
        engines: of the run.
        number: of this process among the `gateway.processes`.

    Raises:
        UnavailableError: it cannot listen.
        ConfigError: the keys cannot be read, or are needed and not there.
    """

    def __init__(
        self, config: Config, folder: Path, engines: Sequence[OwnEngine], number: int = 0
    ) -> None:
        processes, config = config.gateway.processes, share_of(config)
        server, shared = config.server, processes > 1
        self.door = Services(config, folder, engines, gateway_alive(folder, number))
        self._drain_s, self._end_s = server.drain_timeout_s, 0.0
        tritons = {engine.device: engine.link for engine in engines}
        pages = [functools.partial(tritons_page, triton) for triton in tritons.values()]
        self.state = EngineStateReader(self.door, config, pages)
        whole = functools.partial(whole_page, folder, tritons, self.door.metrics, number, processes)
        connections = _most_connections(server)
        self.jobs = _open_jobs(config, self.door) if config.jobs.folder else None
        routes = self.jobs.routes if self.jobs else ()
        clients = build_app(self.door, whole, self.state, routes)
        watchers = build_watchers_app(self.door, whole)
        inside = dataclasses.replace(server, tls_certificate="", tls_key="")
        self.http = [
            HttpServer(app, listener, within, self.door.admission, self.door.turns, connections)
            for app, listener, within in (
                (clients, listening_socket(server, "http_port", shared), server),
                (watchers, listening_socket(server, "metrics_port", shared), server),
                (watchers, own_door(gateway_door(folder, number)), inside),
            )
        ]
        options = server_options(self.door.admission.max_request_bytes, connections, shared)
        self._grpc = grpc.aio.server(options=options)
        self._grpc.add_generic_rpc_handlers((Methods(self.door),))
        host = f"[{server.host}]" if ":" in server.host else server.host
        try:
            if server.tls_certificate:
                self._grpc.add_secure_port(f"{host}:{server.grpc_port}", grpc_credentials(server))
            else:
                self._grpc.add_insecure_port(f"{host}:{server.grpc_port}")
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{server.grpc_port}; stop what runs there or set "
                "another server.grpc_port in the config"
            ) from error

    async def start(self) -> None:
        """Begin to answer."""
        await self.door.usage.exchange()  # what keys have had of the day
        self.door.usage.start()
        self.door.uploads.start()
        self.door.upstreams.start()
        self.door.shadow.start()
        self.state.start()
        self.door.watch.start()
        for server in self.http:
            server.start()
        await self._grpc.start()
        if self.jobs:
            self.jobs.start()

    async def drain(self) -> bool:
        """Answer what was accepted, refuse the rest; whether all of it was answered in time."""
        self._end_s = asyncio.get_running_loop().time() + self._drain_s
        return await self.door.drain()

    async def close(self) -> None:
        """Hang up, on clients that are refused while they send when the drain's time is over."""
        if self.jobs:
            await self.jobs.close()
        await self.state.close()
        left_s = max(_END_S, self._end_s - asyncio.get_running_loop().time())
        hung_up = [server.close(left_s) for server in self.http]
        await asyncio.gather(self._grpc.stop(_END_S), *hung_up)
        await self.door.uploads.close()
        await self.door.shadow.close()
        await self.door.upstreams.close()
        await self.door.watch.close()
        await self.door.usage.close()
        await self.door.traces.close()


def _open_jobs(config: Config, door: Services) -> "JobRoutes":
    """Open what keeps and does jobs; a server without them loads nothing of it."""
    jobs: JobRoutes = pkgutil.resolve_name("serve.gateway.jobs.routes:JobRoutes")(config, door)
    return jobs


def share_of(config: Config) -> Config:
    """Give a configuration the limits of one of its gateway's processes, rounded up."""
    processes, server, live = config.gateway.processes, config.server, config.live
    jobs = config.jobs
    return dataclasses.replace(
        config,
        server=dataclasses.replace(
            server,
            max_inflight=math.ceil(server.max_inflight / processes),
            max_inflight_mb=math.ceil(server.max_inflight_mb / processes),
        ),
        live=dataclasses.replace(live, max_streams=math.ceil(live.max_streams / processes)),
        jobs=dataclasses.replace(jobs, workers=math.ceil(jobs.workers / processes)),
    )


def _most_connections(server: ServerConfig) -> int:
    """Count connections for each of three addresses: they and uploads' files have descriptors."""
    wanted = server.max_inflight + SPARE_CONNECTIONS
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    there_are = max(1, (descriptors - _SPARE_DESCRIPTORS) // 4)
    if there_are < wanted:
        logger.warning(
            "%d connections are taken at a time, not %d: this process may have %d descriptors; "
            "raise that limit (ulimit -n %d)",
            there_are,
            wanted,
            descriptors,
            4 * wanted + _SPARE_DESCRIPTORS,
        )
    return min(wanted, there_are)


def serve_folder(folder: Path, number: int = 0, requests_to: int | None = None) -> int:
    """Be the gateway of the run in this folder until SIGTERM or SIGINT; return the exit status.

    Args:
        folder: of the run.
        number: of this process among the `gateway.processes`.
        requests_to: descriptor for the log's lines of requests; None: they go to the others.

    Raises:
        ConfigError: the folder's configuration cannot be read or used.
        UnavailableError: it cannot listen.
    """
    config = load_config(folder / CONFIG)
    _prepare(config, requests_to)
    names = names_of(config.runtime.device)
    links = engine_links(folder, len(names))
    engines = [OwnEngine(name, link, number) for name, link in zip(names, links, strict=True)]
    return asyncio.run(_serve(config, folder, engines, number))


def _prepare(config: Config, requests_to: int | None) -> None:
    """Prepare a gateway's process, before all else."""
    log.prepare(config.gateway.log, requests_to)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection takes one
    memory.prepare()
    # A second series for each, that nobody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]


async def _serve(config: Config, folder: Path, engines: Sequence[OwnEngine], number: int) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    gateway = Gateway(config, folder, engines, number)
    await gateway.start()
    await stop.wait()
    loop.remove_signal_handler(signal.SIGINT)
    logger.info("stopping when all requests are answered")
    answered = await gateway.drain()
    await gateway.close()
    logger.info("stopped; %s", "all was answered" if answered else "not all was answered")
    return 0 if answered else NOT_ALL_ANSWERED
