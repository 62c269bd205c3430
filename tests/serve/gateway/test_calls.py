"""A call to a server that ends while its message is on the way."""

import asyncio

import grpc
import pytest

from serve.contract.errors import UnavailableError
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import Call, Channel

LARGE = bytes(2**20 + 1)


class LostCall:
    """gRPC's call to a server that was killed while it took the message."""

    def __init__(self, lost_at: str, error: Exception) -> None:
        self._lost = {lost_at: error}

    async def write(self, message: bytes) -> None:
        self._raise("write")

    async def done_writing(self) -> None:
        self._raise("done_writing")

    async def __aiter__(self):
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "Socket closed")
        yield b""

    def _raise(self, where: str) -> None:
        if where in self._lost:
            raise self._lost[where]


class LosingChannel:
    """gRPC's channel to that server."""

    def __init__(self, call: LostCall) -> None:
        self._call = call

    def unary_unary(self, method: str):
        return None

    def stream_stream(self, method: str):
        return lambda metadata: self._call


@pytest.mark.parametrize(
    ("lost_at", "error"),
    [
        ("write", asyncio.InvalidStateError("RPC already finished.")),
        ("done_writing", grpc.aio.InternalError("Failed execute_batch")),
    ],
)
def test_a_server_lost_while_it_takes_a_large_request_is_away(lost_at, error):
    """What gRPC raises of its own where a message meets the call's end hides how it ended."""

    async def ask() -> None:
        call, answers = Channel(LosingChannel(LostCall(lost_at, error))).send(LARGE, False)
        async for _ in Call(call, answers).answers():
            pass

    with pytest.raises(Refusal) as refusal:
        asyncio.run(ask())
    assert type(refusal.value.error) is UnavailableError
