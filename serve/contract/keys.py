"""API keys: who may use a server, by the hashes of their keys.

A key is 256 random bits, so its plain SHA-256 tells nothing of it. A file says which there are:

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    requests_per_minute = 60  # each limit may be left out
    audio_s_per_minute = 600
    audio_s_per_day = 36000  # in UTC
    requests_at_once = 8
    live_streams = 2
    expires = "2027-01-31"  # in UTC: the first day on which it is good no more, or a time

and so does the environment: EARSHOT_API_KEYS holds name:sha256, several with blanks between them.
"""

import dataclasses
import datetime
import hashlib
import math
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w

from serve.contract.codec import from_table, read_toml, text_that
from serve.contract.errors import ConfigError, FileError, shown
from serve.contract.fields import Count, Seconds, SecondsOrNone

ENVIRONMENT = "EARSHOT_API_KEYS"

CLIENT_SECRET_PREFIX = "ek_"
"""The beginning of a client secret, as of OpenAI's: `serve.gateway.client_secrets`."""

_PREFIX = "earshot_"  # by which scanners for leaked secrets can know them
_BYTES = 32
_ID_DIGITS = 32
_HASH = re.compile("[0-9a-f]{64}")
_NAME = re.compile("[A-Za-z0-9_-]{1,60}")


def _time_of(text: str) -> datetime.datetime | None:
    """Read a time, or a day as its beginning, in UTC unless it says otherwise; None: neither."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


Hash = Annotated[str, text_that(_HASH.fullmatch, "a SHA-256 as 64 digits of 0-9a-f")]
Expiry = Annotated[str, text_that(_time_of, "a day or a time, as 2027-01-31 or 2027-01-31T12:00Z")]
KeyName = Annotated[str, text_that(_NAME.fullmatch, "1 to 60 of A-Z, a-z, 0-9, _ and -")]


@dataclasses.dataclass(frozen=True)
class Key:
    """All that is known of a key; the key itself is not."""

    sha256: Hash
    requests_per_minute: Count | None = None  # None: no limit
    audio_s_per_minute: Seconds | None = None
    requests_at_once: Count | None = None
    live_streams: Count | None = None
    audio_s_per_day: SecondsOrNone = 0.0  # in UTC, of all processes together; 0: no limit
    expires: Expiry | None = None  # None: never

    @property
    def limits(self) -> tuple[float | None, ...]:
        """The values of `LIMITS`, in their order."""
        return tuple(getattr(self, name) for name in LIMITS)

    @property
    def public_id(self) -> str:
        """Return an id that names the key to its server and tells nobody else anything."""
        return hashlib.sha256(f"earshot key {self.sha256}".encode()).hexdigest()[:_ID_DIGITS]

    @property
    def expired(self) -> bool:
        """Tell whether it is good no more."""
        end = _time_of(self.expires) if self.expires else None
        return end is not None and datetime.datetime.now(datetime.UTC) >= end

    def share(self, processes: int) -> "Key":
        """Return the key with what one of so many processes may give it, rounded up."""
        if processes == 1:
            return self
        limits = zip(LIMITS, self.limits, strict=True)
        shares: dict[str, Any] = {
            name: math.ceil(most / processes)
            for name, most in limits
            if most and name != "audio_s_per_day"
        }
        return dataclasses.replace(self, **shares)


LIMITS = (
    *("requests_per_minute", "audio_s_per_minute", "audio_s_per_day"),
    *("requests_at_once", "live_streams"),
)


@dataclasses.dataclass(frozen=True)
class _File:
    keys: dict[KeyName, Key] = dataclasses.field(default_factory=dict)


def hash_of(key: str) -> str:
    """Hash a key, as the file has it in its place."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Make a key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def read_keys(path: Path) -> dict[str, Key]:
    """Read the keys in a file, by their names.

    Raises:
        FileError: it cannot be read.
        ConfigError: it says something else.
    """
    command = f"python -m serve keys new --name NAME --file {path}"
    advice = f"expected a file of API keys, as `{command}` makes it"
    return from_table(_File, read_toml(path, advice), str(path)).keys


def environment_keys(environment: Mapping[str, str] = os.environ) -> dict[str, Key]:
    """Read the keys of the environment, by their names.

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
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    _write(path, f"{before}\n{tomli_w.dumps(table)}")


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of a file; a server that runs knows it no more within seconds.

    Raises:
        ConfigError: there is none of this name, or the file is not as `add_key` writes it.
        FileError: the file cannot be read or written.
    """
    before, after, _ = _parted(path, name)
    _replace(path, before + after, name, None)


def expire_key(path: Path, name: str, expires: str) -> None:
    """Write into a file from when on a key is good no more.

    Raises:
        ConfigError: there is none of this name, that is no time, or the file is not as `add_key`
            writes it.
        FileError: the file cannot be read or written.
    """
    if _time_of(expires) is None:
        raise ConfigError(
            f"expires = {shown(expires)}; expected a day or a time, as 2027-01-31 or "
            "2027-01-31T12:00Z"
        )
    before, after, lines = _parted(path, name)
    kept = [line for line in lines if not re.match(r"\s*expires\s*=", line)]
    while kept and not kept[-1].strip():
        kept.pop()
    text = "".join([*kept, f'expires = "{expires}"\n', "\n" if after else ""])
    _replace(path, before + text + after, name, expires)


def _parted(path: Path, name: str) -> tuple[str, str, list[str]]:
    """Split a file into what stands before a key's lines, what behind them, and these."""
    if name not in read_keys(path):
        raise ConfigError(f"{path} has no key of the name {shown(name)}")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    heads = [i for i, line in enumerate(lines) if line.lstrip().startswith("[")]
    named = re.compile(rf"\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]")
    starts = [i for i in heads if named.match(lines[i])]
    if len(starts) != 1:
        raise ConfigError(f"{path} has no line [keys.{name}]; edit it by hand")
    end = min((i for i in heads if i > starts[0]), default=len(lines))
    return "".join(lines[: starts[0]]), "".join(lines[end:]), lines[starts[0] : end]


def _replace(path: Path, text: str, name: str, expires: str | None) -> None:
    """Write a file in which one key alone has changed: it has gone, or expires then."""
    keys = dict(read_keys(path))
    key = keys.pop(name)
    if expires is not None:
        keys[name] = dataclasses.replace(key, expires=expires)
    if from_table(_File, tomllib.loads(text), str(path)).keys != keys:
        raise ConfigError(f"{path} is not written as expected; edit it by hand")
    _write(path, text)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, for its owner alone."""
    new = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise FileError(f"cannot write {path}: {error.strerror}") from error
