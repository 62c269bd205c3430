"""Read and write files of API keys, which hold the hashes of keys and their limits.

A key is 256 random bits, so its plain SHA-256 does not reveal it. A file of keys:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    requests_per_minute = 60  # each limit is optional
    audio_s_per_minute = 600
    audio_s_per_day = 36000  # in UTC
    requests_at_once = 8
    live_streams = 2
    expires = "2027-01-31"  # in UTC: the first day on which it is invalid, or a time

The environment variable EARSHOT_API_KEYS may also hold keys: name:sha256, separated by spaces.
"""

import dataclasses
import datetime
import hashlib
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w

from serve.contract.codec import from_table, read_toml, text_that
from serve.contract.errors import ConfigError, shown
from serve.contract.fields import Count, Seconds, SecondsOrNone
from serve.contract.files import write_text

ENVIRONMENT = "EARSHOT_API_KEYS"

CLIENT_SECRET_PREFIX = "ek_"
"""Prefix of a client secret, as in OpenAI's API: `serve.gateway.client_secrets`."""

_PREFIX = "earshot_"  # scanners for leaked secrets can search for it
_BYTES = 32
_OWNER_ONLY = 0o600
_ID_DIGITS = 32
_HASH = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[A-Za-z0-9_-]{1,60}")


def _time_of(text: str) -> datetime.datetime | None:
    """Parse a time, or a day as its beginning, by default in UTC; None if it is neither."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


_TIMES = "a day or a time, such as 2027-01-31 or 2027-01-31T12:00Z"
Hash = Annotated[str, text_that(_HASH.fullmatch, "a SHA-256 of 64 hexadecimal digits")]
Expiry = Annotated[str, text_that(_time_of, _TIMES)]
KeyName = Annotated[str, text_that(_NAME.fullmatch, "1 to 60 of A-Z, a-z, 0-9, _ and -")]


@dataclasses.dataclass(frozen=True)
class Key:
    """An API key's hash, limits and expiry; the key itself is not stored."""

    sha256: Hash
    requests_per_minute: Count | None = None  # None: no limit
    audio_s_per_minute: Seconds | None = None
    requests_at_once: Count | None = None
    live_streams: Count | None = None
    audio_s_per_day: SecondsOrNone = 0.0  # day in UTC, all processes together; 0: no limit
    expires: Expiry | None = None  # None: never

    @property
    def public_id(self) -> str:
        """Return an id of the key that does not reveal its hash."""
        return hashlib.sha256(f"earshot key {self.sha256}".encode()).hexdigest()[:_ID_DIGITS]

    @property
    def expired(self) -> bool:
        """Return whether the key has expired."""
        end = _time_of(self.expires) if self.expires else None
        return end is not None and datetime.datetime.now(datetime.UTC) >= end

    def share(self, processes: int) -> "Key":
        """Return the key with the limits of one of `processes` processes, rounded up."""
        if processes == 1:
            return self
        shares: dict[str, Any] = {
            name: math.ceil(getattr(self, name) / processes)
            for name in _OF_A_PROCESS
            if getattr(self, name)
        }
        return dataclasses.replace(self, **shares)


# The limits that processes share; they count `audio_s_per_day` together.
_OF_A_PROCESS = ("requests_per_minute", "audio_s_per_minute", "requests_at_once", "live_streams")


@dataclasses.dataclass(frozen=True)
class _File:
    keys: dict[KeyName, Key] = dataclasses.field(default_factory=dict)


def hash_of(key: str) -> str:
    """Return the SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Generate a random API key."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def read_keys(path: Path) -> dict[str, Key]:
    """Read a file of keys; return the keys by name.

    Raises:
        FileError: the file cannot be read.
        ConfigError: the file is not a file of keys.
    """
    command = f"python -m serve keys new --name NAME --file {path}"
    advice = f"expected a file of API keys, which `{command}` writes"
    return from_table(_File, read_toml(path, advice), str(path)).keys


def environment_keys(environment: Mapping[str, str] = os.environ) -> dict[str, Key]:
    """Read the keys of the environment; return them by name.

    Raises:
        ConfigError: the variable is malformed.
    """
    keys = {}
    for entry in environment.get(ENVIRONMENT, "").split():
        name, _, digest = entry.partition(":")
        if not (_NAME.fullmatch(name) and _HASH.fullmatch(digest)):
            raise ConfigError(
                f"{ENVIRONMENT}: the entry of {shown(name)} is malformed; expected name:sha256 "
                "entries separated by spaces, as `python -m serve keys new` prints them"
            )
        keys[name] = Key(digest)
    return keys


def add_key(path: Path, name: str, fields: Mapping[str, object]) -> None:
    """Add a key to a file, which is created if it does not exist.

    Args:
        path: the file of keys.
        name: the key's name.
        fields: the fields of `Key`; fields that are None are omitted.

    Raises:
        ConfigError: the name or a field is invalid, or the name exists.
        FileError: the file cannot be read or written.
    """
    table = {"keys": {name: {key: value for key, value in fields.items() if value is not None}}}
    new = from_table(_File, table, "the new key").keys
    keys = read_keys(path) if path.exists() else {}
    if name in keys:
        raise ConfigError(f"{path} already has a key {name}; choose another name, or revoke it")
    _write_keys(path, keys | new)


def revoke_key(path: Path, name: str) -> None:
    """Remove a key from a file; a running server rejects it within seconds.

    Raises:
        ConfigError: the key does not exist.
        FileError: the file cannot be read or written.
    """
    keys = _keys_with(path, name)
    del keys[name]
    _write_keys(path, keys)


def expire_key(path: Path, name: str, expires: str) -> None:
    """Set the expiry of a key in a file.

    Raises:
        ConfigError: the key does not exist, or `expires` is not a time.
        FileError: the file cannot be read or written.
    """
    if _time_of(expires) is None:
        raise ConfigError(f"expires = {shown(expires)}; expected {_TIMES}")
    keys = _keys_with(path, name)
    keys[name] = dataclasses.replace(keys[name], expires=expires)
    _write_keys(path, keys)


def _keys_with(path: Path, name: str) -> dict[str, Key]:
    keys = read_keys(path)
    if name not in keys:
        raise ConfigError(f"{path} has no key {shown(name)}; see `python -m serve keys list`")
    return keys


def _write_keys(path: Path, keys: Mapping[str, Key]) -> None:
    """Write a file of keys; comments and fields without a value are dropped."""
    tables = {
        name: {field: value for field, value in vars(key).items() if value}
        for name, key in keys.items()
    }
    write_text(path, tomli_w.dumps({"keys": tables}), mode=_OWNER_ONLY)
