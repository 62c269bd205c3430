"""The engines of this run, and the calls by which they answer requests.

Engines that serve the request's model and respond are candidates. The one with the fewest requests
of this gateway gets the request. If that one is full or lost before it has answered anything, the
next one gets the request.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import DeadlineError, OverloadedError, UnavailableError
from serve.contract.messages import Transcript
from serve.gateway import errors
from serve.gateway.engine import LOOK_S, Engine, EngineAddress, EngineRequest
from serve.gateway.errors import ApiError
from serve.gateway.kserve.messages import read_transcript
from serve.gateway.limits import Permit
from serve.gateway.observe.metrics import UpstreamMetrics
from serve.gateway.observe.spans import NO_SPAN, RequestSpan
from serve.gateway.target import LatencyTarget
from serve.wire import uploads
from serve.wire.folder import reference_folder

logger = logging.getLogger("earshot.gateway")

REFERENCE = "the shadow's reference"
"""The model of `shadow.engine`; no client can name it."""
GRACE_S = 30.0
"""Wait for an answer beyond the transcriber's own limit."""


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
        if self._begun or self._cancelled or isinstance(error.error, DeadlineError):
            return False
        if isinstance(error.error, UnavailableError):
            self._engine_lost, again = True, not self._engine_lost
            return again
        return isinstance(error.error, OverloadedError)
