"""The table and the audio of jobs, for an event loop: what waits for a disk does so in threads."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from serve.contract.config import Config
from serve.contract.errors import FileError, UnavailableError
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.jobs.audio import AudioFolder
from serve.gateway.jobs.table import Table

logger = logging.getLogger("earshot.gateway")

_THREADS = 4  # of each, so that a database that is away leaves others theirs
TABLE_S = 15.0  # longest call of the table; beyond `table._BUSY_S`

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
        self.for_audio, self._for_table = _Threads("audio"), _Threads("table", TABLE_S)
        # A table's calls are short, and who works on a job is to hold it by one while audio moves.
        self.do, self.quietly = self._for_table.do, self._for_table.quietly

    def discard(self, id: str) -> None:
        """Have a job's audio removed, soon."""
        self.for_audio.begin(self.audio.remove, id)

    def close(self) -> None:
        """Close them."""
        self.for_audio.close()
        self._for_table.close()
        self.table.close()


class _Threads:
    """Threads that wait for a disk or a database. For one event loop.

    Args:
        name: the threads' name.
        limit_s: longest time of a call, in seconds; None: any. The call itself goes on.
    """

    def __init__(self, name: str, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_THREADS, f"earshot-jobs-{name}")
        self._works = True

    def begin(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call something whose end nobody waits for."""
        with contextlib.suppress(RuntimeError):  # closed: what is not removed is an orphan later
            self._threads.submit(call, *args, **kwargs)

    async def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that waits.

        Raises:
            ApiError: that cannot be used just now; the log says why.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                found = await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))
        except FileError as error:
            self._tell(error)
            raise _refusal() from error
        except OSError as error:
            if limit.expired():
                self._tell(FileError(f"jobs cannot be kept: no answer within {self._limit_s:g} s"))
                raise _refusal() from error
            logger.error("a job's audio cannot be kept: %s", error)
            raise errors.no_room_for_upload() from error
        self._tell(None)
        return found

    async def quietly(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Do the same; None where that is not possible now."""
        try:
            return await self.do(call, *args, **kwargs)
        except ApiError:
            return None

    def close(self) -> None:
        """Wait for what was begun."""
        self._threads.shutdown()

    def _tell(self, error: FileError | None) -> None:
        """Log that something has begun to fail, or works again."""
        if error and self._works:
            logger.error("%s; jobs wait until they can be, everything else goes on", error)
        if not (error or self._works):
            logger.info("jobs are kept again")
        self._works = error is None


def _refusal() -> ApiError:
    message = "jobs are not available just now, everything else is; the server's log says why"
    return ApiError(UnavailableError(message))
