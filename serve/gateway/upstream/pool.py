"""All engines behind the gateway: which one gets a request, and what becomes of one that fails.

A request goes to the engine that has the fewest of the gateway's, of those that serve its model and
take requests. Where one refuses it because it is full or has gone, before it has answered
anything, the next one gets it; see `serve.gateway.upstream.exchange`.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.messages import Priority
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.kserve.messages import Chunk
from serve.gateway.limits import Permit
from serve.gateway.models import Models, Target
from serve.gateway.observe.metrics import UpstreamMetrics
from serve.gateway.observe.spans import NO_SPAN, RequestSpan
from serve.gateway.overload.sound import AudioLength
from serve.gateway.overload.target import Targets
from serve.gateway.upstream.exchange import Exchange
from serve.gateway.upstream.outgoing import Outgoing
from serve.gateway.upstream.own import OwnEngine, OwnTriton
from serve.wire import uploads
from serve.wire.folder import reference_folder
from serve.wire.tensors import MODEL

REFERENCE = "the shadow's reference"
"""The product of `shadow.engine`; clients know no such model."""

GRACE_S = 30.0  # beyond the transcriber's own limit


class Upstreams:
    """The engines of a run. For one event loop.

    Args:
        config: the whole configuration.
        models: its models.
        folder: of the run.
        engines: at least one.
        metrics: where requests are counted.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        folder: Path,
        engines: Sequence[OwnEngine],
        metrics: UpstreamMetrics,
    ) -> None:
        self.uploads = uploads.make_folder(folder, engines[0].process)
        """The folder in which large audio is spooled; see `serve.wire.uploads`."""
        self.own = tuple(OwnTriton(engine, models.default, config.server) for engine in engines)
        self.servers = self.own
        if config.shadow.opens_engine:
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
        self.targets = Targets(
            config.gateway.target_p99_s,
            (models.default,),
            config.runtime.slots * len(engines),
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
        parts: Sequence[Chunk],
        ticket: Permit,
        streamed: bool,
        upload: str | None = None,
        spans: RequestSpan = NO_SPAN,
        sound: AudioLength | None = None,
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
            ApiError: nobody can take it, or nobody in time; the ticket is still open.
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

    def end_all(self, refusal: ApiError) -> None:
        """Answer this to every request that still waits."""
        for exchange in self._exchanges.values():
            exchange.end(refusal)

    async def ready(self, model: str | None = None) -> bool:
        """Tell whether requests for a model, or for the default one, would be answered."""
        return await self._ready_server(model or self._models.default) is not None

    async def small(self, model: str, method: str, message: bytes) -> bytes:
        """Ask a server of this model a small question, and return the answer.

        Raises:
            ApiError: there is none.
        """
        server = await self._ready_server(model)
        if server is None:
            raise errors.server_away()
        return await server.small(method, message)

    async def metadata(self, target: Target, version: str) -> service_pb2.ModelMetadataResponse:
        """Return inputs and outputs of a model.

        Raises:
            ApiError: nobody who serves it can be asked.
        """
        server = await self._ready_server(target.model)
        if server is None:
            raise errors.server_away()
        request = service_pb2.ModelMetadataRequest(name=MODEL, version=version)
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

    async def _ready_server(self, model: str) -> OwnTriton | None:
        for server in self._of(model):
            if await server.ready():
                return server
        return None

    def _of(self, model: str) -> list[OwnTriton]:
        return [server for server in self.servers if server.model == model]
