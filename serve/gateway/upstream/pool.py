"""All servers behind the gateway: which one gets a request, and what becomes of one that fails.

A request goes to the server that has the fewest of the gateway's, of those that serve its model and
take requests. Where one refuses it because it is full, drains or has gone, before it has answered
anything, the next one gets it; see `serve.gateway.upstream.exchange`.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import ConfigError
from serve.contract.messages import Priority
from serve.gateway import refusals
from serve.gateway.envelope import Part
from serve.gateway.limits import Ticket
from serve.gateway.metrics import UpstreamMetrics
from serve.gateway.models import Models, Target
from serve.gateway.overload.sound import Sound
from serve.gateway.overload.target import Targets
from serve.gateway.refusals import Refusal
from serve.gateway.spans import NO_SPANS, Spans
from serve.gateway.upstream.exchange import Exchange
from serve.gateway.upstream.own import OwnEngine, OwnTriton
from serve.gateway.upstream.remote import Remote
from serve.gateway.upstream.server import Outgoing, Server
from serve.wire import uploads
from serve.wire.folder import reference_folder

REFERENCE = "the shadow's reference"
"""The product of `shadow.engine`; clients know no such model."""

GRACE_S = 30.0  # beyond the transcriber's own limit


class Upstreams:
    """The servers of a config. For one event loop.

    Args:
        config: names them.
        models: its models.
        folder: of the run.
        engines: this run's own.
        metrics: where requests are counted.

    Raises:
        ConfigError: nobody serves the config's own model, or a file of theirs cannot be read.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        folder: Path,
        engines: Sequence[OwnEngine],
        metrics: UpstreamMetrics,
    ) -> None:
        # A gateway that has no engine is one process.
        self.uploads = uploads.make_folder(folder, engines[0].process if engines else 0)
        """The folder in which large audio is spooled; see `serve.wire.uploads`."""
        self.own = tuple(OwnTriton(engine, models.default, config.server) for engine in engines)
        stall_s = config.server.stall_timeout_s
        remotes = [Remote(upstream, stall_s) for upstream in config.upstreams]
        self.servers: tuple[Server, ...] = (*self.own, *remotes)
        if engines and config.shadow.opens_engine:
            reference = OwnEngine("shadow", reference_folder(folder), engines[0].process)
            stays = dataclasses.replace(config.server, idle_unload_s=0.0)
            self.servers += (OwnTriton(reference, REFERENCE, stays),)
        self.at_send: Callable[[], None] = lambda: None
        """Is called when a request is given to a server."""
        self._models = models
        self._metrics = metrics
        self._limit_s = config.transcriber.request_timeout_s + GRACE_S
        self._exchanges: dict[asyncio.Task[None], Exchange] = {}
        self._watches: list[asyncio.Task[None]] = []
        if not self._of(models.default):
            raise ConfigError(
                f"no upstream serves {models.default}, which is the config's name and the model "
                f"of requests that name none; expected one of {', '.join(models.all[1:])}"
                if config.upstreams
                else "the config has no upstreams; [[upstreams]] names their addresses and models"
            )
        self.targets = Targets(
            config.gateway.target_p99_s,
            models.all,
            config.runtime.slots * max(1, len(engines)),
        )
        """How much may be under way."""
        metrics.watch(self.servers)
        metrics.watch_targets(self.targets)

    def start(self) -> None:
        """Begin to look at those that have to be asked."""
        self._watches = [asyncio.create_task(server.watch()) for server in self.servers]

    def send(
        self,
        target: Target,
        parts: Sequence[Part],
        ticket: Ticket,
        streamed: bool,
        upload: str | None = None,
        spans: Spans = NO_SPANS,
        sound: Sound | None = None,
        priority: Priority = "file",
    ) -> Exchange:
        """Give a request to a server.

        Args:
            target: the model that it is for.
            parts: of the serialised `ModelInferRequest`.
            ticket: the exchange closes it.
            streamed: whether it may have several answers.
            upload: path of the request's audio, in `uploads`; stays there until the first answer.
            spans: the request's; are told who has it.
            sound: what is known of its audio, where there is a latency target.
            priority: whether it is live text, a file, or a job, which can wait.

        Raises:
            Refusal: nobody can take it, or nobody in time; the ticket is still open.
        """
        request = Outgoing(target, parts, streamed, upload, spans, priority)
        servers = self._of(target.model)
        with self.targets.admitted(target.model, sound, priority, ticket.key) as admitted:
            exchange = Exchange(request, servers, self._metrics, ticket, self._limit_s)
        exchange.pump.add_done_callback(lambda _: admitted.end(exchange.answered))
        self._exchanges[exchange.pump] = exchange
        exchange.pump.add_done_callback(self._exchanges.pop)
        self.at_send()
        return exchange

    @property
    def under_way(self) -> int:
        """Count the requests that servers have."""
        return len(self._exchanges)

    def end_all(self, refusal: Refusal) -> None:
        """Answer this to every request that still waits."""
        for exchange in self._exchanges.values():
            exchange.end(refusal)

    async def ready(self, model: str | None = None) -> bool:
        """Tell whether requests for a model, or for any that there is, would be answered."""
        for name in self._models.all if model is None else (model,):
            if await self._ready_server(name) is None:
                return False
        return True

    async def small(self, model: str, method: str, message: bytes) -> bytes:
        """Ask a server of this model a small question, and return the answer.

        Raises:
            Refusal: there is none.
        """
        server = await self._ready_server(model)
        if server is None:
            raise refusals.server_away()
        return await server.small(method, message)

    async def metadata(self, target: Target, version: str) -> service_pb2.ModelMetadataResponse:
        """Return inputs and outputs of a model.

        Raises:
            Refusal: nobody who serves it can be asked.
        """
        server = await self._ready_server(target.model)
        if server is None:
            raise refusals.server_away()
        name = server.answer_name(target)
        request = service_pb2.ModelMetadataRequest(name=name, version=version)
        answer = await server.small("ModelMetadata", request.SerializeToString())
        metadata = service_pb2.ModelMetadataResponse.FromString(answer)
        metadata.name = target.client_name
        return metadata

    async def close(self) -> None:
        """Hang up."""
        for watch in self._watches:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        for server in self.servers:
            await server.close()

    async def _ready_server(self, model: str) -> Server | None:
        for server in self._of(model):
            if await server.ready(model):
                return server
        return None

    def _of(self, model: str) -> list[Server]:
        return [server for server in self.servers if model in server.models]
