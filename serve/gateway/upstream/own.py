"""A Triton of this run, behind its Unix socket; there is one for each device.

A call of Triton's is never cancelled, for Triton 24.10 keeps a call whose cancel meets its end.
A request whose client goes is cancelled by its key instead, and its call is read to its end.
"""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Protocol

import grpc
from tritonclient.grpc import service_pb2

from serve.errors import UnavailableError
from serve.gateway import refusals
from serve.gateway.envelope import with_key, with_model
from serve.gateway.models import Target
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import CHANNEL_OPTIONS, Call, Channel
from serve.gateway.upstream.server import Outgoing
from serve.triton import uploads
from serve.triton.folder import HEARTBEATS, grpc_target
from serve.triton.heartbeat import STALE_S, age_s

logger = logging.getLogger("earshot.gateway")


class Cancels(Protocol):
    """Names requests and cancels them; `serve.triton.cancels.CancelClient`."""

    @property
    def connected(self) -> bool:
        """Whether it can."""

    def new_key(self) -> str:
        """A key for a request."""

    def cancel(self, key: str) -> None:
        """End the request of this key."""


@dataclasses.dataclass(frozen=True)
class OwnEngine:
    """One of this run's engines, as its gateway finds it."""

    device: str  # its name
    folder: Path  # with the sockets of its Triton
    cancels: Cancels  # ends requests whose clients have gone


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
        self._heartbeats = [folder / name for name in HEARTBEATS]
        self._uploads = uploads.make_folder(folder)
        self._cancels = engine.cancels
        self._channel = Channel(
            grpc.aio.insecure_channel(grpc_target(folder), options=CHANNEL_OPTIONS)
        )

    def takes(self, model: str) -> bool:
        """Whether its processes move: what Triton gives to one that stands still ends Triton."""
        return self._moves() and self._cancels.connected

    async def ready(self, model: str) -> bool:
        """Whether Triton and its models are ready, and move."""
        if not self.takes(model):
            return False
        request = service_pb2.ServerReadyRequest().SerializeToString()
        try:
            answer = await self._channel.small("ServerReady", request)
        except Refusal:
            return False
        return bool(service_pb2.ServerReadyResponse.FromString(answer).ready)

    def answer_name(self, target: Target) -> str:
        """Triton's name."""
        return target.triton_name

    def send(self, request: Outgoing) -> Call:
        """Give it a request; its audio is handed over by a link, under the request's key."""
        try:
            key = self._cancels.new_key()
        except UnavailableError:
            raise refusals.server_away() from None
        if request.upload is not None:
            self._give(key, request.upload)
        message = with_key(with_model(request.parts, request.target.triton_name), key)
        call, source = self._channel.send(message, request.streamed)
        return Call(
            call,
            source,
            request.streamed,
            functools.partial(self._cancels.cancel, key),
            lambda _: uploads.remove(self._uploads, key) if request.upload is not None else None,
        )

    def failed(self, refusal: Refusal) -> None:
        """Its heartbeats say all."""

    async def small(self, method: str, message: bytes) -> bytes:
        """See `Server`."""
        return await self._channel.small(method, message)

    async def watch(self) -> None:
        """Nor need it be looked at."""

    async def close(self) -> None:
        """See `Server`."""
        await self._channel.close()

    def _give(self, key: str, path: str) -> None:
        try:
            uploads.give(self._uploads, key, path)
        except OSError as error:
            logger.error("an upload cannot be handed on in %s: %s", self._uploads, error)
            raise refusals.no_room_for_upload() from error

    def _moves(self) -> bool:
        """Whether the models' processes have said lately that they live."""
        return max(map(age_s, self._heartbeats)) < STALE_S
