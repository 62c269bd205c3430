"""API keys: who may use a server, by the hashes of their keys.

A key is 256 random bits, so its plain SHA-256 tells nothing of it. A file says which there are:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    requests_per_minute = 60  # each limit may be left out
    audio_s_per_minute = 600
    requests_at_once = 8
    live_streams = 2

and so does the environment: EARSHOT_API_KEYS holds name:sha256, several with blanks between them.
"""

import dataclasses
import hashlib
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tomli_w

from serve.codec import from_table, read_toml, text_that
from serve.errors import ConfigError, FileError, shown
from serve.fields import Count, Seconds

ENVIRONMENT = "EARSHOT_API_KEYS"

_PREFIX = "earshot_"  # by which scanners for leaked secrets can know them
_BYTES = 32
_HASH = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[A-Za-z0-9_-]{1,60}")

Hash = Annotated[str, text_that(_HASH.fullmatch, "a SHA-256 as 64 digits of 0-9a-f")]
KeyName = Annotated[str, text_that(_NAME.fullmatch, "1 to 60 of A-Z, a-z, 0-9, _ and -")]


@dataclasses.dataclass(frozen=True)
class Key:
    """What is known of a key; the key itself is not."""

    sha256: Hash
    requests_per_minute: Count | None = None  # None: no limit
    audio_s_per_minute: Seconds | None = None
    requests_at_once: Count | None = None  # None: as server.key_share says; live_streams as well
    live_streams: Count | None = None

    def share(self, processes: int) -> "Key":
        """The same key with what one of so many processes may give it, rounded up."""
        if processes == 1:
            return self
        limits = dataclasses.asdict(self)
        del limits["sha256"]
        some = {name: math.ceil(most / processes) for name, most in limits.items() if most}
        return dataclasses.replace(self, **some)


@dataclasses.dataclass(frozen=True)
class _File:
    keys: dict[KeyName, Key] = dataclasses.field(default_factory=dict)


def hash_of(key: str) -> str:
    """What the file has in place of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def read_keys(path: Path) -> dict[str, Key]:
    """The keys in a file, by their names.

    Raises:
        FileError: it cannot be read.
        ConfigError: it says something else.
    """
    return from_table(_File, read_toml(path), str(path)).keys


def environment_keys(environment: Mapping[str, str] = os.environ) -> dict[str, Key]:
    """The keys that the environment names, by their names.

    Raises:
        ConfigError: they are not written as they should be.
    """
    keys = {}
    for entry in environment.get(ENVIRONMENT, "").split():
        name, _, digest = entry.partition(":")
        if not (_NAME.fullmatch(name) and _HASH.fullmatch(digest)):
            raise ConfigError(
                f"{ENVIRONMENT} has {shown(name)} and something after it; expected name:sha256, "
                "several with blanks between them, as `python -m serve keys new` prints them"
            )
        keys[name] = Key(digest)
    return keys


def add_key(path: Path, name: str, fields: Mapping[str, object]) -> None:
    """Write one more key into a file, which may not be there yet.

    Args:
        path: of the file.
        name: of the key.
        fields: those of `Key`; what is None is left out.

    Raises:
        ConfigError: the name or a value cannot be, or the name is taken.
        FileError: the file cannot be read or written.
    """
    table = {"keys": {name: {key: value for key, value in fields.items() if value is not None}}}
    from_table(_File, table, "the new key")
    if path.exists() and name in read_keys(path):
        raise ConfigError(f"{path} has a key of the name {name}; choose another, or remove it")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(f"\n{tomli_w.dumps(table)}")
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error
