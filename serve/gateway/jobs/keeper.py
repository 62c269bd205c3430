"""The table and the audio of jobs, for an event loop: what waits for a disk does so in threads."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from serve.contract.config import Config
from serve.contract.errors import FileError, UnavailableError
from serve.gateway import refusals
from serve.gateway.jobs.audio import AudioFolder
from serve.gateway.jobs.table import Table
from serve.gateway.refusals import Refusal

logger = logging.getLogger("earshot.gateway")

_THREADS = 4  # of their own, so that a database that is away leaves others theirs

P = ParamSpec("P")
T = TypeVar("T")


class Keeper:
    """Both of them. For one event loop.

    Args:
        config: says where.

    Raises:
        ConfigError: they cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self.audio = AudioFolder(Path(config.jobs.folder))
        self.table = Table(config)
        self._threads = ThreadPoolExecutor(_THREADS, "earshot-jobs")
        self._works = True

    async def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that waits for the disk or the database.

        Raises:
            Refusal: that cannot be used just now; the log says why.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))
        except FileError as error:
            self._tell(error)
            message = "jobs cannot be kept just now; the server's log says why"
            raise Refusal(UnavailableError(message)) from error
        except OSError as error:
            logger.error("a job's audio cannot be kept: %s", error)
            raise refusals.no_room_for_upload() from error
        self._tell(None)
        return found

    async def quietly(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do the same; None where that is not possible now."""
        try:
            return await self.do(call, *args, **kwargs)
        except Refusal:
            return None

    def close(self) -> None:
        """Close them."""
        self._threads.shutdown()
        self.table.close()

    def _tell(self, error: FileError | None) -> None:
        """Log that the table has begun to fail, or to work again."""
        if error and self._works:
            logger.error("%s; jobs wait until they can be", error)
        if not (error or self._works):
            logger.info("jobs are kept in %s again", self.table.name)
        self._works = error is None
