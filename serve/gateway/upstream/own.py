"""A Triton of this run, behind its Unix socket; there is one for each device.

The supervisor may put another in its place: new requests go to the one whose folder the device's
link names, and the one before it answers what it has, as long as its folder is held. Where there is
no link, as when an engine was unloaded, requests wait for one.

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
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from serve.contract.server_config import ServerConfig
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.kserve.messages import cancel_of, for_triton
from serve.gateway.upstream.calls import CHANNEL_OPTIONS, Call, Channel
from serve.gateway.upstream.outgoing import Outgoing
from serve.wire import uploads
from serve.wire.alive import INTERVAL_S, STALE_S, age_s, beat
from serve.wire.folder import ALIVE, USED, grpc_target, hold

logger = logging.getLogger("earshot.gateway")

_LAST_S = 1.0  # that cancels on their way may take when the gateway ends
_LOOK_S = 0.25  # between two looks at the link


@dataclasses.dataclass(frozen=True)
class OwnEngine:
    """One of this run's engines, as its gateway finds it."""

    device: str  # its name
    link: Path  # to the folder with the sockets of its Triton
    process: int = 0  # of the gateway's, which one asks


class OwnTriton:
    """The Triton of a device of this run, whichever that is now.

    Args:
        engine: where it is.
        model: the product that it serves.
        server: says whether it may be unloaded, and how long it then may take to be there.
    """

    def __init__(self, engine: OwnEngine, model: str, server: ServerConfig) -> None:
        self.name = engine.device
        """As metrics and /state call it."""
        self.model = model
        self._engine = engine
        self._used = engine.link.parent / USED if server.idle_unload_s else None
        self._start_timeout_s = server.start_timeout_s
        self._current: _Connection | None = None
        self.inflight = 0
        """Requests that the gateway has given to it and that have not ended."""
        self._replaced: list[_Connection] = []  # which have something to do

    def takes(self) -> bool:
        """Tell whether it may be given a request: its process moves, or what it is given waits.

        A request for one that stands still ends Triton.
        """
        now = self._now()
        return now is None or now.moves()

    async def ready(self) -> bool:
        """Tell whether Triton and its model are ready, and move, or will be once they are asked."""
        now = self._now()
        return now is None or await now.ready()

    def send(self, request: Outgoing) -> Call:
        """Give it a request; its audio is handed over by a link, under the request's key.

        Raises:
            ApiError: the audio cannot be handed over.
        """
        self._note_use()
        if (now := self._now()) is not None:
            return now.send(request)
        return _waiting(asyncio.create_task(self._send_later(request)))

    async def small(self, method: str, message: bytes) -> bytes:
        """Ask a small question, and return the answer.

        Raises:
            ApiError: there is none.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                now = await self._opened()
        except TimeoutError:
            raise errors.server_away() from None
        return await now.channel.small(method, message)

    async def watch(self) -> None:
        """Look which Triton it is, let go of one that has been replaced, and tell of use."""
        while True:
            self._now()
            for connection in [each for each in self._replaced if not each.busy]:
                self._replaced.remove(connection)
                await connection.close()
            if self.inflight:
                self._note_use()
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Hang up."""
        for connection in (*self._replaced, *filter(None, [self._current])):
            await connection.close()

    async def _send_later(self, request: Outgoing) -> Call:
        return (await self._opened()).send(request)

    async def _opened(self) -> "_Connection":
        """Wait for a Triton; whoever asks has a limit."""
        while (now := self._now()) is None:
            self._note_use()
            await asyncio.sleep(_LOOK_S)
        return now

    def _now(self) -> "_Connection | None":
        """Return the connection to the Triton that the link names; None while it names none."""
        try:
            while self._current is None or self._current.folder != self._folder():
                # Held before it is looked up again: if it is still named then, it stays.
                self._replace(_Connection(self._engine, self._folder()))
        except OSError:
            self._replace(None)
        return self._current

    def _folder(self) -> Path:
        return Path(os.path.realpath(self._engine.link, strict=True))

    def _replace(self, connection: "_Connection | None") -> None:
        if self._current is not None:
            self._replaced.append(self._current)
        self._current = connection

    def _note_use(self) -> None:
        if self._used is not None:
            beat(self._used)


class _Connection:
    """A connection to one Triton, which may live for as long as this is open.

    Args:
        engine: whose it is.
        folder: with its sockets.

    Raises:
        OSError: it has gone, or is about to.
    """

    def __init__(self, engine: OwnEngine, folder: Path) -> None:
        self.name, process = engine.device, engine.process
        self.folder = folder
        self._calls = 0  # under way
        self._hold = hold(folder)
        self._uploads = uploads.make_folder(folder, process)
        self._sender = f"{process}-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._cancels: set[asyncio.Task[None]] = set()
        self.channel = Channel(
            grpc.aio.insecure_channel(grpc_target(folder), options=CHANNEL_OPTIONS)
        )
        self._cancel(self._new_key())  # ends what a gateway before this one has left behind

    @property
    def busy(self) -> bool:
        """Whether it has something to do there."""
        return self._calls > 0 or (bool(self._cancels) and self.moves())

    def moves(self) -> bool:
        """Tell whether the model's process has said lately that it lives."""
        return age_s(self.folder / ALIVE) < STALE_S

    async def ready(self) -> bool:
        """Tell whether Triton and its model are ready, and move."""
        if not self.moves():
            return False
        request = service_pb2.ServerReadyRequest().SerializeToString()
        try:
            answer = await self.channel.small("ServerReady", request)
        except ApiError:
            return False
        return bool(service_pb2.ServerReadyResponse.FromString(answer).ready)

    def send(self, request: Outgoing) -> Call:
        """Give it a request.

        Raises:
            ApiError: its audio cannot be handed over.
        """
        key = self._new_key()
        if request.upload is not None:
            self._give(key, request.upload)
        segments, phases = request.target.segments, request.spans.recorded
        message = for_triton(request.parts, key, segments, phases, request.priority)
        source = self.channel.send(message, request.streamed)
        request.spans.given(self.name)
        self._calls += 1
        upload = key if request.upload is not None else None
        return Call(
            source,
            functools.partial(self._cancel, key),
            functools.partial(self._ended, upload),
        )

    async def close(self) -> None:
        """Hang up."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_LAST_S if self.moves() else 0)
        for cancel in list(self._cancels):
            cancel.cancel()
        await self.channel.close()
        os.close(self._hold)

    def _new_key(self) -> str:
        return f"{self._sender}-{next(self._numbers)}"

    def _ended(self, upload: str | None) -> None:
        self._calls -= 1
        if upload is not None:
            uploads.remove(self._uploads, upload)

    def _cancel(self, key: str) -> None:
        task = asyncio.create_task(self._send_cancel(key))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, key: str) -> None:
        while not self.moves():  # see `OwnTriton.takes`
            await asyncio.sleep(INTERVAL_S)
        with contextlib.suppress(grpc.aio.AioRpcError):  # its requests have gone with it
            async for _ in self.channel.send(cancel_of(key), streamed=False):
                pass

    def _give(self, key: str, path: str) -> None:
        try:
            uploads.give(self._uploads, key, path)
        except OSError as error:
            logger.error("an upload cannot be handed on in %s: %s", self._uploads, error)
            raise errors.no_room_for_upload() from error


def _waiting(sending: asyncio.Task[Call]) -> Call:
    """Make the call of a request that waits until an engine is there to take it."""

    def sent() -> Call | None:
        if not sending.done() or sending.cancelled() or sending.exception() is not None:
            return None
        return sending.result()

    def cancel() -> None:
        if (call := sent()) is not None:
            call.cancel()
        else:
            sending.cancel()

    def close() -> None:
        if (call := sent()) is not None:
            call.close()

    return Call(_answers(sending), cancel, close)


async def _answers(sending: asyncio.Task[Call]) -> AsyncIterator[bytes]:
    try:
        call = await sending
    except asyncio.CancelledError:
        if not sending.cancelled():
            raise
        raise errors.client_gone() from None
    async for answer in call.answers():
        yield answer
