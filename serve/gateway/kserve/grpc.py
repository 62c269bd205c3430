"""KServe v2 over gRPC: health, metadata, and requests, one by one or as a stream.

Tensors pass through as the bytes that they are. Every method is handled as a stream, which is the
same on the wire. gRPC calls the handler of a stream before it reads the first message, so a request
can be rejected before it is received.

Each request of a client's stream is a separate call to an engine, and all answers share the
stream. So a client that leaves leaves nothing behind but requests that are cancelled by their keys
and read to their ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from serve.contract.errors import UnavailableError
from serve.gateway import errors
from serve.gateway.context import RequestContext, Services
from serve.gateway.engines import FRAME_BYTES, SERVICE, EngineCall, EngineRequest
from serve.gateway.errors import ApiError
from serve.gateway.kserve import messages
from serve.gateway.limits import EXPANSION, MAX_SMALL_BYTES, MAX_STRUCTURE_BYTES, Permit
from serve.gateway.observe.log import LogRecord

logger = logging.getLogger("earshot.gateway")

Rpc = Any
"""grpc.aio.ServicerContext, or a stand-in for it."""
Method = Callable[[Rpc, LogRecord], Awaitable[None]]

MAX_CALLS = 512
"""Maximum of calls in flight on one connection; a client's further calls wait in the client."""
# gRPC queues calls that no handler has taken yet, some 5 kB each. Beyond this length, by default
# 1,000, it ends new calls at random with CANCELLED, and beyond twice the length all new calls.
_MAX_QUEUED = 10_000
_IDLE_S = 600.0  # limit of the time that a stream is open without a request
_WRITE_S = 60.0  # after which a client that takes no answer counts as gone


def open_server(services: Services, max_connections: int, shared: bool) -> grpc.aio.Server:
    """Open the gRPC server, which listens once it is started.

    Args:
        services: the gateway's services.
        max_connections: the maximum number of connections.
        shared: whether other processes listen on the same port.

    Raises:
        UnavailableError: the address cannot be used.
    """
    config, max_bytes = services.config.server, services.admission.max_request_bytes
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_bytes + MAX_STRUCTURE_BYTES),
            ("grpc.max_send_message_length", -1),
            # By default a message comes in frames of 16 KiB, at first 64 KiB of it: with these,
            # 10 s of audio as WAV pass through in 1.2 ms rather than 2.6.
            ("grpc.http2.max_frame_size", FRAME_BYTES),
            ("grpc.http2.lookahead_bytes", FRAME_BYTES),
            # Identity alone: the size of a compressed message would not tell its memory.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_concurrent_streams", min(MAX_CALLS, max_connections)),
            ("grpc.server.max_pending_requests", _MAX_QUEUED),
            ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_QUEUED),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", 600_000),
            # Calls that have begun go on, and the next ones take a new connection. For it the
            # client resolves the server's name again, so it finds new servers and leaves those
            # that drain.
            ("grpc.max_connection_age_ms", 300_000),
            # A second gateway must not share the port unnoticed.
            ("grpc.so_reuseport", int(shared)),
        ]
    )
    server.add_generic_rpc_handlers((kserve_methods(services),))
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.grpc_port}"
    try:
        if config.tls_certificate:
            files = Path(config.tls_key), Path(config.tls_certificate)
            credentials = grpc.ssl_server_credentials([tuple(map(Path.read_bytes, files))])
            server.add_secure_port(address, credentials)
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        message = f"cannot listen on {address}; set another server.grpc_port"
        raise UnavailableError(message) from error
    return server


def kserve_methods(services: Services) -> grpc.GenericRpcHandler:
    """Return the handler of the methods that a client can call."""

    async def infer(rpc: Rpc, record: LogRecord) -> None:
        async with RequestContext(services, record, "grpc") as context:
            with context.admit() as permit:
                message = await services.uploads.receive(rpc)
                if message is None:
                    raise errors.invalid("the call ended without a message")
                call = _start(context, message, permit, streamed=False)
                del message
            with call:
                answer = await call.response()
            context.kserve_answered(answer)
            await _write(rpc, answer.SerializeToString())

    async def stream(rpc: Rpc, record: LogRecord) -> None:
        await InferStream(services, rpc, record).run()

    async def server_live(message: bytes) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def server_ready(message: bytes) -> Any:
        return service_pb2.ServerReadyResponse(ready=await services.ready())

    async def model_ready(message: bytes) -> Any:
        request = messages.parse(service_pb2.ModelReadyRequest, message)
        services.models.target(request.name, request.version)
        return service_pb2.ModelReadyResponse(ready=await services.ready())

    async def server_metadata(message: bytes) -> Any:
        return service_pb2.ServerMetadataResponse(**messages.SERVER_METADATA)

    async def model_metadata(message: bytes) -> Any:
        request = messages.parse(service_pb2.ModelMetadataRequest, message)
        target = services.models.target(request.name, request.version)
        return service_pb2.ModelMetadataResponse(**messages.model_metadata(target))

    methods: dict[str, Method] = {
        "ServerLive": _small(services, server_live),
        "ServerReady": _small(services, server_ready),
        "ModelReady": _small(services, model_ready),
        "ServerMetadata": _small(services, server_metadata, needs_key=True),
        "ModelMetadata": _small(services, model_metadata, needs_key=True),
        "ModelInfer": infer,
        "ModelStreamInfer": stream,
    }
    handlers = {name: _handler(name, method) for name, method in methods.items()}
    return grpc.method_handlers_generic_handler(SERVICE.strip("/"), handlers)


def _small(
    services: Services, answer: Callable[[bytes], Awaitable[Any]], needs_key: bool = False
) -> Method:
    async def handle(rpc: Rpc, record: LogRecord) -> None:
        if needs_key:
            services.keys.identify(record.header("authorization"))
        message = await services.uploads.receive(rpc)
        if message is None or len(message) > MAX_SMALL_BYTES:
            raise errors.invalid(f"expected one message of at most {MAX_SMALL_BYTES} bytes")
        await _write(rpc, (await answer(message)).SerializeToString())

    return handle


class InferStream:
    """A client's stream of requests.

    Args:
        services: the gateway's services.
        rpc: gRPC's context of the call.
        record: the log record of the stream as a whole.
    """

    def __init__(self, services: Services, rpc: Rpc, record: LogRecord) -> None:
        self._services = services
        self._rpc = rpc
        self._record = record
        self._count = 0  # of the stream's requests
        self._writing = asyncio.Lock()
        self._inflight = 0
        # From a client that takes no answers no more is read than could have been admitted.
        self._room = asyncio.Semaphore(services.admission.max_requests)

    async def run(self) -> None:
        """Answer requests until the client has no more.

        Raises:
            ApiError: the stream cannot go on; the requests that it had accepted are answered.
        """
        api_key = self._services.keys.identify(self._record.header("authorization"))
        end: ApiError | None = None
        with self._services.admission.admit(api_key):  # a stream counts, for it may be idle
            try:
                async with asyncio.TaskGroup() as group:
                    try:
                        await self._take_all(group)
                    except ApiError as error:
                        end = error
            except* ApiError as failed:
                end = next(iter(failed.exceptions))  # type: ignore[assignment]
        if end is not None:
            raise end

    async def _take_all(self, group: asyncio.TaskGroup) -> None:
        wait_s: float | None = None
        while True:
            message = await self._services.uploads.receive(
                self._rpc, wait_s, is_needed=lambda: self._inflight > 0
            )
            if message is None:
                return
            wait_s = _IDLE_S
            await self._room.acquire()
            if self._services.admission.draining:  # since the message came
                raise errors.stopping()
            self._inflight += 1
            group.create_task(self._answer(message))

    async def _answer(self, message: bytes) -> None:
        """Answer a request.

        Raises:
            ApiError: 504, the client does not take the answer.
        """
        answers = self._pass_on(message)
        del message  # a rejected message is not counted, and its client may take no answers
        if (error := await answers) is not None:
            answer = service_pb2.ModelStreamInferResponse(error_message=error)
            await self._write(answer.SerializeToString())
        self._inflight -= 1
        self._room.release()

    async def _pass_on(self, message: bytes) -> str | None:
        """Pass on the answers of a request; return the text of the error that ends it, if one does.

        An exception would keep the message in its traceback.
        """
        self._count += 1
        record = LogRecord(f"{self._record.id}.{self._count}", header=self._record.header)
        try:
            async with RequestContext(self._services, record, "grpc_stream") as context:
                with context.admit() as permit:
                    call = _start(context, message, permit, streamed=True)
                    del message
                with call:
                    while (answer := await call.next()) is not None:
                        response = service_pb2.ModelStreamInferResponse.FromString(answer)
                        response.infer_response.model_name = call.client_name
                        context.kserve_answered(response.infer_response)
                        await self._write(response.SerializeToString())
                        context.text_sent()
        except ApiError as error:
            return error.text
        except Exception:
            logger.exception("request %s failed in the gateway", record.id)
            return errors.failed().text
        return None

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            await _write(self._rpc, answer)


def _start(context: RequestContext, message: bytes, permit: Permit, streamed: bool) -> EngineCall:
    """Check a serialised `ModelInferRequest`, count it, and give it to an engine.

    Args:
        context: the request's context.
        message: the request.
        permit: the request's permit.
        streamed: whether several answers can be sent.

    Raises:
        ApiError: the request is wrong, or cannot be taken now.
    """
    request, raw, structure_bytes = messages.read_head(message)
    permit.charge(len(message) + (EXPANSION - 1) * structure_bytes)
    target = context.services.models.target(request.model_name, request.model_version, streamed)
    context.record.model = target.model
    contents = messages.check_request(request, raw, streamed)
    context.api_key.require_duration([output.name for output in request.outputs], target.segments)
    audio = messages.audio_of_tensors(request, contents) if context.services.target else None
    return context.start(EngineRequest(target, [message], streamed, audio=audio), permit)


def _handler(name: str, method: Method) -> grpc.RpcMethodHandler:
    """Return a method as gRPC's handler; errors become the call's status and are in the log."""

    async def handle(_messages: AsyncIterator[bytes], rpc: Rpc) -> None:
        record = LogRecord(header=dict(rpc.invocation_metadata() or ()).get)
        request_id = (("x-request-id", record.id),)
        rpc.set_trailing_metadata(request_id)
        try:
            await method(rpc, record)
            return
        except ApiError as failed:
            error = failed
        except Exception:
            logger.exception("call %s failed in the gateway", record.id)
            error = errors.failed()
        if not record.route:  # with a route, the request context has written the record
            record.route, record.outcome = name, errors.status_of(error)[1]
            record.write()
        status = error.status
        wait = (("retry-after", str(error.retry_after_s)),) if status.retryable else ()
        await rpc.abort(grpc.StatusCode[status.grpc], error.text, request_id + wait)

    return grpc.stream_stream_rpc_method_handler(handle)


async def _write(rpc: Rpc, answer: bytes) -> None:
    """Send an answer.

    Raises:
        ApiError: 504, the client does not take it.
    """
    try:
        async with asyncio.timeout(_WRITE_S):
            await rpc.write(answer)
    except TimeoutError:
        raise errors.no_answer_in_time(_WRITE_S) from None
