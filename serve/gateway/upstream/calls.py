"""KServe v2 over gRPC as a client, of raw bytes: requests, and small questions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from serve.gateway import refusals
from serve.gateway.refusals import Refusal

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

Headers = tuple[tuple[str, str], ...]
NO_HEADERS: Mapping[str, str] = {}


class Call:
    """A request in a server's hands.

    Args:
        call: gRPC's, or a task that will make it.
        source: its answers, ModelStreamInferResponses.
        cancel: tells the server that nobody waits for it; None: the call's own cancel does.
        at_end: is called once the call is over.
    """

    def __init__(
        self,
        call: grpc.aio.Call | asyncio.Task[Any],
        source: AsyncIterator[bytes],
        cancel: Callable[[], None] | None = None,
        at_end: Callable[["Call"], None] = lambda _: None,
    ) -> None:
        self._call = call
        self._source = source
        self._cancel = cancel
        self._at_end = at_end
        self._ended: Refusal | None = None

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield the answers; they are read to their end, whatever they say.

        Raises:
            Refusal: the request failed.
        """
        refusal: Refusal | None = None
        try:
            async for answer in self._source:
                if answer.startswith(_ERROR_FIELD):
                    message = service_pb2.ModelStreamInferResponse.FromString(answer)
                    refusal = refusals.from_upstream("", message.error_message)
                elif refusal is None:
                    yield answer
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            refusal = refusal or refusals.from_upstream(status, error.details() or "")
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            refusal = self._ended
        if refusal is not None:
            raise refusal

    def cancel(self) -> None:
        """Tell the server that nobody waits any more."""
        if self._cancel is not None:
            self._cancel()
        else:
            self.end(refusals.client_gone())

    def end(self, refusal: Refusal) -> None:
        """Wait for it no longer; this is how it ended."""
        self._ended = refusal
        self._call.cancel()

    def close(self) -> None:
        """Note that it is over."""
        self._at_end(self)


class Channel:
    """A connection to a server, which comes back by itself.

    Args:
        channel: gRPC's.
        headers: sent with every call.
        infer: the method of requests with one answer.
    """

    def __init__(
        self, channel: grpc.aio.Channel, headers: Headers = (), infer: str = "ModelInfer"
    ) -> None:
        self._channel = channel
        self._headers = headers
        # Whichever method it is, on the wire a stream of one message is the same as a message.
        self._infer = channel.unary_unary(SERVICE + infer)
        # The same call, which lets go of the message once it is sent.
        self._infer_large = channel.stream_stream(SERVICE + infer)
        self._stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")

    def send(
        self,
        message: bytes | Callable[[], bytes],
        streamed: bool,
        more: Mapping[str, str] = NO_HEADERS,
    ) -> tuple[grpc.aio.Call, AsyncIterator[bytes]]:
        """Send a request; the call, and its answers.

        Args:
            message: a serialised `ModelInferRequest`, or what makes it in a thread of its own.
            streamed: whether it may have several answers.
            more: headers of this request.
        """
        headers = (*self._headers, *more.items())
        if streamed:
            call = self._stream(metadata=headers)
        elif isinstance(message, bytes) and len(message) <= _LARGE_BYTES:
            unary = self._infer(message, metadata=headers)
            return unary, _at_once(unary)
        else:
            call = self._infer_large(metadata=headers)
        return call, _by_stream(call, message)

    async def small(self, method: str, message: bytes) -> bytes:
        """Ask a small question, and return the answer.

        Raises:
            Refusal: there is none.
        """
        ask = self._channel.unary_unary(SERVICE + method)
        try:
            return bytes(await ask(message, timeout=SMALL_S, metadata=self._headers))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise refusals.no_answer_in_time(SMALL_S) from None
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise refusals.server_away() from None
            raise refusals.from_upstream(error.code().name, error.details() or "") from None

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()


async def _at_once(call: grpc.aio.UnaryUnaryCall) -> AsyncIterator[bytes]:
    yield await call


async def _by_stream(
    call: grpc.aio.StreamStreamCall, message: bytes | Callable[[], bytes]
) -> AsyncIterator[bytes]:
    if not isinstance(message, bytes):
        message = await asyncio.to_thread(message)
    # The call may end before or while the message is sent: reading it says how.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
        await call.write(message)
        del message
        await call.done_writing()
    async for answer in call:
        yield answer
