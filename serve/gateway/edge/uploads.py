"""Uploads: HTTP bodies and gRPC messages within limits of time and memory, and departed clients.

gRPC tells the size of a message only once it is whole. Until then the kernel tells how many bytes
have come in over its connection (TCP_INFO). If all requests in flight would take too much memory,
the newest of the large uploads are evicted.

The memory of large requests goes back to the system once they are gone. The traceback of a rejected
request is part of a reference cycle, and holds the message. Python looks for cycles by the number
of objects, not by their size, and the C library keeps freed memory. Measured with 40 messages of
115 MB at once and a limit of 400 MiB in flight: the process took 1,800 to 3,400 MiB without this,
and kept most of the memory.
"""

import asyncio
import ctypes
import dataclasses
import gc
import os
import socket
import struct
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import grpc
from starlette.requests import ClientDisconnect, Request

from serve.contract.codec import parse_json
from serve.contract.errors import shown
from serve.gateway import errors
from serve.gateway.background import Background, unless
from serve.gateway.errors import ApiError
from serve.gateway.limits import LARGE_BYTES, Admission, Permit, Upload, check_json

_TICK_S = 0.05
_TICKS_TO_TRIM = 5
_GLIBC = ctypes.CDLL(None)  # which tritonserver needs
_M_MMAP_THRESHOLD = -3  # numbers of glibc's malloc.h
_M_ARENA_MAX = -8
_ARENAS = 2
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
_COUNTER = struct.Struct("@Q")

T = TypeVar("T")


async def body_chunks(
    request: Request, permit: Permit, check: Callable[[int], object] = int
) -> AsyncGenerator[bytes, None]:
    """Yield a request's body as it comes, and reject it as soon as it is known to be too large.

    Args:
        request: a request with an unread body.
        permit: is charged with the declared size at first, and with bytes beyond it.
        check: gets a lower bound of the body's size; may raise an ApiError.

    Raises:
        ApiError: 413, 415 or 429.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise errors.media_type("the body has a Content-Encoding; send it as it is")
    charged = int(request.headers.get("content-length", 0))
    check(charged)
    permit.charge(charged)
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > charged:  # it was not declared
            check(received)
            permit.charge(received - charged)
            charged = received
        yield chunk


async def in_time(admission: Admission, reading: Awaitable[T]) -> T:
    """Await the reading of a body, within the limits of time.

    Raises:
        ApiError: 408, it takes too long; 499, the client has gone; 503, the server stops; or the
            error of the reading.
    """
    limit_s = admission.upload_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await unless(admission.drain_over.wait(), errors.stopping, reading)
    except TimeoutError:
        raise _too_slow(limit_s) from None
    except ClientDisconnect:
        raise errors.client_gone() from None


async def whole_body(request: Request, permit: Permit, check: Callable[[int], object]) -> bytes:
    """Return a request's body; see `body_chunks` and `in_time`."""

    async def read() -> bytes:
        return b"".join([chunk async for chunk in body_chunks(request, permit, check)])

    return await in_time(permit.admission, read())


async def small_body(request: Request, permit: Permit, max_bytes: int, name: str) -> bytes:
    """Return a request's body; see `whole_body`.

    Args:
        request: a request with an unread body.
        permit: is charged with the bytes.
        max_bytes: the body's maximum size.
        name: the body's name in errors.
    """

    def check(size: int) -> None:
        if size > max_bytes:
            raise errors.too_large(f"{name} has {size} bytes; expected at most {max_bytes}")

    return await whole_body(request, permit, check)


async def json_object(
    request: Request, permit: Permit, max_bytes: int, name: str
) -> Mapping[str, Any]:
    """Return a request's body as a JSON object, empty if the body is; see `small_body`.

    Raises:
        ApiError: see `small_body`; 400, the body is no JSON object.
    """
    text = await small_body(request, permit, max_bytes, name)
    check_json(text, name)
    try:
        value = parse_json(text or b"{}")
    except ValueError as error:
        raise errors.invalid(f"{name} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise errors.invalid(f"{name} is {shown(value)}; expected a JSON object")
    return value


async def while_client_waits(request: Request, answer: Awaitable[T]) -> T:
    """Wait for an answer as long as the client does.

    Raises:
        ApiError: 499, the client has disconnected; or the error of the answer.
    """
    return await unless(_disconnect(request), errors.client_gone, answer)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_slow(limit_s: float) -> ApiError:
    message = f"the request was incomplete after {limit_s:g} s (server.upload_timeout_s)"
    return errors.overloaded(message, "slow_upload")


@dataclasses.dataclass
class _ConnectionUploads:
    """The bytes of a connection that belong to incomplete messages."""

    begin: int  # bytes of the connection before them
    bytes: int = 0


class Uploads(Background):
    """Receives gRPC messages, and measures the incomplete ones as long as it is started.

    Args:
        admission: limits the bytes in flight, and counts bytes of incomplete messages.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._peers = TcpPeers()
        self.connections: dict[str, _ConnectionUploads] = {}

    async def receive(
        self,
        context: Any,
        timeout_s: float | None = None,
        is_needed: Callable[[], bool] = lambda: False,
    ) -> bytes | None:
        """Receive the next message of a call; None: there is no further one.

        Args:
            context: the call's context of gRPC.
            timeout_s: the limit of time; None: the limit of uploads.
            is_needed: whether the call must not be evicted, for it has other requests.

        Raises:
            ApiError: 408 or 429, it took too long, or there is no room for it.
        """
        timeout_s = self._admission.upload_timeout_s if timeout_s is None else timeout_s
        limit = asyncio.timeout(timeout_s)
        upload = Upload(context.peer(), asyncio.get_running_loop().time(), limit, is_needed)
        self._admission.uploads[upload] = None
        try:
            async with limit:
                message = await context.read()
        except TimeoutError:
            raise upload.error or _too_slow(timeout_s) from None
        finally:
            del self._admission.uploads[upload]
        if message is grpc.aio.EOF:
            return None
        self._admission.trim_due |= len(message) >= LARGE_BYTES
        connection = self.connections.get(upload.peer)
        if connection is not None:
            connection.begin += len(message)  # counted as a request from now on
            connection.bytes = max(0, connection.bytes - len(message))
            self._count()
        return bytes(message)

    def _count(self) -> None:
        self._admission.uploading_bytes = sum(one.bytes for one in self.connections.values())

    async def _run(self) -> None:
        while True:
            for _ in range(_TICKS_TO_TRIM):
                await asyncio.sleep(_TICK_S)
                self.measure(asyncio.get_running_loop().time() - _TICK_S)
            if self._admission.trim_due:
                self._admission.trim_due = False
                trim_memory()

    def measure(self, before_s: float) -> None:
        """Measure the uploads that began before then, and evict the newest if need be."""
        old = [one for one in self._admission.uploads if one.since_s <= before_s and not one.error]
        peers = {upload.peer for upload in old}
        received = self._peers.received(peers) if peers else {}
        for closed in self.connections.keys() - received.keys():
            del self.connections[closed]
        for peer, count in received.items():
            connection = self.connections.setdefault(peer, _ConnectionUploads(count))
            connection.bytes = count - connection.begin
            if connection.bytes < 0:  # headers and the like, which no message counts
                connection.begin, connection.bytes = count, 0
        self._count()
        self._evict_newest(old)

    def _evict_newest(self, uploads: list[Upload]) -> None:
        admission = self._admission
        for upload in reversed(uploads):
            if admission.bytes + admission.uploading_bytes <= admission.max_bytes:
                return
            connection = self.connections.get(upload.peer)
            if connection is None or connection.bytes < LARGE_BYTES:
                continue
            # gRPC does not tell which message of a connection has how much: each has its share.
            sharing = sum(other.peer == upload.peer for other in uploads if other.error is None)
            share = connection.bytes // sharing
            connection.begin += share
            connection.bytes -= share
            self._count()
            admission.trim_due = True
            message = "the uploads in progress exceed server.max_inflight_mb; try again later"
            upload.evict(errors.overloaded(message, "bytes"))


class TcpPeers:
    """This process's TCP connections by their peers, as gRPC writes them: ipv4:127.0.0.1:80."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def received(self, peers: Iterable[str]) -> dict[str, int]:
        """Return the bytes that have come in over each of these connections since it began."""
        counts = self._counts(peers)
        if set(peers) - counts.keys():
            descriptors = map(int, os.listdir("/proc/self/fd"))
            self._descriptors = {_peer_and_bytes(number)[0]: number for number in descriptors}
            counts = self._counts(peers)
        return counts

    def _counts(self, peers: Iterable[str]) -> dict[str, int]:
        known = [self._descriptors[peer] for peer in peers if peer in self._descriptors]
        counts = dict(map(_peer_and_bytes, known))  # a descriptor may be another connection's now
        return {peer: counts[peer] for peer in peers if peer in counts}


def _peer_and_bytes(descriptor: int) -> tuple[str, int]:
    """Return a TCP connection's peer and received bytes; ("", 0): it is no such connection."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return "", 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (count,) = _COUNTER.unpack_from(info, _BYTES_RECEIVED)
        host, port = connection.getpeername()[:2]
    except (OSError, struct.error):  # no TCP, or not connected
        return "", 0
    finally:
        connection.detach()  # gRPC closes it
    if ":" in (host := host.removeprefix("::ffff:")):
        return f"ipv6:{urllib.parse.quote(f'[{host}]', safe=':')}:{port}", count
    return f"ipv4:{host}:{port}", count


def prepare_memory() -> None:
    """Have malloc return large blocks when they are freed; objects of now, the start, stay."""
    _GLIBC.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    _GLIBC.mallopt(_M_ARENA_MAX, _ARENAS)
    gc.freeze()


def trim_memory() -> None:
    """Free reference cycles, and return free memory to the system."""
    gc.collect()
    _GLIBC.malloc_trim(0)
