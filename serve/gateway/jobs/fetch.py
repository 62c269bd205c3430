"""HTTP to other servers: fetches the audio of jobs by its url, and posts webhooks.

A url names one of `jobs.allowed_hosts`. The owner of a name can let it resolve to any address, and
to another one the next moment. So the name is resolved here, every address that it has is checked,
and the connection goes to one of these.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpcore2

from serve.contract.config import Config
from serve.contract.errors import UnavailableError, shown
from serve.contract.server_config import PLACE
from serve.gateway import errors
from serve.gateway.errors import ApiError, field_error

URL_AWAY = "url_away"
"""The reason of errors after which a later try may succeed."""

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_AGAIN = (408, 425, 429)  # statuses below 500 after which another try may succeed
_CONNECT_S, _READ_S = 10.0, 30.0
FETCH_TIMEOUT_S = 600.0  # until a url's audio is here
MIB_TIMEOUT_S = 60.0  # until each MiB of it, or its end, is here
_POST_S = 20.0
_MIB = 2**20
_THREADS = 128  # that resolve names, which may take long
_MAX_IDLE = 10  # connections that are kept for the next request
_TIMEOUTS = {"timeout": {"connect": _CONNECT_S, "read": _READ_S, "write": _READ_S, "pool": _READ_S}}
_AGENT = ("User-Agent", "Earshot")
_FAILED = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)
_MAX_URL = 4096  # characters; signed urls are long
_PLAIN = re.compile(r"[!-~]+")
# Other names end in errors of the resolver that look as if it had no answer just now.
_HOST = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9a-f:.]+", re.ASCII)
_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPv4_BITS = 0xFFFF_FFFF
# IPv6 networks that embed IPv4 addresses: mapped ones, Teredo's and 6to4's.
_EMBEDDING = [ipaddress.ip_network(text) for text in ("::ffff:0:0/96", "2001::/32", "2002::/16")]


class PrivateAddressError(Exception):
    """A host has a private address."""


class OutboundClient:
    """An HTTP client for allowed hosts alone. For one event loop.

    Args:
        config: the allowed hosts, and the limits of size and time.
    """

    def __init__(self, config: Config) -> None:
        self._allowed_hosts = config.jobs.allowed_hosts
        self._max_bytes = config.server.max_request_mb * _MIB
        self._threads = ThreadPoolExecutor(_THREADS, "earshot-jobs-outside")
        networks = [ipaddress.ip_network(text) for text in config.jobs.allowed_networks]
        self._pool = httpcore2.AsyncConnectionPool(
            network_backend=_CheckedBackend(networks, self._threads),
            max_connections=None,  # callers limit them, for each key
            max_keepalive_connections=_MAX_IDLE,
            keepalive_expiry=10.0,
        )

    async def fetch(self, url: str, path: Path) -> int:
        """Fetch audio into a file; return its bytes.

        Raises:
            ApiError: it cannot be had; `URL_AWAY` is its reason if a later try may succeed.
        """
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._get(url, path)
        except TimeoutError:
            raise _url_unavailable(f"url was not whole after {FETCH_TIMEOUT_S:g} s") from None

    async def _get(self, url: str, path: Path) -> int:
        headers = [_AGENT, ("Accept-Encoding", "identity")]
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._answer("GET", url, "url", headers=headers) as answer:
                if answer.status not in _REDIRECTS:
                    return await self._save(answer, path)
                fields = {name.lower(): value for name, value in answer.headers}
                target = fields.get(b"location", b"").decode("latin-1")
                with contextlib.suppress(ValueError):
                    target = urllib.parse.urljoin(url, target)
                url = target  # `require_allowed` rejects one that is no url
        raise field_error("url", f"url leads on more than {_MAX_REDIRECTS} times")

    async def _save(self, answer: httpcore2.Response, path: Path) -> int:
        if answer.status != 200:
            message = f"url answered with status {answer.status}; expected 200 and audio"
            again = answer.status >= 500 or answer.status in _AGAIN
            raise _url_unavailable(message) if again else field_error("url", message)
        size, now = 0, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(MIB_TIMEOUT_S) as limit:
                with path.open("wb") as file:
                    async for chunk in answer.aiter_stream():
                        if size // _MIB < (size + len(chunk)) // _MIB:
                            limit.reschedule(now() + MIB_TIMEOUT_S)
                        size += len(chunk)
                        if size > self._max_bytes:
                            raise errors.too_large(
                                f"url has more than {self._max_bytes} bytes (server.max_request_mb)"
                            )
                        file.write(chunk)
        except TimeoutError:
            message = f"url brought less than 1 MiB within {MIB_TIMEOUT_S:g} s"
            raise _url_unavailable(message) from None
        return size

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Post a webhook; return the answer's status.

        Raises:
            ApiError: there is no answer, or the url is not allowed.
        """
        request = {"headers": [_AGENT, *headers.items()], "content": body}
        try:
            async with asyncio.timeout(_POST_S):
                async with self._answer("POST", url, "webhook_url", **request) as answer:
                    return int(answer.status)
        except TimeoutError:
            raise _url_unavailable(f"webhook_url did not answer within {_POST_S:g} s") from None

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, url: str, field: str, **request: Any
    ) -> AsyncIterator[httpcore2.Response]:
        """Send a request to an allowed host; a `with` block gets the answer.

        Raises:
            ApiError: the url is not allowed, or the answer cannot be had.
        """
        self.require_allowed(url, field)
        url = urllib.parse.urldefrag(url).url
        try:
            async with self._pool.stream(method, url, **request, extensions=_TIMEOUTS) as answer:
                yield answer
        except PrivateAddressError as error:
            found = f"{field}: {error} resolves to a private address"
            expected = "expected a public one, or a network in jobs.allowed_networks"
            raise field_error(field, f"{found}; {expected}") from None
        except _FAILED as error:
            raise _url_unavailable(
                f"{field} cannot be fetched: {error or type(error).__name__}"
            ) from error

    def require_allowed(self, url: str, field: str) -> None:
        """Reject a url that names another host than `jobs.allowed_hosts`.

        Args:
            url: a client's url, or that of a redirect.
            field: the client's field with the url.

        Raises:
            ApiError: 400, it names another host, or is no url.
        """
        parts = _parts(url, field)
        if not any(_allows(pattern, parts) for pattern in self._allowed_hosts):
            found = shown(f"{parts.scheme}://{parts.netloc}")
            allowed = ", ".join(self._allowed_hosts) or "which is empty"
            expected = f"expected a host of the server's jobs.allowed_hosts, {allowed}"
            raise field_error(field, f"{field} names {found}; {expected}")

    async def close(self) -> None:
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _url_unavailable(message: str) -> ApiError:
    return ApiError(UnavailableError(message), URL_AWAY)


# ---------------------------------------------------------------- urls


def _allows(pattern: str, parts: urllib.parse.SplitResult) -> bool:
    """Return whether one of `jobs.allowed_hosts` names the host of a url."""
    allowed = PLACE.fullmatch(pattern)
    assert allowed, pattern  # the configuration was checked
    scheme, name = allowed[1] or "https", allowed[2].lower()
    port = int(allowed[3] or _PORTS[scheme])
    host = (parts.hostname or "").lower().rstrip(".")
    matches = host.endswith(name[1:]) if name.startswith("*.") else host == name
    return matches and (parts.scheme, parts.port or _PORTS[parts.scheme]) == (scheme, port)


def _parts(url: str, field: str) -> urllib.parse.SplitResult:
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        plain = len(url) <= _MAX_URL and _PLAIN.fullmatch(url) and parts.port != 0
        host = parts.scheme in _PORTS and _HOST.fullmatch(parts.hostname or "")
        if plain and host and parts.username is None and parts.password is None:
            return parts
    raise field_error(
        field,
        f"{field} = {shown(url)}; expected https:// and a host's name, such as a signed url of an "
        f"object store, in at most {_MAX_URL} characters of ASCII, without a user or password",
    )


# ---------------------------------------------------------------- addresses


def is_private(text: str) -> bool:
    """Tell whether an address is this machine's, its network's, or not a host's."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if address in _NAT64:  # a network without IPv4 has such addresses of public hosts
        address = ipaddress.IPv4Address(int(address) & _IPv4_BITS)
    embedding = any(address in network for network in _EMBEDDING)
    return embedding or not address.is_global or address.is_multicast or address.is_reserved


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Connects to addresses that have been checked; for a pool of httpcore's.

    Args:
        networks: the private networks that are allowed.
        threads: resolve names.
    """

    def __init__(self, networks: Sequence[Any], threads: Executor) -> None:
        self._networks = networks
        self._threads = threads

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve the host, check its addresses, and connect to the first that answers.

        httpcore's other options of connections are not used.

        Raises:
            PrivateAddressError: the host has a private address.
            httpcore2.ConnectError: it has none, or none answers.
        """
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._addresses(host, port)
        except OSError as error:  # TimeoutError is one
            raise httpcore2.ConnectError(f"{host} cannot be found") from error
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await super().connect_tcp(address, port, timeout)
        return await super().connect_tcp(addresses[-1], port, timeout)

    async def _addresses(self, host: str, port: int) -> list[str]:
        entries = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        for address in addresses:
            plain = ipaddress.ip_address(address.partition("%")[0])
            if is_private(address) and not any(plain in network for network in self._networks):
                raise PrivateAddressError(host)
        return addresses
