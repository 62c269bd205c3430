"""Limits of what is under way at once: requests and their bytes, from arrival to answer.

A request is refused as early as it can be: before its body is read where its size is declared, as
soon as it grows too large where it is not. What was refused is not waited for.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Self

from serve.contract.server_config import LiveConfig, ServerConfig
from serve.gateway import refusals
from serve.gateway.memory import LARGE_BYTES

MAX_STRUCTURE_BYTES = 2**20
"""Most bytes of a gRPC request outside its raw tensors."""
MAX_JSON_BYTES = 2**24
"""Most bytes of an HTTP request's JSON."""
EXPANSION = 16
"""So many times its size a request's structure may take in memory, and so is it counted.

A byte of protobuf can become an empty string of 40 bytes, four of JSON a number of 32."""
MAX_NUMBERS = 2**20
"""Most commas of an HTTP request's JSON, or about its numbers: a minute of audio."""
MAX_MARKS = 2**16
"""Most quotation marks and opening brackets of it, of either kind."""
MAX_SMALL_BYTES = 2**16
"""Most bytes of a request that asks for health or metadata."""
_MIB = 2**20


def check_json(text: bytes, what: str) -> None:
    """Count what a JSON is made of before it is read, which takes far longer.

    Texts in it count with all that they hold.

    Args:
        text: the JSON.
        what: it is; begins the sentence of the refusal.

    Raises:
        Refusal: it has too much.
    """
    numbers = text.count(b",")
    marks = text.count(b'"') + text.count(b"{") + text.count(b"[")
    if numbers > MAX_NUMBERS or marks > MAX_MARKS:
        raise refusals.invalid(
            f"{what} has {numbers} commas and {marks} quotation marks and brackets; expected at "
            f"most {MAX_NUMBERS} and {MAX_MARKS}: send tensors as binary data, or over gRPC"
        )


class Account:
    """One key's requests under way, and the most of them.

    Args:
        name: the key's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests = self.streams = self.bytes = 0
        self.max_requests = self.max_streams = self.max_bytes = math.inf

    def require_request(self) -> None:
        """Refuse one more request where there are enough.

        Raises:
            Refusal: there are.
        """
        if self.requests >= self.max_requests:
            raise refusals.key_limit("requests_at_once", self.name)

    def require_room(self, more: int) -> None:
        """Refuse so many bytes more where that is too much.

        Raises:
            Refusal: it is.
        """
        if self.bytes + more > self.max_bytes:
            raise refusals.key_limit("share of server.max_inflight_mb", self.name)


class Ticket:
    """One request's share of what may be under way; `Admission.admit` makes them."""

    def __init__(self, admission: "Admission", account: Account) -> None:
        self._admission = admission
        self._account = account
        self._bytes = 0
        self._open = True
        account.requests += 1

    @property
    def key(self) -> str:
        """The name of its key."""
        return self._account.name

    def charge(self, size: int) -> None:
        """Count so many bytes more.

        Raises:
            Refusal: the request, or all of them together, would be too large.
        """
        self._admission.require_room(self._bytes + size, size)
        self._account.require_room(size)
        self._bytes += size
        self._account.bytes += size
        self._admission.bytes += size

    def arriving(self, limit: asyncio.Timeout) -> contextlib.AbstractContextManager[None]:
        """See `Admission.arriving`."""
        return self._admission.arriving(limit)

    def part(self) -> "Ticket":
        """Open a ticket in the name of this one, which is let in already: it is counted as well."""
        return self._admission.let_in(self._account)

    def __enter__(self) -> Self:
        """Return the ticket."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it, if the block has failed; else whoever was given it does."""
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Note that the request has ended; may be called again."""
        if self._open:
            self._open = False
            self._account.requests -= 1
            self._account.bytes -= self._bytes
            self._admission.release(self._bytes)


class Unfinished:
    """The bytes of a connection that are no request yet.

    Args:
        admission: counts them.
    """

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._bytes = 0

    def set(self, size: int) -> None:
        """Note that there are so many now.

        Raises:
            Refusal: these, or all that is under way together, are too many.
        """
        if size > self._bytes:
            self._admission.require_room(size, size - self._bytes)
        self._admission.untidy |= self._bytes - size >= LARGE_BYTES
        self._admission.bytes += size - self._bytes
        self._bytes = size

    def close(self) -> None:
        """Note that the connection is lost."""
        self.set(0)


class Admission:
    """The account of what is under way. For one event loop."""

    def __init__(self, server: ServerConfig) -> None:
        self.max_request_bytes = server.max_request_mb * _MIB
        self.max_bytes = server.max_inflight_mb * _MIB
        self.max_requests = server.max_inflight
        self.requests = 0
        self.bytes = 0
        self.uploading_bytes: Callable[[], int] = lambda: 0
        """Of messages that are not whole yet, in whose size `bytes` has no part."""
        self.make_room: Callable[[], bool] = lambda: False
        """Gives up the slowest upload, and says whether there was one."""
        self.untidy = False
        """Something large has gone, whose memory is to be given back."""
        self._arriving: set[asyncio.Timeout] = set()
        self._draining = self._over = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def draining(self) -> bool:
        """Tell whether no request is taken any more."""
        return self._draining

    def admit(self, account: Account) -> Ticket:
        """Let a request of this key in, whose bytes are yet to come.

        Raises:
            Refusal: the server drains, or too many are under way.
        """
        if self._draining:
            raise refusals.stopping()
        account.require_request()
        if self.requests >= self.max_requests and not self.make_room():
            raise refusals.overloaded(
                f"{self.requests} requests are under way, as many as may be "
                "(server.max_inflight); try again later",
                "requests",
            )
        if self.bytes + self.uploading_bytes() >= self.max_bytes:
            raise self._full()
        return self.let_in(account)

    def let_in(self, account: Account) -> Ticket:
        """Let a request in without asking whether it may come."""
        self.requests += 1
        self._empty.clear()
        return Ticket(self, account)

    def require_room(self, request_bytes: int, more: int) -> None:
        """Refuse a request of so many bytes, `more` of which are not counted yet.

        Raises:
            Refusal: it, or all of them together, would be too large.
        """
        if request_bytes > self.max_request_bytes:
            raise refusals.too_large(
                f"the request has {request_bytes} bytes or more; expected at most "
                f"{self.max_request_bytes} (server.max_request_mb)"
            )
        if self.bytes + self.uploading_bytes() + more > self.max_bytes:
            raise self._full()

    def release(self, size: int) -> None:
        """Note that a request of so many bytes has ended."""
        self.requests -= 1
        self.bytes -= size
        self.untidy |= size >= LARGE_BYTES
        if not self.requests:
            self._empty.set()

    @contextlib.contextmanager
    def sending(self, account: Account, size: int) -> Iterator[None]:
        """Count so many bytes of an answer as this key's for the length of a `with` block.

        Raises:
            Refusal: there is no room for them.
        """
        self.require_room(0, size)
        account.require_room(size)
        account.bytes += size
        self.bytes += size
        try:
            yield
        finally:
            account.bytes -= size
            self.bytes -= size
            self.untidy |= size >= LARGE_BYTES

    def start_draining(self) -> None:
        """Refuse what comes from now on."""
        self._draining = True

    @contextlib.contextmanager
    def arriving(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let `end_arrivals` end a wait for a part of a body, for the length of a `with` block.

        Args:
            limit: of the wait, which has begun.

        Raises:
            Refusal: that has been called.
        """
        if self._over:
            raise refusals.stopping()
        self._arriving.add(limit)
        try:
            yield
        finally:
            self._arriving.discard(limit)

    def end_arrivals(self) -> None:
        """Refuse every body that is not whole: the drain's time is over."""
        self._over = True
        for limit in self._arriving:
            limit.reschedule(0.0)

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait so many seconds for all that was let in to end, and tell whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _full(self) -> refusals.Refusal:
        return refusals.overloaded(
            f"requests of {(self.bytes + self.uploading_bytes()) // _MIB} MiB are under way, of "
            f"{self.max_bytes // _MIB} (server.max_inflight_mb); try again later",
            "bytes",
        )


class Streams:
    """The live streams of a gateway. For one event loop."""

    def __init__(self, config: LiveConfig) -> None:
        self._most = config.max_streams
        self._ends: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        """Count them."""
        return len(self._ends)

    @contextlib.contextmanager
    def one_more(self, account: Account, end: Callable[[], None]) -> Iterator[None]:
        """Count a stream of this key for the length of a `with` block.

        Args:
            account: the key's.
            end: is called when the stream is to end itself.

        Raises:
            Refusal: there are as many as may be.
        """
        if account.streams >= account.max_streams:
            raise refusals.key_limit("live_streams", account.name)
        if len(self) >= self._most:
            raise refusals.overloaded(
                f"{len(self)} live streams are open, as many as may be (live.max_streams); try "
                "again later",
                "streams",
            )
        self._ends.add(end)
        account.streams += 1
        try:
            yield
        finally:
            self._ends.remove(end)
            account.streams -= 1

    def end_all(self) -> None:
        """Ask every one to end itself."""
        for end in list(self._ends):
            end()
