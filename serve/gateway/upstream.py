"""Triton behind the gateway: requests, health and metadata over its Unix socket.

A call of Triton's is never cancelled, for Triton 24.10 keeps a call whose cancel meets its end.
A request whose client goes is cancelled by its key instead, and its call is read to its end.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

import grpc
from tritonclient.grpc import service_pb2

from serve.errors import UnavailableError
from serve.gateway import refusals
from serve.gateway.envelope import Part, with_key
from serve.gateway.limits import Ticket
from serve.gateway.refusals import Refusal
from serve.triton import uploads
from serve.triton.folder import HEARTBEATS, grpc_target
from serve.triton.heartbeat import STALE_S

logger = logging.getLogger("earshot.gateway")

FRAME_BYTES = 2**20
"""Most bytes of a message that gRPC reads or writes at a time."""
SERVICE = "/inference.GRPCInferenceService/"

_SMALL_S = 2.0  # most that health and metadata take
_GRACE_S = 30.0  # beyond the transcriber's own limit
_LARGE_BYTES = 2**20  # from here on the time that it takes matters less than the memory
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Cancels(Protocol):
    """Names requests and cancels them; `serve.triton.cancels.CancelClient`."""

    @property
    def connected(self) -> bool:
        """Whether it can."""

    def new_key(self) -> str:
        """A key for a request."""

    def cancel(self, key: str) -> None:
        """End the request of this key."""


class Exchange:
    """One request in Triton's hands, and its answers as they come.

    Leaving its `with` block by an exception tells the model that nobody waits any more.

    Args:
        source: the answers of a call of Triton's; read to its end, whatever happens.
        ticket: closed when Triton has let go of the request.
        cancel: ends the request by its key.
        limit_s: longest wait for all answers.
    """

    def __init__(
        self,
        source: AsyncIterator[bytes],
        ticket: Ticket,
        cancel: Callable[[], None],
        limit_s: float,
    ) -> None:
        self._source = source
        self._ticket = ticket
        self._cancel = cancel
        self._limit_s = limit_s
        self._end_s = asyncio.get_running_loop().time() + limit_s
        self._answers: asyncio.Queue[bytes | Refusal | None] = asyncio.Queue()
        self._done = False
        self.pump = asyncio.create_task(self._pump())

    async def next_answer(self) -> bytes | None:
        """The next answer; None: there is no further one.

        Raises:
            Refusal: the request failed.
        """
        try:
            async with asyncio.timeout_at(self._end_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise refusals.no_answer_in_time(self._limit_s) from None
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def only_answer(self) -> bytes:
        """The one answer of a request that is not streamed.

        Raises:
            Refusal: the request failed.
        """
        answer = await self.next_answer()
        if answer is None:
            raise refusals.from_upstream("INTERNAL", "the call ended without an answer")
        return answer

    def end(self, refusal: Refusal) -> None:
        """Answer this now, whatever Triton will."""
        self._answers.put_nowait(refusal)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel the request, unless it has ended."""
        if kind is not None and not self._done:
            self._cancel()

    async def _pump(self) -> None:
        end: Refusal | None = None
        try:
            async for answer in self._source:
                self._answers.put_nowait(answer)
        except grpc.aio.AioRpcError as error:
            end = refusals.from_upstream(error.code().name, error.details() or "")
        except Exception:  # one request must not hurt its neighbours
            logger.exception("a call of Triton's failed in the gateway")
            end = refusals.failed()
        finally:
            self._done = True
            self._ticket.close()
            self._answers.put_nowait(end)


async def _at_once(call: grpc.aio.UnaryUnaryCall) -> AsyncIterator[bytes]:
    yield await call


async def _by_stream(call: grpc.aio.StreamStreamCall, message: bytes) -> AsyncIterator[bytes]:
    with contextlib.suppress(asyncio.InvalidStateError):  # it has ended: read how
        await call.write(message)
        del message
        await call.done_writing()
    async for answer in call:
        yield answer


class Upstream:
    """Triton Inference Server and its models.

    Args:
        folder: of the run.
        cancels: ends requests whose clients have gone.
        request_timeout_s: after which the transcriber ends a request by itself.
    """

    def __init__(self, folder: Path, cancels: Cancels, request_timeout_s: float) -> None:
        self._heartbeats = [folder / name for name in HEARTBEATS]
        self.uploads = uploads.make_folder(folder)
        """Where large audio is spooled; see `serve.triton.uploads`."""
        self._cancels = cancels
        self._limit_s = request_timeout_s + _GRACE_S
        self._channel = grpc.aio.insecure_channel(grpc_target(folder), options=_OPTIONS)
        self._infer = self._channel.unary_unary(f"{SERVICE}ModelInfer")
        # On the wire the same call, which lets go of the message once it is sent.
        self._infer_large = self._channel.stream_stream(f"{SERVICE}ModelInfer")
        self._stream = self._channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        self._exchanges: dict[asyncio.Task[None], Exchange] = {}

    def start(
        self,
        parts: Sequence[Part],
        ticket: Ticket,
        streamed: bool,
        triton_grpc_error: bool = False,
        upload: str | None = None,
    ) -> Exchange:
        """Send a request.

        Args:
            parts: of the serialised `ModelInferRequest`.
            ticket: the exchange closes it.
            streamed: by ModelStreamInfer, which gives ModelStreamInferResponses; else by
                ModelInfer, which gives one ModelInferResponse.
            triton_grpc_error: of a stream: errors become its status rather than messages.
            upload: path of the request's audio, in `uploads`.

        Raises:
            Refusal: the model cannot be reached; the ticket is still open.
        """
        if not self._moves():  # what Triton gives to a process that stands still ends Triton
            raise refusals.server_away()
        try:
            key = self._cancels.new_key()
        except UnavailableError:
            raise refusals.server_away() from None
        if upload is not None:
            uploads.give(self.uploads, key, upload)
        source = self._send(with_key(parts, key), streamed, triton_grpc_error)
        cancel = functools.partial(self._cancels.cancel, key)
        exchange = Exchange(source, ticket, cancel, self._limit_s)
        self._exchanges[exchange.pump] = exchange
        exchange.pump.add_done_callback(self._exchanges.pop)
        if upload is not None:
            exchange.pump.add_done_callback(lambda _: uploads.remove(self.uploads, key))
        return exchange

    def _send(
        self, message: bytes, streamed: bool, triton_grpc_error: bool
    ) -> AsyncIterator[bytes]:
        if streamed:
            metadata = (("triton_grpc_error", "true"),) if triton_grpc_error else ()
            return _by_stream(self._stream(metadata=metadata), message)
        if len(message) > _LARGE_BYTES:
            return _by_stream(self._infer_large(), message)
        return _at_once(self._infer(message))

    def end_all(self, refusal: Refusal) -> None:
        """Answer this to every request that still waits."""
        for exchange in self._exchanges.values():
            exchange.end(refusal)

    async def ready(self) -> bool:
        """Whether requests can be answered: Triton and its models are ready, and move."""
        if not (self._cancels.connected and self._moves()):
            return False
        request = service_pb2.ServerReadyRequest().SerializeToString()
        try:
            answer = await self.small("ServerReady", request)
        except Refusal:
            return False
        return bool(service_pb2.ServerReadyResponse.FromString(answer).ready)

    async def small(self, method: str, message: bytes) -> bytes:
        """The answer to a small question.

        Raises:
            Refusal: there is none.
        """
        try:
            return bytes(
                await self._channel.unary_unary(SERVICE + method)(message, timeout=_SMALL_S)
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise refusals.server_away() from None
            raise refusals.from_upstream(error.code().name, error.details() or "") from None

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    def _moves(self) -> bool:
        """Whether the models' processes have said lately that they live."""
        try:
            oldest = min(heartbeat.stat().st_mtime for heartbeat in self._heartbeats)
        except OSError:
            return False
        return time.time() - oldest < STALE_S
