"""ApiKeys: their API keys, and what each may ask for in a minute.

Where there are no keys everybody may call. Where there are, a request names its key as OpenAI's
clients do, `Authorization: Bearer KEY`, over HTTP as over gRPC.
"""

import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

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
from serve.contract.server_config import ServerConfig
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.limits import Account

logger = logging.getLogger("earshot.gateway")

LOOK_S = 1.0  # at most so often is the file looked at
_MINUTE_S = 60.0

Clock = Callable[[], float]


class _Share:
    """So much a minute, and a minute's worth at once; what was taken beyond it is waited for."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._most = per_minute
        self._left = per_minute
        self._clock = clock
        self._at_s = clock()

    def wait_s(self, needed: float) -> float:
        """Return the seconds until so much is there."""
        now = self._clock()
        self._left += (now - self._at_s) * self._most / _MINUTE_S
        self._left, self._at_s = min(self._left, self._most), now
        return max(0.0, (needed - self._left) * _MINUTE_S / self._most)

    def headers(self, what: str) -> dict[str, str]:
        """Tell what there is of it, as OpenAI's API does."""
        reset_s = self.wait_s(self._most)
        return {
            f"x-ratelimit-limit-{what}": f"{self._most:g}",
            f"x-ratelimit-remaining-{what}": f"{max(0, math.floor(self._left))}",
            f"x-ratelimit-reset-{what}": f"{reset_s:.3g}s",
        }

    def take(self, amount: float) -> None:
        self._left -= amount


class ApiKey:
    """Somebody who may come in.

    Args:
        name: of their key; empty where there are none.
        key: says what they may ask for; None: whatever they like.
        clock: in seconds.
    """

    def __init__(self, name: str, key: Key | None, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.key = key
        self.account = Account(name)
        requests = key.requests_per_minute if key else None
        audio_s = key.audio_s_per_minute if key else None
        self._requests = None if requests is None else _Share(requests, clock)
        self._audio_s = None if audio_s is None else _Share(audio_s, clock)

    def left(self) -> dict[str, str]:
        """Return headers that tell what the key may still have in this minute, if it has limits."""
        shares = (("requests", self._requests), ("audio-seconds", self._audio_s))
        headers: dict[str, str] = {}
        for what, share in shares:
            headers |= share.headers(what) if share is not None else {}
        return headers

    def begin(self) -> None:
        """Count a request for a transcript.

        Raises:
            ApiError: there have been too many, or too much audio.
        """
        self._require_audio()
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1.0):
                raise errors.key_limit("requests_per_minute", self.name, wait_s)
            self._requests.take(1.0)

    def count_audio(self, audio_s: float) -> None:
        """Count a request's audio, whose length its answer has told."""
        if self._audio_s is not None:
            self._audio_s.take(audio_s)

    def count_live(self, audio_s: float) -> None:
        """Count live audio as it comes in.

        Raises:
            ApiError: there has been too much before it.
        """
        self._require_audio()
        self.count_audio(audio_s)

    def require_duration(self, outputs: Collection[str], streamed: bool = False) -> None:
        """Refuse a request of KServe's whose answer would not tell how much audio it had.

        Args:
            outputs: that it asks for; none: all of them.
            streamed: whether segments come one by one, which count where the client leaves.

        Raises:
            ApiError: these outputs do not.
        """
        a_day = self.key.audio_s_per_day if self.key else 0.0
        counts = a_day or self._audio_s is not None
        needed = ("DURATION", "SEGMENTS") if streamed else ("DURATION",)
        if counts and outputs and not set(needed) <= set(outputs):
            raise errors.invalid(
                f"the outputs lack {' or '.join(needed)}, by which this key's audio is counted; "
                "ask for it too"
            )

    def _require_audio(self) -> None:
        if self._audio_s is not None and (wait_s := self._audio_s.wait_s(0.0)):
            raise errors.key_limit("audio_s_per_minute", self.name, wait_s)


class ApiKeys:
    """All who may call. For one event loop.

    Args:
        config: names the file of keys, and says what one may have at a time.
        clock: in seconds.

    Raises:
        ConfigError: the keys cannot be read, or others reach the server and there are none.
    """

    def __init__(self, config: Config, clock: Clock = time.monotonic) -> None:
        server = config.server
        self._config = config
        self._processes = config.gateway.processes
        self._path = Path(server.keys_file) if server.keys_file else None
        self._clock = clock
        self._anyone = ApiKey("", None)
        self._fixed = environment_keys()
        self.named = self._path is not None or ENVIRONMENT in os.environ
        """A key is needed."""
        self._callers: dict[str, ApiKey] = {}
        self._version = self._look()
        self._looked_s = clock()
        self._read()
        _require_keys(server, self.named)

    def identify(self, authorization: str | None) -> ApiKey:
        """Find out who sends a request.

        Args:
            authorization: its header of this name.

        Raises:
            ApiError: it has no key, or an unknown one.
        """
        if not self.named:
            return self._anyone
        self._refresh()
        key = bearer_token(authorization)
        if not key:
            raise ApiError(
                AccessError(
                    "no API key; send it as Authorization: Bearer KEY, for which Earshot's own "
                    "commands take it from the variable EARSHOT_API_KEY"
                )
            )
        digest = hash_of(key)
        # All are compared, each in the same time, so that no time tells which was nearly right.
        fitting = [
            caller
            for caller in self._callers.values()
            if caller.key and hmac.compare_digest(caller.key.sha256, digest)
        ]
        if not fitting and key.startswith(CLIENT_SECRET_PREFIX):
            raise ApiError(
                AccessError(
                    "a client secret opens live sessions at /v1/realtime only; send an API key here"
                )
            )
        if not fitting:
            raise ApiError(AccessError("this API key is unknown"))
        known = fitting[0].key
        if known and known.expired:
            raise ApiError(AccessError(f"this API key has expired, {known.expires}"))
        return fitting[0]

    @property
    def several(self) -> bool:
        """Tell whether there are several keys, of which each has its share."""
        return len(self._callers) > 1

    def named_as(self, name: str) -> ApiKey:
        """Find the caller whose key has a name, for what it asked for earlier.

        Raises:
            ApiError: there is no such key any more, or it has expired.
        """
        if not (self.named or name):
            return self._anyone
        self._refresh()
        caller = self._callers.get(name)
        if caller is None or (caller.key and caller.key.expired):
            raise ApiError(AccessError(f"the key {name} is good no more"))
        return caller

    def with_public_id(self, public_id: str) -> ApiKey:
        """Find the caller whose key made a client secret.

        Args:
            public_id: `Key.public_id`; empty where the server has no keys.

        Raises:
            ApiError: the key is removed, replaced or expired.
        """
        if not self.named:
            return self._anyone
        self._refresh()
        for caller in self._callers.values():
            if caller.key and caller.key.public_id == public_id:
                self.require_good(caller)
                return caller
        raise ApiError(AccessError("the API key that made this client secret is unknown"))

    def require_good(self, caller: ApiKey) -> None:
        """Refuse a caller that was identified before and may not go on.

        Raises:
            ApiError: its key is removed, replaced or expired since then.
        """
        if caller.key is None:
            return
        self._refresh()
        now = self._callers.get(caller.name)
        if now is None or now.key is None or now.key.sha256 != caller.key.sha256:
            raise ApiError(AccessError("this API key is unknown"))
        if now.key.expired:
            raise ApiError(AccessError(f"this API key has expired, {now.key.expires}"))

    def _refresh(self) -> None:
        """Read the file again where it has changed; what cannot be read changes nothing."""
        now = self._clock()
        if now < self._looked_s + LOOK_S:
            return
        self._looked_s = now
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%s was read again: %d keys", self._path, len(self._callers))

    def _look(self) -> tuple[int, ...]:
        """Return something that differs where the file does."""
        try:
            stat = os.stat(self._path) if self._path else None
        except OSError:
            stat = None
        return (stat.st_ino, stat.st_ctime_ns, stat.st_size) if stat else ()

    def _read(self) -> None:
        keys = dict(self._fixed)
        for name, key in (read_keys(self._path) if self._path else {}).items():
            if name in keys:
                raise ConfigError(f"{self._path} and {ENVIRONMENT} both have a key {name}")
            keys[name] = key
        keys = {name: key.share(self._processes) for name, key in keys.items()}
        if not self._config.server.usage_file and any(k.audio_s_per_day for k in keys.values()):
            logger.warning(
                "keys have audio_s_per_day, and no server.usage_file is named: what they have had "
                "is forgotten when the server stops"
            )
        before = self._callers
        self._callers = {
            name: before[name]
            if name in before and before[name].key == key
            else ApiKey(name, key, self._clock)
            for name, key in keys.items()
        }
        share = self._config.server.key_share if self.several else 1.0
        for caller in self._callers.values():
            self._limit(caller, share)

    def _limit(self, caller: ApiKey, share: float) -> None:
        server, account, key = self._config.server, caller.account, caller.key
        assert key is not None
        account.max_requests = key.requests_at_once or math.ceil(share * server.max_inflight)
        account.max_bytes = math.ceil(share * server.max_inflight_mb * 2**20)
        account.max_streams = key.live_streams or math.ceil(share * self._config.live.max_streams)


def bearer_token(authorization: str | None) -> str:
    """Return the token of an `Authorization: Bearer` header; empty where there is none."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _require_keys(server: ServerConfig, named: bool) -> None:
    if not (named or server.open or server.on_loopback):
        raise ConfigError(
            f"server.host = {server.host} is reached by others, and no API keys are named: make "
            "one with `python -m serve keys new` and name its file in server.keys_file, or let "
            "everybody in with --open (server.open = true)"
        )
