"""A Triton of this run, behind its Unix socket; there is one for each device.

A call of Triton's is never cancelled, for Triton 24.10 keeps a call whose cancel meets its end.
A request whose client goes is cancelled by its key instead, with a small request of its own, and
its call is read to its end.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import secrets
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from serve.gateway import refusals
from serve.gateway.envelope import cancel_of, for_triton
from serve.gateway.models import Target
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import CHANNEL_OPTIONS, Call, Channel
from serve.gateway.upstream.server import Outgoing
from serve.wire import uploads
from serve.wire.alive import INTERVAL_S, STALE_S, age_s
from serve.wire.folder import ALIVE, grpc_target
from serve.wire.tensors import MODEL

logger = logging.getLogger("earshot.gateway")

_LAST_S = 1.0  # that cancels on their way may take when the gateway ends


@dataclasses.dataclass(frozen=True)
class OwnEngine:
    """One of this run's engines, as its gateway finds it."""

    device: str  # its name
    folder: Path  # with the sockets of its Triton
    process: int = 0  # of the gateway's, which one asks


class OwnTriton:
    """A Triton of this run; see `Server`.

    Args:
        engine: where it is.
        model: the product that it serves.
    """

    def __init__(self, engine: OwnEngine, model: str) -> None:
        folder = engine.folder
        self.name = engine.device
        self.models: tuple[str, ...] = (model,)
        self.inflight = 0
        self._alive = folder / ALIVE
        self._uploads = uploads.make_folder(folder, engine.process)
        self._sender = f"{engine.process}-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._cancels: set[asyncio.Task[None]] = set()
        # Its model is decoupled, and so answers by streams alone.
        self._channel = Channel(
            grpc.aio.insecure_channel(grpc_target(folder), options=CHANNEL_OPTIONS),
            infer="ModelStreamInfer",
        )

    def takes(self, model: str) -> bool:
        """Tell whether its process moves: a request for one that stands still ends Triton."""
        return self._moves()

    async def ready(self, model: str) -> bool:
        """Tell whether Triton and its model are ready, and move."""
        if not self.takes(model):
            return False
        request = service_pb2.ServerReadyRequest().SerializeToString()
        try:
            answer = await self._channel.small("ServerReady", request)
        except Refusal:
            return False
        return bool(service_pb2.ServerReadyResponse.FromString(answer).ready)

    def answer_name(self, target: Target) -> str:
        """Return Triton's name."""
        return MODEL

    def send(self, request: Outgoing) -> Call:
        """Give it a request; its audio is handed over by a link, under the request's key."""
        key = self._new_key()
        if request.upload is not None:
            self._give(key, request.upload)
        segments, phases = request.target.segments, request.spans.recorded
        message = for_triton(request.parts, key, segments, phases, request.priority)
        call, source = self._channel.send(message, request.streamed)
        request.spans.given(self.name, inside=True)
        return Call(
            call,
            source,
            functools.partial(self._cancel, key),
            lambda _: uploads.remove(self._uploads, key) if request.upload is not None else None,
        )

    def failed(self, refusal: Refusal) -> None:
        """Do nothing: its heartbeats say all."""

    async def small(self, method: str, message: bytes) -> bytes:
        """See `Server`."""
        return await self._channel.small(method, message)

    async def watch(self) -> None:
        """End what a gateway before this one has left behind; it need not be looked at."""
        await self._send_cancel(self._new_key())

    async def close(self) -> None:
        """See `Server`."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_LAST_S)
        await self._channel.close()

    def _new_key(self) -> str:
        return f"{self._sender}-{next(self._numbers)}"

    def _cancel(self, key: str) -> None:
        task = asyncio.create_task(self._send_cancel(key))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, key: str) -> None:
        while not self._moves():  # see `takes`
            await asyncio.sleep(INTERVAL_S)
        with contextlib.suppress(grpc.aio.AioRpcError):  # its requests have gone with it
            _, source = self._channel.send(cancel_of(key), streamed=False)
            async for _ in source:
                pass

    def _moves(self) -> bool:
        """Tell whether the model's process has said lately that it lives."""
        return age_s(self._alive) < STALE_S

    def _give(self, key: str, path: str) -> None:
        try:
            uploads.give(self._uploads, key, path)
        except OSError as error:
            logger.error("an upload cannot be handed on in %s: %s", self._uploads, error)
            raise refusals.no_room_for_upload() from error
