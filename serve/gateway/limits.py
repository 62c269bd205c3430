"""Admission control: the limits of requests, bytes and live streams in flight.

A request is rejected as early as possible. If its size is declared, that is before its body is
read; otherwise it is when the body exceeds the limit.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Self

from serve.contract.server_config import LiveConfig, ServerConfig
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey

MAX_STRUCTURE_BYTES = 2**20
"""Maximum bytes of a gRPC request outside its raw tensors."""
MAX_JSON_BYTES = 2**24
"""Maximum bytes of the JSON of an HTTP request."""
EXPANSION = 16
"""Memory of a parsed request relative to its serialised size; it is charged with this factor.

A byte of protobuf can become an empty string of 40 bytes, four of JSON a number of 32."""
MAX_NUMBERS = 2**20
"""Maximum commas of a request's JSON, about its numbers: a minute of audio."""
MAX_MARKS = 2**16
"""Maximum quotation marks and opening brackets ("{" and "[") in a request's JSON."""
MAX_SMALL_BYTES = 2**16
"""Maximum bytes of a request for health or metadata."""
LARGE_BYTES = 2**20
"""Size from which memory is returned to the system and an upload is worth evicting."""
PATIENCE_S = 5.0
"""Age from which an upload may be evicted for a waiting request."""
_MIB = 2**20


def check_json(text: bytes, name: str) -> None:
    """Count the elements of a JSON text before it is parsed, which takes far longer.

    Elements inside of strings count too.

    Args:
        text: the JSON.
        name: the JSON's name in errors.

    Raises:
        ApiError: 400, there are too many.
    """
    numbers = text.count(b",")
    marks = text.count(b'"') + text.count(b"{") + text.count(b"[")
    if numbers > MAX_NUMBERS or marks > MAX_MARKS:
        found = f"{name} has {numbers} commas and {marks} quotation marks and brackets"
        advice = "send tensors as binary data, or over gRPC"
        raise errors.invalid(f"{found}; expected at most {MAX_NUMBERS} and {MAX_MARKS}: {advice}")


class Permit:
    """The admission of one request and its bytes, until every holder has released it.

    `Admission.admit` makes permits. A `with` block is a holder, and an engine call is another.
    """

    def __init__(self, admission: "Admission", api_key: ApiKey) -> None:
        self.admission = admission
        self.api_key = api_key
        self._bytes = 0
        self._holders = 1
        api_key.requests += 1

    def charge(self, size: int) -> None:
        """Count bytes of the request.

        Raises:
            ApiError: 413, 429 or 503, the request or all requests together exceed a limit.
        """
        self.admission.require_room(self._bytes + size, size)
        self.api_key.require_room(size)
        self._bytes += size
        self.api_key.bytes += size
        self.admission.bytes += size

    def child(self) -> "Permit":
        """Return a permit for a request within this one; it counts, and no limit rejects it."""
        return self.admission.admit_unchecked(self.api_key)

    def hold(self) -> None:
        """Add a holder, which has to release the permit, too."""
        self._holders += 1

    def release(self) -> None:
        """Release the permit for one holder."""
        self._holders -= 1
        if not self._holders:
            self.api_key.requests -= 1
            self.api_key.bytes -= self._bytes
            self.admission.release(self._bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclasses.dataclass(eq=False)
class Upload:
    """A gRPC message that is being received; `serve.gateway.edge.uploads` measures them."""

    peer: str  # the connection's, as gRPC writes it
    since_s: float
    limit: asyncio.Timeout  # ends the wait for the message
    is_needed: Callable[[], bool]  # whether the call must stay, for it has other requests
    error: ApiError | None = None  # why the upload was evicted

    def evict(self, error: ApiError) -> None:
        """End the upload with an error, unless it has ended."""
        if self.error is None and not self.limit.expired():
            self.error = error
            self.limit.reschedule(0)


class Admission:
    """Admits requests within the limits of the server and the API keys. For one event loop."""

    def __init__(self, server: ServerConfig) -> None:
        self.max_request_bytes = server.max_request_mb * _MIB
        self.max_bytes = server.max_inflight_mb * _MIB
        self.max_requests = server.max_inflight
        self.upload_timeout_s = server.upload_timeout_s
        self.requests = 0
        self.bytes = 0
        self.uploading_bytes = 0
        """Bytes of incomplete gRPC messages; `bytes` does not include them."""
        self.uploads: dict[Upload, None] = {}
        """The incomplete gRPC messages, the oldest first."""
        self.trim_due = False
        """Whether something large has been freed, so that memory should go back to the system."""
        self.draining = False
        """Whether new requests are rejected because the server stops."""
        self.drain_over = asyncio.Event()
        """Set when the drain's time is over, so that incomplete bodies are rejected."""
        self._empty = asyncio.Event()
        self._empty.set()

    def admit(self, api_key: ApiKey) -> Permit:
        """Admit a request of this key before its bytes are received.

        Raises:
            ApiError: 503, the server drains; 429, the key or the server has too many in flight.
        """
        if self.draining:
            raise errors.stopping()
        api_key.require_request()
        if self.requests >= self.max_requests and not self._evict_oldest_upload():
            message = f"{self.requests} requests are in flight (server.max_inflight); try again"
            raise errors.overloaded(message, "requests")
        if self.bytes + self.uploading_bytes >= self.max_bytes:
            raise self._full()
        return self.admit_unchecked(api_key)

    def admit_unchecked(self, api_key: ApiKey) -> Permit:
        """Admit a request without a check of the limits."""
        self.requests += 1
        self._empty.clear()
        return Permit(self, api_key)

    def require_room(self, request_bytes: int, more: int) -> None:
        """Reject a request that is too large, alone or together with all others.

        Args:
            request_bytes: the request's bytes.
            more: the bytes among them that are not counted yet.

        Raises:
            ApiError: 413, it is too large; 429, all requests together are.
        """
        if request_bytes > self.max_request_bytes:
            found = f"the request has {request_bytes} bytes or more"
            expected = f"expected at most {self.max_request_bytes} (server.max_request_mb)"
            raise errors.too_large(f"{found}; {expected}")
        if self.bytes + self.uploading_bytes + more > self.max_bytes:
            raise self._full()

    def release(self, size: int) -> None:
        """Count a request of `size` bytes as ended; permits call this."""
        self.requests -= 1
        self.bytes -= size
        self.trim_due |= size >= LARGE_BYTES
        if not self.requests:
            self._empty.set()

    @contextlib.contextmanager
    def sending(self, api_key: ApiKey, size: int) -> Iterator[None]:
        """Count the bytes of an answer, which is no request in flight, during a `with` block.

        Raises:
            ApiError: 429, there is no room for the bytes.
        """
        self.require_room(0, size)
        api_key.require_room(size)
        api_key.bytes += size
        self.bytes += size
        try:
            yield
        finally:
            api_key.bytes -= size
            self.bytes -= size
            self.trim_due |= size >= LARGE_BYTES

    def end_uploads(self, error: ApiError) -> None:
        """End every incomplete gRPC message with an error."""
        for upload in self.uploads:
            upload.evict(error)

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; return False when the time is over first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._empty.is_set()

    def _evict_oldest_upload(self) -> bool:
        """Evict the oldest upload if it is slow; return whether it was."""
        for upload in self.uploads:
            if upload.error is not None or upload.is_needed():
                continue
            waited_s = asyncio.get_running_loop().time() - upload.since_s
            if waited_s < PATIENCE_S:
                return False
            message = f"upload ended after {waited_s:.0f} s: other requests were waiting; try again"
            upload.evict(errors.overloaded(message, "slow_upload"))
            return True
        return False

    def _full(self) -> ApiError:
        size_mb = (self.bytes + self.uploading_bytes) // _MIB
        message = f"requests in flight hold {size_mb} MiB (server.max_inflight_mb); try again later"
        return errors.overloaded(message, "bytes")


class StreamSlots:
    """The live streams that are open. For one event loop."""

    def __init__(self, config: LiveConfig) -> None:
        self._max = config.max_streams
        self._end_callbacks: set[Callable[[], None]] = set()

    def __len__(self) -> int:
        return len(self._end_callbacks)

    @contextlib.contextmanager
    def register(self, api_key: ApiKey, end: Callable[[], None]) -> Iterator[None]:
        """Count a live stream of the key until the `with` block ends.

        Args:
            api_key: the stream's key.
            end: called to ask the stream to end.

        Raises:
            ApiError: 429, the key or the server has the maximum number of streams.
        """
        if api_key.streams >= api_key.max_streams:
            raise errors.key_limit("live_streams", api_key.name)
        if len(self) >= self._max:
            message = f"{len(self)} live streams are open (live.max_streams); try again later"
            raise errors.overloaded(message, "streams")
        self._end_callbacks.add(end)
        api_key.streams += 1
        try:
            yield
        finally:
            self._end_callbacks.remove(end)
            api_key.streams -= 1

    def end_all(self) -> None:
        """Ask every stream to end itself."""
        for end in list(self._end_callbacks):
            end()
