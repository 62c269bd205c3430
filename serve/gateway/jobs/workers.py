"""Workers on what the table has: each takes something that is due, a few at a time."""

import abc
import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable

from serve.gateway.background import Background
from serve.gateway.jobs.table import Job

logger = logging.getLogger("earshot.gateway")

LOOK_S = 1.0  # at least so often


def next_key(keys: Iterable[str], last: str) -> str | None:
    """Return the key whose turn comes after another's; None where there are no keys."""
    ordered = sorted(keys)
    return next((key for key in ordered if key > last), ordered[0] if ordered else None)


def keys_with(jobs: Iterable[Job], count: int) -> list[str]:
    """List the keys that have at least so many of these jobs."""
    counts = Counter(job.key for job in jobs)
    return [key for key in counts if counts[key] >= count]


class Workers(Background):
    """A process's workers of a kind. For one event loop."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """What is worked on, by the jobs' ids."""
        self.jobs: dict[str, Job] = {}
        """The jobs of `tasks`."""
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Look for work now."""
        self._news.set()

    async def close(self) -> None:
        """End; what is under way is begun again by whoever comes next."""
        await super().close()
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @abc.abstractmethod
    async def _claimed(self) -> Job | None:
        """Take a job that is due; None where none is, or there is no room."""

    @abc.abstractmethod
    async def _work(self, job: Job) -> None:
        """Do what is due."""

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                job = await self._claimed()
            except Exception:  # what one job is like must not keep the others waiting for ever
                logger.exception("jobs cannot be looked for")
                job = None
            if job is not None:
                self._begin_work(job)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    def _begin_work(self, job: Job) -> None:
        task = self.tasks[job.id] = asyncio.create_task(self._work(job))
        self.jobs[job.id] = job

        def ended(task: "asyncio.Task[None]") -> None:
            if self.tasks.get(job.id) is task:
                del self.tasks[job.id], self.jobs[job.id]
            self._news.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s failed in the gateway; it is tried again", job.id, exc_info=error)

        task.add_done_callback(ended)
