"""Goes outside for jobs: fetches audio by its url, and posts webhooks."""

import asyncio
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpcore2

from serve.contract.config import Config
from serve.contract.errors import UnavailableError, shown
from serve.gateway import errors
from serve.gateway.errors import ApiError, field_error
from serve.gateway.jobs.places import CheckedBackend, InsideError, Places

URL_AWAY = "url_away"
"""The reason of refusals after which a url may be had later."""

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_AGAIN = (408, 425, 429)  # statuses below 500 after which another try may succeed
_CONNECT_S, _READ_S = 10.0, 30.0
_POST_S = 20.0
_MIB = 2**20
_THREADS = 128  # each waits for a name; others' threads stay theirs
_MOST_IDLE = 10  # connections that are kept for the next request
_TIMES = {"timeout": {"connect": _CONNECT_S, "read": _READ_S, "write": _READ_S, "pool": _READ_S}}
_AGENT = ("User-Agent", "Earshot")
_FAILED = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError)


class Outside:
    """The way there. For one event loop.

    Args:
        config: says where it may go, and how much it may bring.
    """

    def __init__(self, config: Config) -> None:
        self.places = Places(config.jobs)
        self._limit_s = config.jobs.fetch_timeout_s
        self._mib_s = config.jobs.fetch_mb_timeout_s
        self._most_bytes = config.server.max_request_mb * 2**20
        self._threads = ThreadPoolExecutor(_THREADS, "earshot-jobs-outside")
        self._pool = httpcore2.AsyncConnectionPool(
            network_backend=CheckedBackend(self.places.networks, self._threads),
            max_connections=None,  # callers limit them, for each key
            max_keepalive_connections=_MOST_IDLE,
            keepalive_expiry=10.0,
        )

    async def fetch(self, url: str, to: Path) -> int:
        """Fetch audio into a file; return its bytes.

        Raises:
            ApiError: it cannot be had; `status.again` tells whether it may be later.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._by_http(url, to)
        except TimeoutError:
            raise _away(
                f"url was not whole after {self._limit_s:g} s (jobs.fetch_timeout_s)"
            ) from None
        except InsideError as error:
            raise field_error(
                "url",
                f"url: {error} lies at an address inside this server's house, which it goes to for "
                "nobody (jobs.allowed_networks)",
            ) from None
        except _FAILED as error:
            raise _away(f"url cannot be fetched: {error or type(error).__name__}") from error

    async def _by_http(self, url: str, to: Path) -> int:
        headers = [_AGENT, ("Accept-Encoding", "identity")]
        for _ in range(_MOST_REDIRECTS + 1):
            self.places.require(url, "url")
            url = urllib.parse.urldefrag(url).url
            async with self._pool.stream("GET", url, headers=headers, extensions=_TIMES) as answer:
                if answer.status in _REDIRECTS:
                    fields = {name.lower(): value for name, value in answer.headers}
                    url = _redirected(url, fields.get(b"location", b"").decode("latin-1"))
                    continue
                if answer.status != 200:
                    raise _answered(answer.status)
                return await self._save(answer, to)
        raise field_error("url", f"url leads on more than {_MOST_REDIRECTS} times")

    async def _save(self, answer: httpcore2.Response, to: Path) -> int:
        size, now = 0, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._mib_s) as limit:
                with to.open("wb") as file:
                    async for chunk in answer.aiter_stream():
                        if size // _MIB < (size + len(chunk)) // _MIB:
                            limit.reschedule(now() + self._mib_s)
                        size += len(chunk)
                        if size > self._most_bytes:
                            raise errors.too_large(
                                f"url has more than {self._most_bytes} bytes "
                                "(server.max_request_mb)"
                            )
                        file.write(chunk)
        except TimeoutError:
            raise _away(
                f"url brought less than 1 MiB within {self._mib_s:g} s (jobs.fetch_mb_timeout_s)"
            ) from None
        return size

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Post a webhook; return the answer's status.

        Raises:
            ApiError: there is no answer, or the place is none to go to.
        """
        self.places.require(url, "webhook_url")
        fields = [_AGENT, *headers.items()]
        try:
            async with asyncio.timeout(_POST_S):
                async with self._pool.stream(
                    "POST", url, headers=fields, content=body, extensions=_TIMES
                ) as answer:
                    return int(answer.status)
        except InsideError as error:
            raise field_error("webhook_url", f"{error} lies inside the house") from None
        except (TimeoutError, *_FAILED) as error:
            raise _away(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Hang up."""
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _redirected(url: str, target: str) -> str:
    """Return the url that an answer's `Location` leads to from another.

    Raises:
        ApiError: it is no url.
    """
    try:
        return urllib.parse.urljoin(url, target)
    except ValueError as error:
        raise field_error("url", f"url leads to {shown(target)}, no url: {error}") from error


def _away(message: str) -> ApiError:
    return ApiError(UnavailableError(message), URL_AWAY)


def _answered(status: int) -> ApiError:
    message = f"url answered with status {status}; expected 200 and audio"
    if status >= 500 or status in _AGAIN:
        return _away(message)
    return field_error("url", message)
