"""Work that an event loop does beside its requests."""

import abc
import asyncio
import contextlib


class Background(abc.ABC):
    """Work that goes on from `start` to `close`. For one event loop."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End it, and wait for that."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @abc.abstractmethod
    async def _run(self) -> None:
        """Work, without an end."""
