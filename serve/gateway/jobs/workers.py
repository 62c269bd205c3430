"""Workers that claim what is due in the table of jobs, a few at a time."""

import abc
import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable

from serve.gateway.background import Background
from serve.gateway.jobs.table import JobRecord

logger = logging.getLogger("earshot.gateway")

LOOK_S = 1.0
"""Seconds between two looks at the table, at most."""


class KeyTurns:
    """Chooses API keys in turn, by their names."""

    def __init__(self) -> None:
        self._last = ""

    def next(self, keys: Iterable[str]) -> str | None:
        """Return the key that comes after the last one; None if there are no keys."""
        ordered = sorted(keys)
        if not ordered:
            return None
        self._last = next((key for key in ordered if key > self._last), ordered[0])
        return self._last


def keys_with(jobs: Iterable[JobRecord], count: int) -> list[str]:
    """List the keys that have at least `count` of these jobs."""
    counts = Counter(job.key for job in jobs)
    return [key for key in counts if counts[key] >= count]


class WorkerPool(Background):
    """A process's workers of one kind. For one event loop."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """The work under way, by the jobs' ids."""
        self.jobs: dict[str, JobRecord] = {}
        """The jobs of `tasks`."""
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Look for work now."""
        self._news.set()

    async def close(self) -> None:
        """End the work; the next process that claims the jobs begins them again."""
        await super().close()
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @abc.abstractmethod
    async def _claimed(self) -> JobRecord | None:
        """Claim a job that is due; return None if none is, or there is no room."""

    @abc.abstractmethod
    async def _work(self, job: JobRecord) -> None:
        """Work on a claimed job to its end."""

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                job = await self._claimed()
            except Exception:  # one odd job must not keep the others waiting for ever
                logger.exception("jobs cannot be looked for")
                job = None
            if job is not None:
                self._begin_work(job)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    def _begin_work(self, job: JobRecord) -> None:
        task = self.tasks[job.id] = asyncio.create_task(self._work(job))
        self.jobs[job.id] = job

        def ended(task: "asyncio.Task[None]") -> None:
            if self.tasks.get(job.id) is task:
                del self.tasks[job.id], self.jobs[job.id]
            self._news.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s failed in the gateway; it is tried again", job.id, exc_info=error)

        task.add_done_callback(ended)
