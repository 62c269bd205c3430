"""KServe v2 over gRPC: the seven methods that clients need, the rest is refused.

Messages of tensors go through as the bytes that they are. Every method is handled as a stream,
which is the same on the wire: a stream's handler is entered before the first message is read, so
that a request can be refused before it has come in.
"""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from serve.gateway import errors
from serve.gateway.context import Services, Visit
from serve.gateway.errors import ApiError
from serve.gateway.kserve.grpc_stream import Context, Stream, authorization, metadata, write
from serve.gateway.limits import MAX_SMALL_BYTES, MAX_STRUCTURE_BYTES, Permit
from serve.gateway.observe.log import LogRecord
from serve.gateway.upstream.calls import FRAME_BYTES, SERVICE
from serve.gateway.upstream.exchange import Exchange

logger = logging.getLogger("earshot.gateway")

Method = Callable[[Context, LogRecord], Awaitable[None]]

MAX_CALLS = 512
"""Maximum of calls under way on one connection; a client's further calls wait in the client."""
# gRPC keeps the calls that no handler has taken yet in one queue, some 5 kB each. From so many on,
# by default 1,000, it ends new calls at random, and from twice as many on each: with CANCELLED.
_MAX_QUEUED = 10_000


def server_options(
    max_request_bytes: int, max_connections: int, shared: bool
) -> list[tuple[str, int]]:
    """Return the gRPC server's options; `shared`: others of the gateway have the same port."""
    return [
        ("grpc.max_receive_message_length", max_request_bytes + MAX_STRUCTURE_BYTES),
        ("grpc.max_send_message_length", -1),
        # By default a message comes in frames of 16 KiB, at first 64 KiB of it: with these, 10 s of
        # audio as WAV pass through in 1.2 ms rather than 2.6.
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", FRAME_BYTES),
        # Identity alone: a message's size would not tell what it becomes. gRPC refuses others.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", min(MAX_CALLS, max_connections)),
        ("grpc.server.max_pending_requests", _MAX_QUEUED),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_QUEUED),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
        # Calls that have begun go on; the next ones take a new connection, for which a client looks
        # anew who serves: so it finds servers that were added, and leaves those that drain.
        ("grpc.max_connection_age_ms", 300_000),
        ("grpc.so_reuseport", int(shared)),  # a second gateway must not share the port unnoticed
    ]


class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All that a client can call."""

    def __init__(self, door: Services) -> None:
        self._door = door
        methods = {
            "ServerLive": self._small(self._server_live),
            "ServerReady": self._small(self._server_ready),
            "ModelReady": self._small(self._model_ready),
            "ServerMetadata": self._small(self._server_metadata, needs_key=True),
            "ModelMetadata": self._small(self._model_metadata, needs_key=True),
        }
        methods["ModelInfer"] = self._infer
        methods["ModelStreamInfer"] = self._stream
        self._handlers = {
            SERVICE + name: _handler(name, method) for name, method in methods.items()
        }
        self._unknown = _handler("unknown", self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of a call; gRPC asks."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    async def _refuse(self, context: Context, line: LogRecord) -> None:
        names = ", ".join(sorted(path.removeprefix(SERVICE) for path in self._handlers))
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, f"this server offers {names} of {SERVICE.strip('/')}"
        )

    # ------------------------------------------------------------ transcripts

    async def _infer(self, context: Context, line: LogRecord) -> None:
        with self._door.account(line, "grpc", authorization(context)) as visit:
            with self._door.admission.admit(visit.account) as ticket:
                exchange = await self._begin(context, ticket, visit)
            with exchange:
                answer = await exchange.only_answer()
            visit.passed_on(answer)
            await write(context, answer.SerializeToString())

    async def _begin(self, context: Context, ticket: Permit, visit: Visit) -> Exchange:
        message = await self._door.uploads.receive(context, self._door.upload_timeout_s)
        if message is None:
            raise errors.invalid("the call ended without a message")
        return self._door.send(message, ticket, visit, streamed=False)

    async def _stream(self, context: Context, line: LogRecord) -> None:
        await Stream(self._door, context, line).run()

    # ------------------------------------------------------------ health and metadata

    def _small(self, answer: Callable[[bytes], Awaitable[Any]], needs_key: bool = False) -> Method:
        async def handle(context: Context, line: LogRecord) -> None:
            if needs_key:
                self._door.callers.identify(authorization(context))
            message = await self._door.uploads.receive(context, self._door.upload_timeout_s)
            if message is None or len(message) > MAX_SMALL_BYTES:
                raise errors.invalid(f"expected one message of at most {MAX_SMALL_BYTES} bytes")
            await write(context, (await answer(message)).SerializeToString())

        return handle

    async def _server_live(self, message: bytes) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    async def _server_ready(self, message: bytes) -> Any:
        ready = await self._door.ready()
        return service_pb2.ServerReadyResponse(ready=ready)

    async def _model_ready(self, message: bytes) -> Any:
        request = _parse(service_pb2.ModelReadyRequest, message)
        target = self._door.models.target(request.name, request.version)
        ready = await self._door.ready(target.model)
        return service_pb2.ModelReadyResponse(ready=ready)

    async def _server_metadata(self, message: bytes) -> Any:
        return await self._door.server_metadata()

    async def _model_metadata(self, message: bytes) -> Any:
        request = _parse(service_pb2.ModelMetadataRequest, message)
        return await self._door.model_metadata(request.name, request.version)


def _handler(name: str, method: Method) -> grpc.RpcMethodHandler:
    """Make a method as gRPC wants it; refusals become the call's status, and stand in the log."""

    async def handle(_messages: AsyncIterator[bytes], context: Context) -> None:
        line = LogRecord(header=functools.partial(metadata, context))
        context.set_trailing_metadata(_named(line))
        try:
            await method(context, line)
            context.set_trailing_metadata(_named(line))  # which has a trace by now
        except ApiError as refusal:
            line.outcome = line.outcome or refusal.reason
            await abort(context, refusal, line)
        except grpc.aio.AbortError:
            raise
        except Exception:
            logger.exception("call %s failed in the gateway", line.id)
            line.outcome = line.outcome or "internal"
            await abort(context, errors.failed(), line)
        finally:
            if line.outcome:
                line.route = line.route or name
                line.write()

    return grpc.stream_stream_rpc_method_handler(handle)


async def abort(context: Context, refusal: ApiError, line: LogRecord) -> None:
    """End a call with a refusal."""
    wait = (("retry-after", str(refusal.retry_after_s)),) if refusal.status.again else ()
    await context.abort(grpc.StatusCode[refusal.status.grpc], refusal.text, _named(line) + wait)


def _named(line: LogRecord) -> tuple[tuple[str, str], ...]:
    """Return metadata that name a call, as its line of the log does, and its trace."""
    return (("x-request-id", line.id), *line.spans.answer_headers().items())


def _parse(kind: Any, message: bytes) -> Any:
    """Parse a small message.

    Raises:
        ApiError: it is none of this kind.
    """
    try:
        return kind.FromString(message)
    except Exception as error:  # protobuf's DecodeError has no home that all its versions share
        raise errors.invalid(f"the message is no {kind.DESCRIPTOR.name} of KServe v2") from error
