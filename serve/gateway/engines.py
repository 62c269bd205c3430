"""The engines of this run, and the calls by which they answer requests.

An engine is the Triton of a device behind a Unix socket. The supervisor may replace an engine's
Triton. The device's link names the folder of the current one, which gets new requests. The previous
one finishes its requests while the gateway holds its folder. Without a link, as after an idle
unload, requests wait for one.

Engines that serve the request's model and respond are candidates. The one with the fewest requests
of this gateway gets the request. If that one is full or lost before it has answered anything, the
next one gets the request.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import OverloadedError, UnavailableError
from serve.contract.messages import Priority, Transcript
from serve.gateway import errors
from serve.gateway.background import Background
from serve.gateway.errors import ApiError
from serve.gateway.kserve.messages import Chunk, cancel_of, for_triton, read_transcript
from serve.gateway.limits import LARGE_BYTES, Permit
from serve.gateway.models import Target
from serve.gateway.observe.metrics import UpstreamMetrics
from serve.gateway.observe.spans import NO_SPAN, RequestSpan
from serve.gateway.target import AudioLength, LatencyTarget
from serve.wire import uploads
from serve.wire.folder import ALIVE, USED, grpc_target, hold, reference_folder
from serve.wire.liveness import INTERVAL_S, STALE_S, heartbeat_age_s, touch_heartbeat

logger = logging.getLogger("earshot.gateway")

REFERENCE = "the shadow's reference"
"""The model of `shadow.engine`; no client can name it."""
GRACE_S = 30.0
"""Wait for an answer beyond the transcriber's own limit."""
SERVICE = "/inference.GRPCInferenceService/"
_INFER = f"{SERVICE}ModelStreamInfer"
FRAME_BYTES = 2**20
"""Maximum bytes that gRPC reads or writes at a time."""

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # the limit of a connection's handshake
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_READY_S = 2.0  # limit of a health check
_CLOSE_S = 1.0  # limit of cancels in flight when the gateway ends
LOOK_S = 0.25
"""Seconds between two looks at a device's link."""
_ERROR_FIELD = b"\x0a"  # first byte of a ModelStreamInferResponse with an error message


@dataclasses.dataclass(frozen=True)
class EngineAddress:
    """The place of one of this run's engines."""

    device: str  # the device's name
    link: Path  # to the folder with the Triton's sockets
    process_number: int = 0  # number of the gateway's process that asks


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request on its way to an engine."""

    target: Target
    parts: Sequence[Chunk]  # of the serialised `ModelInferRequest`; its model's name may be any
    streamed: bool = False  # whether it may have several answers
    audio_file: str | None = None  # the audio's path in `Engines.uploads`, kept until the answer
    priority: Priority = "file"
    audio: AudioLength | None = None  # None: no latency target limits the request


class Engine(Background):
    """The engine of a device, whichever Triton that is now.

    Args:
        address: the engine's place.
        model: the product that it serves.
        unloads: whether it is unloaded while idle, so that its use must be noted.
    """

    def __init__(self, address: EngineAddress, model: str, unloads: bool) -> None:
        self.name = address.device
        """The name in metrics and in /state."""
        self.model = model
        self.inflight = 0
        """Requests that the gateway has given to it and that have not ended."""
        self.address = address
        self._used = address.link.parent / USED if unloads else None
        self._current: TritonConnection | None = None
        self._replaced: list[TritonConnection] = []  # connections with unfinished requests

    def is_available(self) -> bool:
        """Return whether it may get a request: its process responds, or the request waits.

        A request for a process that has stalled ends Triton.
        """
        connection = self.connection()
        return connection is None or connection.is_alive()

    async def ready(self) -> bool:
        """Return whether its Triton is ready and responds, or will once it is asked."""
        connection = self.connection()
        return connection is None or await connection.ready()

    async def _run(self) -> None:
        """Follow the link, close replaced connections that are done, and note use."""
        while True:
            self.connection()
            for connection in [replaced for replaced in self._replaced if not replaced.busy]:
                self._replaced.remove(connection)
                await connection.close()
            if self.inflight:
                self.note_use()
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await super().close()
        for connection in (*self._replaced, *filter(None, [self._current])):
            await connection.close()

    def connection(self) -> "TritonConnection | None":
        """Return the connection to the Triton that the link names; None while it names none."""
        try:
            while self._current is None or self._current.folder != self._folder():
                # A folder is held before it is looked up again: if it is still named, it stays.
                self._replace(TritonConnection(self.address, self._folder()))
        except OSError:
            self._replace(None)
        return self._current

    def note_use(self) -> None:
        """Keep the engine loaded, or have it loaded."""
        if self._used is not None:
            touch_heartbeat(self._used)

    def _folder(self) -> Path:
        return Path(os.path.realpath(self.address.link, strict=True))

    def _replace(self, connection: "TritonConnection | None") -> None:
        if self._current is not None:
            self._replaced.append(self._current)
        self._current = connection


class TritonConnection:
    """A connection to one Triton, which the supervisor keeps alive while this is open.

    Args:
        address: the engine's place.
        folder: the folder with its sockets.

    Raises:
        OSError: Triton has gone, or is about to.
    """

    def __init__(self, address: EngineAddress, folder: Path) -> None:
        self.folder = folder
        self._name, process_number = address.device, address.process_number
        self._calls = 0
        self._hold_descriptor = hold(folder)
        self._uploads = uploads.make_folder(folder, process_number)
        self._sender_id = f"{process_number}-{secrets.token_hex(8)}"
        self._request_numbers = itertools.count(1)
        self._cancel_tasks: set[asyncio.Task[None]] = set()
        self._channel = grpc.aio.insecure_channel(grpc_target(folder), options=_CHANNEL_OPTIONS)
        unary, stream = self._channel.unary_unary(_INFER), self._channel.stream_stream(_INFER)
        self._infer = functools.partial(infer, unary, stream)
        # The first cancel of a new sender ends the previous sender's requests.
        self.cancel(self.new_key())

    @property
    def busy(self) -> bool:
        """Whether it has unfinished requests."""
        return self._calls > 0 or (bool(self._cancel_tasks) and self.is_alive())

    def is_alive(self) -> bool:
        """Return whether the model's process has shown a recent heartbeat."""
        return heartbeat_age_s(self.folder / ALIVE) < STALE_S

    async def ready(self) -> bool:
        """Return whether Triton and its model are ready and respond."""
        if not self.is_alive():
            return False
        ask = self._channel.unary_unary(f"{SERVICE}ServerReady")
        self._calls += 1  # closing the channel would cancel the caller's task
        try:
            answer = await ask(b"", timeout=_READY_S)
        except grpc.aio.AioRpcError:
            return False
        finally:
            self._calls -= 1
        return bool(service_pb2.ServerReadyResponse.FromString(answer).ready)

    async def answers(
        self, request: EngineRequest, key: str, span: RequestSpan
    ) -> AsyncIterator[bytes]:
        """Send a request; yield its serialised `ModelStreamInferResponse`s.

        They are read to their end, whatever they say.

        Args:
            request: the request; the caller should drop it, for its audio may be large.
            key: a key of `new_key`, under which the audio's file is linked.
            span: is told that this engine has the request.

        Raises:
            ApiError: the request failed; 503, its audio cannot be handed over.
        """
        error: ApiError | None = None
        file = request.audio_file
        if file is not None:
            try:
                uploads.give(self._uploads, key, file)
            except OSError as failed:
                logger.error("an upload cannot be handed on in %s: %s", self._uploads, failed)
                raise errors.no_room_for_upload() from failed
        segments, streamed = request.target.segments, request.streamed
        responses = self._infer(
            for_triton(request.parts, key, segments, span.recorded, request.priority), streamed
        )
        del request
        span.given(self._name)
        self._calls += 1
        try:
            async for answer in responses:
                if answer.startswith(_ERROR_FIELD):
                    message = service_pb2.ModelStreamInferResponse.FromString(answer)
                    error = errors.from_upstream("", message.error_message)
                elif error is None:
                    yield answer
        except grpc.aio.AioRpcError as failed:
            error = error or errors.from_upstream(failed.code().name, failed.details() or "")
        finally:
            self._calls -= 1
            if file is not None:  # unless the engine has taken it
                uploads.remove(self._uploads, key)
        if error is not None:
            raise error

    def cancel(self, key: str) -> None:
        """Cancel the request of this key, once the process responds."""
        task = asyncio.create_task(self._send_cancel(key))
        self._cancel_tasks.add(task)
        task.add_done_callback(self._cancel_tasks.discard)

    async def close(self) -> None:
        """Close the connection."""
        if self._cancel_tasks:
            await asyncio.wait(self._cancel_tasks, timeout=_CLOSE_S if self.is_alive() else 0)
        for cancel in list(self._cancel_tasks):
            cancel.cancel()
        await self._channel.close()
        os.close(self._hold_descriptor)

    def new_key(self) -> str:
        """Make the key with which a request can be cancelled."""
        return f"{self._sender_id}-{next(self._request_numbers)}"

    async def _send_cancel(self, key: str) -> None:
        while not self.is_alive():  # see `Engine.is_available`
            await asyncio.sleep(INTERVAL_S)
        with contextlib.suppress(grpc.aio.AioRpcError):  # the requests have gone with Triton
            async for _ in self._infer(cancel_of(key), False):
                pass


async def infer(unary: Any, stream: Any, message: bytes, streamed: bool) -> AsyncIterator[bytes]:
    """Send a request to Triton's `ModelStreamInfer`; yield its answers as raw bytes.

    Args:
        unary: gRPC's method for one message and one answer.
        stream: gRPC's method for a stream of messages and answers.
        message: the serialised `ModelInferRequest`.
        streamed: whether it may have several answers.
    """
    # The model is decoupled and so answers by streams alone. On the wire a stream of one message
    # is the same as a message; as a stream it frees the message, if large, once it is sent.
    if not streamed and len(message) <= LARGE_BYTES:
        yield await unary(message)
        return
    call = stream()
    # The call may end before or while the message is sent: reading it tells how.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
        await call.write(message)
        del message
        await call.done_writing()
    async for answer in call:
        yield answer


class Engines:
    """All engines of this run. For one event loop.

    Args:
        config: the whole configuration.
        folder: the run's folder.
        addresses: at least one.
        target: admits requests if there is a latency target.
        metrics: counts how engines end requests.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        addresses: Sequence[EngineAddress],
        target: LatencyTarget | None,
        metrics: UpstreamMetrics,
    ) -> None:
        process = addresses[0].process_number
        self.uploads = uploads.make_folder(folder, process)
        """The folder in which large audio is spooled; see `serve.wire.uploads`."""
        unloads = config.server.idle_unload_s > 0
        self.own = tuple(Engine(address, config.name, unloads) for address in addresses)
        """The engines that serve clients."""
        self.all = self.own
        if config.shadow.opens_engine:
            address = EngineAddress("shadow", reference_folder(folder), process)
            self.all += (Engine(address, REFERENCE, unloads=False),)
        self.started = asyncio.Event()
        """Set when a request starts. The shadow monitor clears it."""
        self._target = target
        self.metrics = metrics
        self.limit_s = config.transcriber.request_timeout_s + GRACE_S
        self.calls: set[EngineCall] = set()
        """The requests sent to engines and not ended."""
        for engine in self.all:
            inflight = functools.partial(getattr, engine, "inflight")
            metrics.inflight.labels(engine.name).set_function(inflight)
            metrics.takes.labels(engine.name, engine.model).set_function(engine.is_available)

    def start(
        self, request: EngineRequest, permit: Permit, span: RequestSpan = NO_SPAN
    ) -> "EngineCall":
        """Give a request to the least busy engine.

        Args:
            request: the request.
            permit: its permit, which the call holds until the last engine has ended the request.
            span: its span, which is told each engine that gets the request.

        Raises:
            ApiError: 429, it would miss the latency target; 503, no engine takes it.
        """
        engines = [engine for engine in self.all if engine.model == request.target.model]
        if not any(engine.is_available() for engine in engines):
            raise errors.server_away()
        target, admitted = self._target, None
        if target is not None and request.audio is not None:
            admitted = target.admit(request.audio, request.priority, permit.api_key.name)
        call = EngineCall(self, request, engines, span)
        self.calls.add(call)
        permit.hold()

        def ended(_: asyncio.Task[None]) -> None:
            permit.release()
            self.calls.discard(call)
            if target is not None and admitted is not None:
                target.end(admitted, call.answered)

        call.task.add_done_callback(ended)
        self.started.set()
        return call

    def end_all(self, error: ApiError) -> None:
        """Answer every request that is in flight with an error."""
        for call in self.calls:
            call.end(error)

    async def ready(self) -> bool:
        """Return whether a client's request would be answered."""
        for engine in self.own:
            if await engine.ready():
                return True
        return False


class EngineCall:
    """A request that an engine has, and its answers as they come.

    As a context manager it cancels the request when the block is left by an exception. The answers
    of an engine are read to their end in any case.

    Args:
        owner: has the limit of time, and the metrics by which engines are watched.
        request: the request.
        engines: the model's engines; the least busy one gets the request.
        span: is told each engine that gets the request.
    """

    def __init__(
        self, owner: Engines, request: EngineRequest, engines: Sequence[Engine], span: RequestSpan
    ) -> None:
        self.answered = False
        """Whether an engine has answered to the end while the client waited."""
        self._request: EngineRequest | None = request  # None once no other engine can get it
        self.client_name = request.target.client_name
        """The model's name that a client of KServe sent."""
        self._untried = list(engines)  # engines that have not had the request
        self._owner = owner
        self._span = span
        self._end_s = asyncio.get_running_loop().time() + owner.limit_s
        self._answers: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue()
        self._begun = self._engine_lost = self._cancelled = False
        self._cancel_sent: Callable[[], None] | None = None  # None: no Triton has the request
        self.task = asyncio.create_task(self._run())
        """Reads the answers of all engines that get the request."""

    async def next(self) -> bytes | None:
        """Return the next serialised `ModelStreamInferResponse`; None: there is no further one.

        Raises:
            ApiError: the request failed.
        """
        try:
            async with asyncio.timeout_at(self._end_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise errors.no_answer_in_time(self._owner.limit_s) from None
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def response(self) -> service_pb2.ModelInferResponse:
        """Return the one answer of a request that is not streamed.

        Raises:
            ApiError: the request failed.
        """
        answer = await self.next()
        if answer is None:
            raise errors.from_upstream("INTERNAL", "the call ended without an answer")
        response = service_pb2.ModelStreamInferResponse.FromString(answer).infer_response
        response.model_name = self.client_name
        response.parameters.clear()  # Triton marks the last answer of a stream with one
        return response

    async def transcript(self) -> Transcript:
        """Return the transcript in the one answer of a request that is not streamed.

        Raises:
            ApiError: the request failed.
            EarshotError: the answer is malformed.
        """
        return read_transcript(await self.response())

    def end(self, error: ApiError) -> None:
        """Answer the request with an error now."""
        self._answers.put_nowait(error)

    def cancel(self) -> None:
        """Tell the engine that the request's answers are not needed any more.

        A small second request cancels the request by its key. The cancelled request's call is read
        to the end. A call of gRPC is never cancelled: Triton 24.10 keeps a call forever if its
        cancel meets its end.
        """
        self._cancelled = True
        if self._cancel_sent is not None:
            self._cancel_sent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.task.done():
            self.cancel()

    async def _run(self) -> None:
        end: ApiError | None = errors.server_away()
        try:
            while (engine := self._next_engine()) is not None:
                end = await self._read_answers(engine)
                if end is None or not self._may_retry(end):
                    break
            self.answered = end is None and not self._cancelled
        except Exception:  # one request must not hurt its neighbours
            logger.exception("a request failed in the gateway")
            end = errors.failed()
        finally:
            self._answers.put_nowait(end)

    def _next_engine(self) -> Engine | None:
        """Return the least busy engine that may get the request; None: there is no further one."""
        available = [engine for engine in self._untried if engine.is_available()]
        return min(available, key=lambda engine: engine.inflight, default=None)

    async def _read_answers(self, engine: Engine) -> ApiError | None:
        """Send the request to an engine, and read its answers; return its error."""
        self._untried.remove(engine)
        engine.inflight += 1
        status = "INTERNAL"
        try:
            engine.note_use()
            while (connection := engine.connection()) is None and not self._cancelled:
                await asyncio.sleep(LOOK_S)
                engine.note_use()
            if connection is None or self._cancelled:
                raise errors.client_gone()
            assert self._request is not None  # it is dropped with the last engine
            key = connection.new_key()
            answers = connection.answers(self._request, key, self._span)
            if not self._untried:
                self._request = None  # its audio may be large
            self._cancel_sent = functools.partial(connection.cancel, key)
            async for answer in answers:
                self._begun = True
                self._answers.put_nowait(answer)
            status = "OK"
        except ApiError as error:
            status = error.status.grpc
            return error
        finally:
            self._cancel_sent = None
            self._owner.metrics.requests.labels(engine.name, status).inc()
            engine.inflight -= 1
        return None

    def _may_retry(self, error: ApiError) -> bool:
        """Return whether the next engine may have the request after one that answered nothing.

        A request that an engine was lost with is retried once, for it may be the cause.
        """
        if self._begun or self._cancelled:
            return False
        if isinstance(error.error, UnavailableError):
            self._engine_lost, again = True, not self._engine_lost
            return again
        return isinstance(error.error, OverloadedError)
