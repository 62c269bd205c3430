"""The table and the audio of jobs, for an event loop: threads wait for the disk or the database."""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from serve.contract.config import Config
from serve.contract.errors import ConfigError, FileError, UnavailableError
from serve.contract.files import sync
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.jobs.table import JobTable

logger = logging.getLogger("earshot.gateway")

TABLE_S = 15.0
"""Seconds of the longest call of the table; more than `table._BUSY_S`."""
ORPHAN_S = 3600.0
"""Seconds after which a file of no job is removed; a younger one may be of a job to come."""
_THREADS = 4  # of each pool: a database that is away leaves the disk's threads free
_CHUNK_BYTES = 2**20

T = TypeVar("T")


class JobStorage:
    """The table of jobs, and the audio of those that have not ended. For one event loop.

    A file of audio is there whole or not at all.

    Args:
        config: where they are; the jobs' folder is made if it does not exist.

    Raises:
        ConfigError: they cannot be used.
    """

    def __init__(self, config: Config) -> None:
        folder = Path(config.jobs.folder)
        self._folder = folder.absolute() / "audio"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"jobs.folder = {folder} cannot be made: {error.strerror}") from error
        self.table = JobTable(config)
        # A call of the table is short, and must not wait until audio has been copied: it renews
        # the lease of a job.
        self._audio_threads = ThreadPoolExecutor(_THREADS, "earshot-jobs-audio")
        self._table_threads = ThreadPoolExecutor(_THREADS, "earshot-jobs-table")

    async def do(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call of the table, and return its result.

        Raises:
            ApiError: 503, the database cannot be used now; the log says why.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TABLE_S):  # the call itself continues
                return await loop.run_in_executor(self._table_threads, call, *args)
        except (FileError, TimeoutError) as error:
            reason = str(error) or f"jobs cannot be kept: no answer within {TABLE_S:g} s"
            text = "%s; jobs wait until they can be, everything else goes on"
            logger.error(text, reason, extra={"max_lines": 1})
            message = "jobs are not available just now, everything else is; the server's log says "
            raise ApiError(UnavailableError(f"{message}why")) from error

    async def quietly(self, call: Callable[..., T], *args: Any) -> T | None:
        """Make a call like `do`; return None if that is not possible now."""
        try:
            return await self.do(call, *args)
        except ApiError:
            return None

    async def on_disk(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call that reads or writes audio, and return its result.

        Raises:
            ApiError: 503, the disk cannot be used now; the log says why.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._audio_threads, call, *args)
        except OSError as error:
            logger.error("a job's audio cannot be kept: %s", error)
            raise errors.no_room_for_upload() from error

    def close(self) -> None:
        """Wait for the calls that have begun, and close both."""
        self._audio_threads.shutdown()
        self._table_threads.shutdown()
        self.table.close()

    # ------------------------------------------------------------ audio

    def discard(self, id: str) -> None:
        """Have a job's audio removed, soon. A file that cannot be removed becomes an orphan."""
        with contextlib.suppress(RuntimeError):  # closed
            self._audio_threads.submit(self.path(id).unlink, missing_ok=True)

    def path(self, id: str) -> Path:
        """Return the path of a job's audio."""
        return self._folder / id

    def part(self, id: str, token: str) -> Path:
        """Return the path of audio that is not whole yet; see `seal`."""
        return self._folder / f"{id}.{token}.part"

    def keep(self, id: str, source: BinaryIO) -> str:
        """Write a file's content, so that it survives a loss of power; return its SHA-256.

        Raises:
            OSError: it cannot be written.
        """
        part = self.part(id, "new")
        try:
            with part.open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
            self.seal(part, id)
        finally:
            part.unlink(missing_ok=True)
        source.seek(0)
        return hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]

    def seal(self, part: Path, id: str) -> None:
        """Make a part, which is whole now, the audio of a job.

        Raises:
            OSError: the disk fails.
        """
        sync(part)
        part.replace(self.path(id))
        sync(self._folder)

    def remove_orphans(self, ids: Collection[str]) -> None:
        """Remove the files that belong to none of these jobs: processes that died left them."""
        oldest = time.time() - ORPHAN_S
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in ids and path.stat().st_mtime < oldest:
                    path.unlink()
