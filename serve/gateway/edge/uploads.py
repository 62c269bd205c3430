"""Requests on their way in, bodies of HTTP and messages of gRPC: how long they may take, how much
memory; and whether an HTTP client still waits for the answer.

gRPC says how large a message is only once it is whole. Until then the kernel is asked how many
bytes have come in over its connection (TCP_INFO), and where all that is under way would take too
much memory, the newest of the large uploads are given up.
"""

import asyncio
import dataclasses
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
from serve.gateway.background import Background
from serve.gateway.edge import memory
from serve.gateway.errors import ApiError
from serve.gateway.limits import Admission, Permit, check_json

_TICK_S = 0.05
_TICKS_TO_TIDY = 5
PATIENCE_S = 5.0  # an upload may take so long before another may have its place
LARGE_BYTES = memory.LARGE_BYTES  # smaller ones are not worth giving up
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
_COUNTER = struct.Struct("@Q")

T = TypeVar("T")

Received = Callable[[Iterable[str]], Mapping[str, int]]
"""For the peers of connections: the bytes that have come in over each since it began."""


async def body_chunks(
    request: Request, ticket: Permit, limit_s: float, check: Callable[[int], object] = int
) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes; refuse it as soon as it is known to be too large.

    Args:
        request: whose body has not been read.
        ticket: is charged with what is declared at first, and with what comes beyond it.
        limit_s: how long all of it may take.
        check: may refuse a body of so many bytes or more.

    Raises:
        ApiError: it is too large, too slow, or the client has gone.
    """
    known = int(request.headers.get("content-length", 0))
    check(known)
    ticket.charge(known)
    stream, received = request.stream(), 0
    end_s = asyncio.get_running_loop().time() + limit_s
    while True:
        try:  # not around the yield, where the time is another's
            async with asyncio.timeout_at(end_s) as limit:
                with ticket.arriving(limit):
                    chunk = await anext(stream, None)
        except TimeoutError:
            if asyncio.get_running_loop().time() < end_s:  # the server stops
                raise errors.stopping() from None
            raise _too_slow(limit_s) from None
        except ClientDisconnect:
            raise errors.client_gone() from None
        if chunk is None:
            return
        received += len(chunk)
        if received > known:  # it was not declared
            check(received)
            ticket.charge(received - known)
            known = received
        yield chunk


async def small_body(
    request: Request, permit: Permit, limit_s: float, max_bytes: int, name: str
) -> bytes:
    """Receive a body as a whole.

    Args:
        request: the request, whose body has not been read.
        permit: charged with the bytes.
        limit_s: seconds that all of it may take.
        max_bytes: most bytes that it may have.
        name: the body's name in errors.

    Raises:
        ApiError: it is too large, too slow, or the client has gone.
    """

    def check(size: int) -> None:
        if size > max_bytes:
            raise errors.too_large(f"{name} has {size} bytes; expected at most {max_bytes}")

    chunks = body_chunks(request, permit, limit_s, check)
    return b"".join([chunk async for chunk in chunks])


async def json_object(
    request: Request,
    permit: Permit,
    limit_s: float,
    max_bytes: int,
    name: str,
    empty: bytes = b"",
) -> Mapping[str, Any]:
    """Receive a body that is a JSON object; see `small_body`.

    Args:
        empty: the JSON for which an empty body stands.

    Raises:
        ApiError: as of `small_body`, or it is no JSON object.
    """
    text = await small_body(request, permit, limit_s, max_bytes, name)
    check_json(text, name)
    try:
        found = parse_json(text or empty)
    except ValueError as error:
        raise errors.invalid(f"{name} is not JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise errors.invalid(f"{name} is {shown(found)}; expected a JSON object")
    return found


async def while_client_waits(request: Request, answer: Awaitable[T]) -> T:
    """Wait for an answer as long as its client does.

    Raises:
        ApiError: the client went first, or the request failed.
    """
    answered = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise errors.client_gone()
        return answered.result()
    finally:
        for task in (answered, gone):
            task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_slow(limit_s: float) -> ApiError:
    return errors.overloaded(
        f"the request was not whole after {limit_s:g} s (server.upload_timeout_s)", "slow_upload"
    )


@dataclasses.dataclass(eq=False)
class _Upload:
    peer: str
    since_s: float
    limit: asyncio.Timeout
    needed: Callable[[], bool]
    refusal: ApiError | None = None

    def give_up(self, refusal: ApiError) -> None:
        if self.refusal is None and not self.limit.expired():
            self.refusal = refusal
            self.limit.reschedule(0)


@dataclasses.dataclass
class _Connection:
    """A connection's bytes of uploads, beyond messages that are whole."""

    begin: int
    bytes: int = 0


class Uploads(Background):
    """The messages that are not whole yet, measured as long as it is started.

    Args:
        admission: says how much room there is, and is told what uploads take of it.
        received: asks the kernel.
    """

    def __init__(self, admission: Admission, received: "Received | None" = None) -> None:
        self._admission = admission
        self._received = received or Sockets().received
        self._uploads: dict[_Upload, None] = {}  # oldest first
        self.connections: dict[str, _Connection] = {}
        admission.uploading_bytes = self._total
        admission.make_room = self._make_room

    async def receive(
        self, context: Any, timeout_s: float, needed: Callable[[], bool] = lambda: False
    ) -> bytes | None:
        """Receive the next message of a call; None: there is no further one.

        Args:
            context: of the call.
            timeout_s: how long it may take.
            needed: whether the call must not lose its place, as it waits for answers, too.

        Raises:
            ApiError: it took too long, or there is no room for it.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(timeout_s)
        upload = _Upload(context.peer(), loop.time(), limit, needed)
        self._uploads[upload] = None
        try:
            async with limit:
                message = await context.read()
        except TimeoutError:
            raise upload.refusal or _too_slow(timeout_s) from None
        finally:
            del self._uploads[upload]
        if message is grpc.aio.EOF:
            return None
        self._admission.untidy |= len(message) >= memory.LARGE_BYTES
        connection = self.connections.get(upload.peer)
        if connection is not None:
            connection.begin += len(message)  # counted as a request from now on
            connection.bytes = max(0, connection.bytes - len(message))
        return bytes(message)

    def end_all(self, refusal: ApiError) -> None:
        """Give up whatever is not whole."""
        for upload in self._uploads:
            upload.give_up(refusal)

    def _make_room(self) -> bool:
        oldest = next(
            (upload for upload in self._uploads if upload.refusal is None and not upload.needed()),
            None,
        )
        if oldest is None:
            return False
        waited_s = asyncio.get_running_loop().time() - oldest.since_s
        if waited_s < PATIENCE_S:
            return False
        oldest.give_up(
            errors.overloaded(
                f"the request was not whole after {waited_s:.0f} s and others wait; try again",
                "slow_upload",
            )
        )
        return True

    def _total(self) -> int:
        return sum(connection.bytes for connection in self.connections.values())

    async def _run(self) -> None:
        while True:
            for _ in range(_TICKS_TO_TIDY):
                await asyncio.sleep(_TICK_S)
                self.measure(asyncio.get_running_loop().time() - _TICK_S)
            if self._admission.untidy:
                self._admission.untidy = False
                memory.give_back()

    def measure(self, before_s: float) -> None:
        """Look at the uploads that began before then, and give up the newest if need be."""
        old = [
            upload
            for upload in self._uploads
            if upload.since_s <= before_s and upload.refusal is None
        ]
        peers = {upload.peer for upload in old}
        received = self._received(peers) if peers else {}
        for gone in self.connections.keys() - received.keys():
            del self.connections[gone]
        for peer, count in received.items():
            connection = self.connections.setdefault(peer, _Connection(count))
            connection.bytes = count - connection.begin
            if connection.bytes < 0:  # headers and the like, which no message counts
                connection.begin, connection.bytes = count, 0
        self._give_up_newest(old)

    def _give_up_newest(self, uploads: list[_Upload]) -> None:
        for upload in reversed(uploads):
            surplus = self._admission.bytes + self._total() - self._admission.max_bytes
            connection = self.connections.get(upload.peer)
            if surplus <= 0:
                return
            if connection is None or connection.bytes < LARGE_BYTES:
                continue
            # gRPC does not say which message of a connection has how much: each has its share.
            sharing = sum(other.peer == upload.peer for other in uploads if other.refusal is None)
            share = connection.bytes // sharing
            connection.begin += share
            connection.bytes -= share
            self._admission.untidy = True
            upload.give_up(
                errors.overloaded(
                    "more is being sent than there is room for (server.max_inflight_mb); "
                    "try again later",
                    "bytes",
                )
            )


class Sockets:
    """This process's TCP connections by their peers, as gRPC writes them: ipv4:127.0.0.1:80."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def received(self, peers: Iterable[str]) -> dict[str, int]:
        """Count the bytes that have come in over each of these connections; see `Received`."""
        wanted = set(peers)
        counts = self._look(wanted)
        if wanted - counts.keys():
            self._descriptors = _descriptors()
            counts = self._look(wanted)
        return counts

    def _look(self, peers: set[str]) -> dict[str, int]:
        counts = {}
        for peer in peers:
            looked = _look(self._descriptors.get(peer))
            if looked is not None and looked[0] == peer:
                counts[peer] = looked[1]
        return counts


def _descriptors() -> dict[str, int]:
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        looked = _look(int(name))
        if looked is not None:
            descriptors[looked[0]] = int(name)
    return descriptors


def _look(descriptor: int | None) -> tuple[str, int] | None:
    """Return a TCP connection's peer and received bytes; None: it is none, or has gone."""
    if descriptor is None:
        return None
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.type != socket.SOCK_STREAM
        ):
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (count,) = _COUNTER.unpack_from(info, _BYTES_RECEIVED)
        return _peer(connection), count
    except (OSError, struct.error):
        return None
    finally:
        connection.detach()  # it is gRPC's, not ours to close


def _peer(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    if connection.family == socket.AF_INET:
        return f"ipv4:{host}:{port}"
    if host.startswith("::ffff:"):
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:{urllib.parse.quote(f'[{host}]', safe=':')}:{port}"
