"""Usage of API keys, by day in UTC and model: requests, and seconds of audio.

It is stored in an SQLite file, `server.usage_file` or one in the run's folder, to which all of the
gateway's processes add. Every second a process adds its counts and reads the usage of the day, so
no request waits for a disk. Counts that cannot be written stay in memory and are tried again.
"""

import asyncio
import contextlib
import datetime
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serve.contract.config import Config
from serve.contract.errors import ConfigError, FileError, UnavailableError, shown
from serve.gateway import errors
from serve.gateway.background import Background
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey, Clock

logger = logging.getLogger("earshot.gateway")

FILE = "usage.sqlite"
"""The file's name in the run's folder, if none is configured."""

_INTERVAL_S = 1.0
_BUSY_S = 5.0  # longest wait for another process
_DAY_S = 86_400

_TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT, requests INTEGER NOT NULL, audio_s REAL NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, audio_s = audio_s + excluded.audio_s
"""
_SPENT = "SELECT key, SUM(audio_s) FROM usage WHERE day = ? GROUP BY key"
_ROWS = """
SELECT * FROM usage WHERE day BETWEEN ? AND ? AND key = coalesce(?, key)
ORDER BY day, key, model
"""


class UsageRecord(NamedTuple):
    """The usage of a key, by model and day."""

    day: str  # in UTC, as 2027-01-31
    key: str  # its name; empty if there are no keys
    model: str
    requests: int
    audio_s: float


def day_of(text: str) -> str:
    """Return a day as ISO 8601 writes it.

    Raises:
        ConfigError: the text is no day.
    """
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise ConfigError(f"{shown(text)} is no day; expected one such as 2027-01-31") from None


def month_until(day: str) -> str:
    """Return the first day of a day's month."""
    return f"{day[:8]}01"


def add_usage(path: Path, rows: Sequence[UsageRecord], day: str) -> dict[str, float]:
    """Add rows to a file, all or none; return the seconds of audio of each key in a day.

    Raises:
        FileError: the file cannot be written or read.
    """
    with _opened(path) as connection:
        connection.executemany(_ADD, rows)
        return dict(connection.execute(_SPENT, (day,)))


def read_usage(path: Path, first: str, last: str, key: str | None = None) -> list[UsageRecord]:
    """Return the usage of a key, or of each, from one day to another.

    Raises:
        FileError: the file cannot be read.
    """
    with _opened(path) as connection:
        return list(map(UsageRecord._make, connection.execute(_ROWS, (first, last, key))))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file of usage for one transaction; make it if it is missing."""
    try:
        with contextlib.closing(sqlite3.connect(path, _BUSY_S)) as connection, connection:
            connection.execute(_TABLE)
            yield connection
    except sqlite3.Error as error:
        raise FileError(f"{path} cannot be used to count usage: {error}") from error


class Usage(Background):
    """Counts the usage of keys, and rejects keys that have used up the day's quota.

    For one event loop.

    Args:
        config: names the file.
        folder: the run's folder.
        clock: seconds since 1970.
    """

    def __init__(self, config: Config, folder: Path, clock: Clock = time.time) -> None:
        self._path = Path(config.server.usage_file or folder / FILE)
        self._clock = clock
        # By day, key and model; not in the file yet. Counter's types know integers alone.
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._audio_s: Any = Counter()
        self._spent: dict[str, float] = {}  # seconds of audio in the file, by key
        self._spent_day = ""
        self._exchange_lock = asyncio.Lock()

    @property
    def day(self) -> str:
        """The day in UTC, as 2027-01-31."""
        return datetime.datetime.fromtimestamp(self._clock(), datetime.UTC).date().isoformat()

    @property
    def unwritten_s(self) -> float:
        """Seconds of audio that were counted and are not in the file."""
        return float(sum(self._audio_s.values()))

    def require(self, api_key: ApiKey) -> None:
        """Reject a key that has had its audio of the day.

        Raises:
            ApiError: 429, it has.
        """
        quota_s = api_key.key.audio_s_per_day
        if quota_s and self._used_s(api_key.name) >= quota_s:
            wait_s = _DAY_S - self._clock() % _DAY_S
            raise errors.key_limit("audio_s_per_day", api_key.name, wait_s, "insufficient_quota")

    def count(self, key: str, model: str, requests: int, audio_s: float) -> None:
        """Count usage of a key."""
        label = self.day, key, model
        self._requests[label] += requests
        self._audio_s[label] += audio_s

    async def rows(self, key: str, first: str, last: str) -> list[UsageRecord]:
        """Return the usage of a key from one day to another.

        Raises:
            ApiError: 503, the file cannot be read or written.
        """
        if await self.exchange():
            with contextlib.suppress(FileError):  # the next exchange logs it
                return await asyncio.to_thread(read_usage, self._path, first, last, key)
        raise ApiError(UnavailableError("usage cannot be told just now; the server's log says why"))

    async def exchange(self) -> bool:
        """Write the counts and read the sums of the day, even if the caller is cancelled.

        Returns:
            Whether the file could be used.
        """
        return await asyncio.shield(asyncio.create_task(self._exchange()))

    async def close(self) -> None:
        """Write the last counts."""
        await super().close()
        await self.exchange()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.exchange()

    async def _exchange(self) -> bool:
        async with self._exchange_lock:
            day, requests, audio_s = self.day, self._requests.copy(), self._audio_s.copy()
            labels: set[tuple[str, str, str]] = requests.keys() | audio_s.keys()
            rows = [UsageRecord(*label, requests[label], audio_s[label]) for label in labels]
            try:
                self._spent = await asyncio.to_thread(add_usage, self._path, rows, day)
            except FileError as error:
                text = "%s; requests are answered, and counted in memory until it can"
                logger.error(text, error, extra={"max_lines": 1})
                return False
            self._spent_day = day
            self._requests -= requests  # counts since the copy stay
            self._audio_s -= audio_s
            return True

    def _used_s(self, key: str) -> float:
        """Return a key's seconds of today: of all processes a second ago, and of this one now."""
        today = self.day
        in_file = self._spent.get(key, 0.0) if today == self._spent_day else 0.0
        counts = self._audio_s.items()
        own_s = (audio_s for (day, name, _), audio_s in counts if (day, name) == (today, key))
        return in_file + float(sum(own_s))
