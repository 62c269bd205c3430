"""The engines of this run, and the calls by which they answer requests.

A request goes to the engine that has the fewest requests of this gateway, among those that serve
its model and respond. If an engine is full or lost before it has answered anything, the next one
gets the request.
"""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import DeadlineError, OverloadedError, UnavailableError
from serve.contract.messages import Transcript
from serve.gateway import errors
from serve.gateway.engine import LOOK_S, Engine, EngineAddress, EngineRequest, SentRequest
from serve.gateway.errors import ApiError
from serve.gateway.kserve.messages import read_transcript
from serve.gateway.limits import Permit
from serve.gateway.models import Target
from serve.gateway.observe.metrics import UpstreamMetrics
from serve.gateway.observe.spans import NO_SPAN, RequestSpan
from serve.gateway.target import InflightRequest, LatencyTarget
from serve.wire import uploads
from serve.wire.folder import reference_folder
from serve.wire.tensors import MODEL

logger = logging.getLogger("earshot.gateway")

REFERENCE = "the shadow's reference"
"""The model of `shadow.engine`; no client can name it."""
GRACE_S = 30.0
"""Wait for an answer beyond the transcriber's own limit."""
_EXTENSIONS = ("binary_tensor_data",)  # those of Triton that this server offers


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
        process = addresses[0].process
        self.uploads = uploads.make_folder(folder, process)
        """The folder in which large audio is spooled; see `serve.wire.uploads`."""
        self.own = tuple(Engine(each, config.name, config.server) for each in addresses)
        """The engines that serve clients."""
        self.all = self.own
        if config.shadow.opens_engine:
            address = EngineAddress("shadow", reference_folder(folder), process)
            never_unloads = dataclasses.replace(config.server, idle_unload_s=0.0)
            self.all += (Engine(address, REFERENCE, never_unloads),)
        self.started = asyncio.Event()
        """Set when a request starts. The shadow monitor clears it."""
        self._default = config.name
        self._target = target
        self._metrics = metrics
        self._limit_s = config.transcriber.request_timeout_s + GRACE_S
        self.calls: set[EngineCall] = set()
        """The requests sent to engines and not ended."""
        for engine in self.all:
            inflight = functools.partial(getattr, engine, "inflight")
            metrics.watch(engine.name, engine.model, inflight, engine.is_available)

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
        admitted = None
        if self._target is not None and request.audio is not None:
            admitted = self._target.admit(request.audio, request.priority, permit.api_key.name)
        try:
            call = EngineCall(
                request, self._of(request.target.model), self._metrics, span, self._limit_s
            )
        except BaseException:
            self._end_admitted(admitted, False)
            raise
        self.calls.add(call)
        permit.hold()

        def ended(_: asyncio.Task[None]) -> None:
            permit.release()
            self.calls.discard(call)
            self._end_admitted(admitted, call.answered)

        call.task.add_done_callback(ended)
        self.started.set()
        return call

    def _end_admitted(self, admitted: InflightRequest | None, answered: bool) -> None:
        if self._target is not None and admitted is not None:
            self._target.end(admitted, answered)

    def end_all(self, error: ApiError) -> None:
        """Answer every request that is in flight with an error."""
        for call in self.calls:
            call.end(error)

    async def ready(self, model: str | None = None) -> bool:
        """Return whether requests for a model, by default the served one, would be answered."""
        return await self._ready_engine(model or self._default) is not None

    async def ask(self, model: str, method: str, message: bytes) -> bytes:
        """Ask an engine of this model for health or metadata; return the serialised answer.

        Raises:
            ApiError: 503, no engine is ready.
        """
        engine = await self._ready_engine(model)
        if engine is None:
            raise errors.server_away()
        return await engine.ask(method, message)

    async def server_metadata(self) -> service_pb2.ServerMetadataResponse:
        """Return Triton's name, version and the extensions that this server offers.

        Raises:
            ApiError: 503, no engine is ready.
        """
        answer = await self.ask(self._default, "ServerMetadata", b"")
        metadata = service_pb2.ServerMetadataResponse.FromString(answer)
        found = [name for name in metadata.extensions if name in _EXTENSIONS]
        del metadata.extensions[:]
        metadata.extensions.extend(found)
        return metadata

    async def metadata(self, target: Target, version: str) -> service_pb2.ModelMetadataResponse:
        """Return the inputs and outputs of a model.

        Raises:
            ApiError: 503, no engine of the model is ready.
        """
        request = service_pb2.ModelMetadataRequest(name=MODEL, version=version)
        answer = await self.ask(target.model, "ModelMetadata", request.SerializeToString())
        metadata = service_pb2.ModelMetadataResponse.FromString(answer)
        metadata.name = target.client_name
        return metadata

    async def _ready_engine(self, model: str) -> Engine | None:
        for engine in self._of(model):
            if await engine.ready():
                return engine
        return None

    def _of(self, model: str) -> list[Engine]:
        return [engine for engine in self.all if engine.model == model]


class EngineCall:
    """A request that an engine has, and its answers as they come.

    As a context manager it cancels the request when the block is left by an exception. The answers
    of an engine are read to their end in any case.

    Args:
        request: the request, which goes to the least busy engine at once.
        engines: the model's engines.
        metrics: counts how each engine ended the request.
        span: is told each engine that gets the request.
        limit_s: the longest wait for all answers.

    Raises:
        ApiError: 503, no engine takes the request.
    """

    def __init__(
        self,
        request: EngineRequest,
        engines: Sequence[Engine],
        metrics: UpstreamMetrics,
        span: RequestSpan,
        limit_s: float,
    ) -> None:
        self.answered = False
        """Whether an engine has answered to the end while the client waited."""
        self._request: EngineRequest | None = request  # None once no other engine can get it
        self._client_name = request.target.client_name
        self._untried = list(engines)  # engines that have not had the request
        self._metrics = metrics
        self._span = span
        self._limit_s = limit_s
        self._end_s = asyncio.get_running_loop().time() + limit_s
        self._answers: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue()
        self._engine_lost = self._cancelled = self._done = False
        self._engine: Engine
        self._sent: SentRequest | None = None  # None: the engine's Triton is still being loaded
        self._send_to_next()
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
            raise errors.no_answer_in_time(self._limit_s) from None
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
        response.parameters.clear()  # by which Triton marks the last answer of a stream
        return response

    async def transcript(self) -> Transcript:
        """Return the transcript in the one answer of a request that is not streamed.

        Raises:
            ApiError: the request failed.
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
        if self._sent is not None:
            self._sent.connection.cancel(self._sent.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._done:
            self.cancel()

    def _send_to_next(self) -> None:
        """Give the request to the least busy engine that takes it.

        Raises:
            ApiError: 503, no engine does.
        """
        failed: ApiError | None = None
        for engine in sorted(self._untried, key=lambda engine: engine.inflight):
            if not engine.is_available():
                continue
            self._untried.remove(engine)
            self._engine = engine
            try:
                self._send()
            except ApiError as error:
                failed = error
                continue
            engine.inflight += 1
            return
        raise failed or errors.server_away()

    def _send(self) -> bool:
        """Send the request to the chosen engine; return False if its Triton is not there yet."""
        assert self._request is not None  # it is dropped with the last engine
        self._sent = self._engine.send(self._request, self._span)
        if self._sent is not None and not self._untried:
            self._request = None  # its audio may be large
        return self._sent is not None

    async def _run(self) -> None:
        end: ApiError | None = None
        try:
            while (failed := await self._read_answers()) is not None:
                try:
                    self._send_to_next()
                except ApiError:
                    raise failed from None
        except ApiError as error:
            end = error
        except Exception:  # one request must not hurt its neighbours
            logger.exception("a request failed in the gateway")
            end = errors.failed()
        finally:
            self._done = True
            self._answers.put_nowait(end)

    async def _read_answers(self) -> ApiError | None:
        """Read the answers of one engine; return its error if the next engine may have the request.

        Raises:
            ApiError: the request failed.
        """
        begun, status = False, "INTERNAL"
        try:
            while self._sent is None:
                if self._cancelled:
                    raise errors.client_gone()
                if not self._send():
                    await asyncio.sleep(LOOK_S)
            async for answer in self._sent.answers():
                begun = True
                self._answers.put_nowait(self._with_client_name(answer))
            status = "OK"
        except ApiError as error:
            status = error.status.grpc
            if begun or not self._may_retry(error):
                raise
            return error
        finally:
            self._metrics.ended(self._engine.name, status)
            self._engine.inflight -= 1
            if self._sent is not None:
                self._sent.connection.ended(self._sent)
                self._sent = None
        self.answered = not self._cancelled
        return None

    def _may_retry(self, error: ApiError) -> bool:
        """Return whether the next engine may have the request after one that answered nothing.

        A request that an engine was lost with is retried once, for it may be the cause.
        """
        if self._cancelled or not self._untried or isinstance(error.error, DeadlineError):
            return False
        if isinstance(error.error, UnavailableError):
            self._engine_lost, again = True, not self._engine_lost
            return again
        return isinstance(error.error, OverloadedError)

    def _with_client_name(self, answer: bytes) -> bytes:
        """Append the model's name that the client knows; the last value of a field counts."""
        if self._client_name in ("", MODEL):
            return answer
        head = service_pb2.ModelInferResponse(model_name=self._client_name)
        whole = service_pb2.ModelStreamInferResponse(infer_response=head)
        return answer + bytes(whole.SerializeToString())
