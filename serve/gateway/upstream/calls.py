"""KServe v2 over gRPC as a client, of raw bytes: requests, and small questions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from tritonclient.grpc import service_pb2

from serve.gateway import errors
from serve.gateway.errors import ApiError

FRAME_BYTES = 2**20
"""Most bytes of a message that gRPC reads or writes at a time."""
SERVICE = "/inference.GRPCInferenceService/"
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # most time that the handshake of a connection takes
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]

SMALL_S = 2.0  # most that health and metadata take
_LARGE_BYTES = 2**20  # from here on the time that it takes matters less than the memory
_ERROR_FIELD = b"\x0a"  # how a ModelStreamInferResponse with an error message begins


class Call:
    """A request in an engine's hands.

    Args:
        source: its answers, ModelStreamInferResponses.
        cancel: tells the engine that nobody waits for it.
        close: notes that the call is over.
    """

    def __init__(
        self,
        source: AsyncIterator[bytes],
        cancel: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._source = source
        self.cancel = cancel
        self.close = close

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield the answers; they are read to their end, whatever they say.

        Raises:
            ApiError: the request failed.
        """
        refusal: ApiError | None = None
        try:
            async for answer in self._source:
                if answer.startswith(_ERROR_FIELD):
                    message = service_pb2.ModelStreamInferResponse.FromString(answer)
                    refusal = errors.from_upstream("", message.error_message)
                elif refusal is None:
                    yield answer
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            refusal = refusal or errors.from_upstream(status, error.details() or "")
        if refusal is not None:
            raise refusal


class Channel:
    """A connection to a server, which comes back by itself.

    Args:
        channel: gRPC's.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        # The model is decoupled, and so answers by streams alone. On the wire a stream of one
        # message is the same as a message; as a stream it lets go of the message once it is sent.
        self._infer = channel.unary_unary(f"{SERVICE}ModelStreamInfer")
        self._stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")

    def send(self, message: bytes, streamed: bool) -> AsyncIterator[bytes]:
        """Send a request; return its answers.

        Args:
            message: a serialised `ModelInferRequest`.
            streamed: whether it may have several answers.
        """
        if not streamed and len(message) <= _LARGE_BYTES:
            return _at_once(self._infer(message))
        return _by_stream(self._stream(), message)

    async def small(self, method: str, message: bytes) -> bytes:
        """Ask a small question, and return the answer.

        Raises:
            ApiError: there is none.
        """
        ask = self._channel.unary_unary(SERVICE + method)
        try:
            return bytes(await ask(message, timeout=SMALL_S))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise errors.no_answer_in_time(SMALL_S) from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise errors.server_away() from None
            raise errors.from_upstream(error.code().name, error.details() or "") from None

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()


async def _at_once(call: grpc.aio.UnaryUnaryCall) -> AsyncIterator[bytes]:
    yield await call


async def _by_stream(call: grpc.aio.StreamStreamCall, message: bytes) -> AsyncIterator[bytes]:
    # The call may end before or while the message is sent: reading it says how.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
        await call.write(message)
        del message
        await call.done_writing()
    async for answer in call:
        yield answer
