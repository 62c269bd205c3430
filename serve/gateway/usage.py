"""What each key has had, by day in UTC and model: requests, and seconds of audio.

It stands in a file of SQLite's, `server.usage_file`, to which all of the gateway's processes add,
and which outlives them; where none is named, in the run's folder. Every second a process adds what
it has counted and reads what all have had of the day, so no request waits for a disk. What cannot
be written stays in memory and is tried again.
"""

import asyncio
import dataclasses
import datetime
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serve.contract.config import Config
from serve.contract.errors import ConfigError, FileError, UnavailableError, shown
from serve.gateway import errors, sqlite
from serve.gateway.background import Background
from serve.gateway.errors import ApiError
from serve.gateway.keys import ApiKey

logger = logging.getLogger("earshot.gateway")

FILE = "usage.sqlite"
"""Name in the run's folder, where no file is configured."""

_INTERVAL_S = 1.0
_BUSY_S = 5.0  # most that another process is waited for
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


@dataclasses.dataclass(frozen=True)
class Row:
    """What a key has had of a model in a day."""

    day: str  # in UTC, as 2027-01-31
    key: str  # its name; empty where there are no keys
    model: str
    requests: int
    audio_s: float


def day_of(text: str) -> str:
    """Read a day, to write it in one way.

    Raises:
        ConfigError: it is none.
    """
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise ConfigError(f"{shown(text)} is no day; expected one such as 2027-01-31") from None


def month_until(day: str) -> str:
    """Return the first day of a day's month."""
    return f"{day[:8]}01"


class UsageFile:
    """The file. One thread has it at a time.

    Args:
        path: of it; it may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None

    def add(self, rows: Sequence[Row], day: str) -> dict[str, float]:
        """Add rows, all or none; return the seconds of audio of each key in a day.

        Raises:
            FileError: they cannot be written, or these not be read.
        """
        try:
            with self._opened() as connection:  # what fails was not added, and may be again
                connection.executemany(_ADD, map(dataclasses.astuple, rows))
                return dict(connection.execute(_SPENT, (day,)))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def rows(self, first: str, last: str, key: str | None = None) -> list[Row]:
        """List what a key, or each, has had from one day to another.

        Raises:
            FileError: it cannot be read.
        """
        try:
            return [Row(*found) for found in self._opened().execute(_ROWS, (first, last, key))]
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close it; the next call opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self.path, _BUSY_S, check_same_thread=False)
            sqlite.join(self._connection, _BUSY_S)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(_TABLE)
        return self._connection

    def _failed(self, error: sqlite3.Error) -> FileError:
        self.close()
        return FileError(f"{self.path} cannot be used to count usage: {error}")


class Usage(Background):
    """Counts what keys have, and refuses those whose day is used up. For one event loop.

    Args:
        config: names the file.
        folder: of the run.
        clock: in seconds since 1970.
    """

    def __init__(
        self, config: Config, folder: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = UsageFile(Path(config.server.usage_file or folder / FILE))
        self._clock = clock
        self._counted: dict[tuple[str, str, str], Row] = {}  # and not in the file
        self._written: dict[tuple[str, str, str], Row] = {}  # just now
        self._spent: dict[str, float] = {}  # of the file, by key
        self._spent_day = ""
        self._one = asyncio.Lock()
        self._works = True

    @property
    def day(self) -> str:
        """Today, in UTC, as 2027-01-31."""
        return datetime.datetime.fromtimestamp(self._clock(), datetime.UTC).date().isoformat()

    @property
    def unwritten_s(self) -> float:
        """Seconds of audio that were counted and are not in the file."""
        return sum(row.audio_s for row in self._unwritten())

    def require(self, api_key: ApiKey) -> None:
        """Refuse a caller whose key has had its audio of the day.

        Raises:
            ApiError: it has.
        """
        most = api_key.key.audio_s_per_day if api_key.key else 0.0
        if most and self._had_s(api_key.name) >= most:
            wait_s = _DAY_S - self._clock() % _DAY_S
            raise errors.key_limit("audio_s_per_day", api_key.name, wait_s, "insufficient_quota")

    def count(self, key: str, model: str, requests: int, audio_s: float) -> None:
        """Count what a key has had."""
        self._add(Row(self.day, key, model, requests, audio_s))

    async def rows(self, key: str, first: str, last: str) -> list[Row]:
        """List what a key has had from one day to another.

        Raises:
            ApiError: the file cannot be read, or not be written.
        """
        await self.exchange()
        if self._works:
            try:
                async with self._one:
                    return await asyncio.to_thread(self._file.rows, first, last, key)
            except FileError as error:
                self._tell(error)
        raise ApiError(UnavailableError("usage cannot be told just now; the server's log says why"))

    async def exchange(self) -> None:
        """Write what was counted and read the day's sums; goes on where a caller is cancelled."""
        await asyncio.shield(asyncio.create_task(self._exchange()))

    async def close(self) -> None:
        """Write what is left."""
        await super().close()
        await self.exchange()
        self._file.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.exchange()

    async def _exchange(self) -> None:
        async with self._one:
            day = self.day
            self._written, self._counted = self._counted, {}
            rows = list(self._written.values())
            try:
                self._spent = await asyncio.to_thread(self._file.add, rows, day)
            except FileError as error:
                for row in rows:
                    self._add(row)
                self._tell(error)
            else:
                self._spent_day = day
                self._tell(None)
            self._written = {}

    def _tell(self, error: FileError | None) -> None:
        """Log that the file has begun to fail, or to work again."""
        if error and self._works:
            logger.error("%s; requests are answered, and counted in memory until it can", error)
        if not (error or self._works):
            logger.info("usage is counted in %s again", self._file.path)
        self._works = error is None

    def _add(self, row: Row) -> None:
        place = (row.day, row.key, row.model)
        if before := self._counted.get(place):
            requests, audio_s = before.requests + row.requests, before.audio_s + row.audio_s
            row = dataclasses.replace(row, requests=requests, audio_s=audio_s)
        self._counted[place] = row

    def _had_s(self, key: str) -> float:
        """Sum up a key's audio of today: of all processes a second ago, and of this one now."""
        day = self.day
        in_file = self._spent.get(key, 0.0) if day == self._spent_day else 0.0
        own = (row.audio_s for row in self._unwritten() if (row.day, row.key) == (day, key))
        return in_file + sum(own)

    def _unwritten(self) -> tuple[Row, ...]:
        return (*self._counted.values(), *self._written.values())
