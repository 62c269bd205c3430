"""API keys and their limits.

A server without keys answers everybody. Otherwise a request sends its key as OpenAI's clients do,
`Authorization: Bearer KEY`, over HTTP as over gRPC.
"""

import contextlib
import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from starlette.requests import HTTPConnection

from serve.contract.config import Config
from serve.contract.errors import AccessError, ConfigError
from serve.contract.keys import (
    CLIENT_SECRET_PREFIX,
    ENVIRONMENT,
    Key,
    environment_keys,
    hash_of,
    read_keys,
)
from serve.gateway import errors
from serve.gateway.errors import ApiError

logger = logging.getLogger("earshot.gateway")

# Share of `max_inflight`, `max_inflight_mb`, `live.max_streams` and jobs that one of several keys
# may have.
KEY_SHARE = 0.5
_MINUTE_S = 60.0
_UNKNOWN = "this API key is unknown"

NO_KEY = Key("")
"""Stands for the key of a client of a server without keys; it has no limits."""

Clock = Callable[[], float]


class _TokenBucket:
    """A token bucket that is refilled by the minute and holds one minute's tokens.

    Its tokens may become negative. Without a limit it is never empty.
    """

    def __init__(self, per_minute: float | None, clock: Clock) -> None:
        self.limited = per_minute is not None
        self._capacity = self._tokens = math.inf if per_minute is None else per_minute
        self._clock = clock
        self._updated_s = clock()

    def wait_s(self, needed: float) -> float:
        """Return the seconds until the bucket holds the needed tokens."""
        if not self.limited:
            return 0.0
        now = self._clock()
        self._tokens += (now - self._updated_s) * self._capacity / _MINUTE_S
        self._tokens, self._updated_s = min(self._tokens, self._capacity), now
        return max(0.0, (needed - self._tokens) * _MINUTE_S / self._capacity)

    def headers(self, name: str) -> dict[str, str]:
        """Return the headers of OpenAI's API that describe the bucket, if it has a limit."""
        if not self.limited:
            return {}
        reset_s = self.wait_s(self._capacity)
        return {
            f"x-ratelimit-limit-{name}": f"{self._capacity:g}",
            f"x-ratelimit-remaining-{name}": f"{max(0, math.floor(self._tokens))}",
            f"x-ratelimit-reset-{name}": f"{reset_s:.3g}s",
        }

    def take(self, amount: float) -> None:
        self._tokens -= amount


class ApiKey:
    """One caller: its key's limits, token buckets, and requests in flight.

    Args:
        name: the key's name; empty where the server has no keys.
        key: the key's entry, with its limits.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, key: Key = NO_KEY, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.key = key
        self.requests = self.streams = self.bytes = 0
        """The requests, live streams and bytes in flight."""
        self.max_requests = self.max_streams = self.max_bytes = math.inf
        self._requests = _TokenBucket(key.requests_per_minute, clock)
        self._audio_s = _TokenBucket(key.audio_s_per_minute, clock)

    def limit_headers(self) -> dict[str, str]:
        """Return headers with the rest of this minute's limits, if the key has limits."""
        return self._requests.headers("requests") | self._audio_s.headers("audio-seconds")

    def require_request(self) -> None:
        """Reject one more request in flight beyond the key's maximum.

        Raises:
            ApiError: 429, the key has the maximum.
        """
        if self.requests >= self.max_requests:
            raise errors.key_limit("requests_at_once", self.name)

    def require_room(self, more: int) -> None:
        """Reject further bytes in flight beyond the key's share.

        Raises:
            ApiError: 429, the share would be exceeded.
        """
        if self.bytes + more > self.max_bytes:
            raise errors.key_limit("share of server.max_inflight_mb", self.name)

    def count_request(self) -> None:
        """Count a request for a transcript.

        Raises:
            ApiError: 429, the key has had too many requests, or too much audio, in this minute.
        """
        self.require_audio()
        if wait_s := self._requests.wait_s(1.0):
            raise errors.key_limit("requests_per_minute", self.name, wait_s)
        self._requests.take(1.0)

    def count_audio(self, audio_s: float) -> None:
        """Count the audio of a request; its length is known once it is answered."""
        self._audio_s.take(audio_s)

    def require_duration(self, outputs: Collection[str], streamed: bool = False) -> None:
        """Reject a KServe request if its answer would not contain the length of the audio.

        Args:
            outputs: the requested outputs; empty means all.
            streamed: whether the answer streams its segments. They give the length if the client
                disconnects early.

        Raises:
            ApiError: 400, the outputs do not contain the length.
        """
        is_limited = self.key.audio_s_per_day or self._audio_s.limited
        needed = ("DURATION", "SEGMENTS") if streamed else ("DURATION",)
        if is_limited and outputs and not set(needed) <= set(outputs):
            names = " or ".join(needed)
            raise errors.invalid(f"the outputs lack {names}, by which this key's audio is counted")

    def require_audio(self) -> None:
        """Reject a key that has had too much audio.

        Raises:
            ApiError: 429, it has.
        """
        if wait_s := self._audio_s.wait_s(0.0):
            raise errors.key_limit("audio_s_per_minute", self.name, wait_s)


class ApiKeys:
    """The API keys of the server, read again when their file changes. For one event loop.

    Args:
        config: names the file of keys; has the limits, which the keys share.
        clock: monotonic seconds.

    Raises:
        ConfigError: the keys cannot be read, or others reach the server and there are none.
    """

    def __init__(self, config: Config, clock: Clock = time.monotonic) -> None:
        server = config.server
        self._config = config
        self._path = Path(server.keys_file) if server.keys_file else None
        self._clock = clock
        self._keyless = ApiKey("")
        self._environment_keys = environment_keys()
        self.required = self._path is not None or ENVIRONMENT in os.environ
        """Whether a request needs a key."""
        self._keys: dict[str, ApiKey] = {}
        self._version = self._file_version()
        self._read()
        if not (self.required or server.open or server.on_loopback):
            found = f"server.host = {server.host} accepts remote connections"
            create = "create one with `python -m serve keys new` and set server.keys_file"
            turn_off = "turn authentication off with --open (server.open = true)"
            raise ConfigError(f"{found}, but no API keys are configured; {create}, or {turn_off}")

    def identify(self, authorization: str | None) -> ApiKey:
        """Return the API key that a request's `Authorization` header names.

        Raises:
            ApiError: 401, it names none, or an unknown or expired one.
        """
        token = bearer_token(authorization)
        unknown, digest = _UNKNOWN, hash_of(token) if token else ""
        if not token:
            unknown = "no API key; send Authorization: Bearer KEY (commands: set EARSHOT_API_KEY)"
        elif token.startswith(CLIENT_SECRET_PREFIX):
            unknown = "a client secret opens live sessions at /v1/realtime only; send an API key"
        return self._find(lambda name, key: hmac.compare_digest(digest, key.sha256), unknown)

    def of_request(self, request: HTTPConnection) -> ApiKey:
        """Return the API key of an HTTP request; see `identify`."""
        return self.identify(request.headers.get("authorization"))

    @property
    def several(self) -> bool:
        """Whether several keys share the server's limits."""
        return len(self._keys) > 1

    def named_as(self, name: str) -> ApiKey:
        """Return the key of this name, for a job that was accepted earlier.

        Raises:
            ApiError: 401, the key has been removed or has expired.
        """
        removed = f"the API key {name} was removed"
        if name and not self.required:
            raise ApiError(AccessError(removed))
        return self._find(lambda known, key: known == name, removed)

    def with_public_id(self, public_id: str) -> ApiKey:
        """Return the API key that made a client secret.

        Args:
            public_id: `Key.public_id`.

        Raises:
            ApiError: 401, the key has been removed or replaced, or has expired.
        """
        unknown = "the API key that made this client secret is unknown"
        return self._find(lambda name, key: key.public_id == public_id, unknown)

    def require_good(self, api_key: ApiKey) -> None:
        """Check that a key which was identified earlier is still valid.

        Raises:
            ApiError: 401, the key has been removed or replaced, or has expired, since then.
        """
        identity = api_key.name, api_key.key.sha256
        self._find(lambda name, key: (name, key.sha256) == identity, _UNKNOWN)

    def _find(self, matches_key: Callable[[str, Key], bool], unknown: str) -> ApiKey:
        """Return the API key that matches, by its name and its entry in the file.

        Every key is tried, so that timing tells nothing about a near miss.

        Raises:
            ApiError: 401, no key matches (the message is `unknown`), or the key has expired.
        """
        if not self.required:
            return self._keyless
        self._refresh()
        matches = [one for one in self._keys.values() if matches_key(one.name, one.key)]
        if not matches:
            raise ApiError(AccessError(unknown))
        api_key = matches[0]
        if api_key.key.expired:
            raise ApiError(AccessError(f"this API key has expired, {api_key.key.expires}"))
        return api_key

    def _refresh(self) -> None:
        """Read the file again if it has changed; an unreadable file changes nothing."""
        version = self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._read()
        except ConfigError as error:
            logger.error("cannot reload the API keys; the previous ones stay in use: %s", error)
        else:
            logger.info("reloaded %s: %d keys", self._path, len(self._keys))

    def _file_version(self) -> tuple[int, ...]:
        """Return the inode, change time and size of the key file, if there is one."""
        with contextlib.suppress(OSError):
            stat = os.stat(self._path or "")
            return stat.st_ino, stat.st_ctime_ns, stat.st_size
        return ()

    def _read(self) -> None:
        file_keys = read_keys(self._path) if self._path else {}
        for name in file_keys.keys() & self._environment_keys.keys():
            raise ConfigError(f"{self._path} and {ENVIRONMENT} both have a key {name}")
        keys = self._environment_keys | file_keys
        server, live = self._config.server, self._config.live
        if not server.usage_file and any(key.audio_s_per_day for key in keys.values()):
            logger.warning(
                "no server.usage_file is named: a stop forgets the usage of keys by audio_s_per_day"
            )
        previous, self._keys = self._keys, {}
        share = KEY_SHARE if len(keys) > 1 else 1.0
        for name, entry in keys.items():
            key, api_key = entry.share(self._config.gateway.processes), previous.get(name)
            if api_key is None or api_key.key != key:
                api_key = ApiKey(name, key, self._clock)
            api_key.max_requests = key.requests_at_once or math.ceil(share * server.max_inflight)
            api_key.max_bytes = math.ceil(share * server.max_inflight_mb * 2**20)
            api_key.max_streams = key.live_streams or math.ceil(share * live.max_streams)
            self._keys[name] = api_key


def bearer_token(authorization: str | None) -> str:
    """Return the token of an `Authorization: Bearer` header, or an empty text."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
