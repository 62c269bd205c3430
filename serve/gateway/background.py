"""Background tasks of an event loop, and the monitor of the loop itself."""

import abc
import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from serve.wire import liveness

_TICK_S = 0.05
TICKS = round(liveness.INTERVAL_S / _TICK_S)  # between two heartbeats
_MINUTE = 60  # heartbeats

T = TypeVar("T")


class Background(abc.ABC):
    """A task that runs from `start` to `close`. For one event loop."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Cancel the task, and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @abc.abstractmethod
    async def _run(self) -> None:
        """Run, without an end."""


async def unless(event: Awaitable[Any], error: Callable[[], Exception], answer: Awaitable[T]) -> T:
    """Wait for an answer; if an event comes first, cancel it and raise an error.

    Args:
        event: the event that may come first.
        error: makes the error.
        answer: the answer.
    """
    tasks = answered, _ = asyncio.ensure_future(answer), asyncio.ensure_future(event)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise error()
        return answered.result()
    finally:
        for task in tasks:
            task.cancel()
        if not answered.done():  # the caller may close files that it uses
            await asyncio.wait([answered])


class LoopWatch(Background):
    """Measures how late the loop is, and touches the heartbeat file while it runs.

    Args:
        alive: the file; see `serve.wire.liveness`.
    """

    def __init__(self, alive: Path) -> None:
        self._alive = alive
        self._late_s: collections.deque[float] = collections.deque([0.0], maxlen=_MINUTE)

    @property
    def longest_s(self) -> float:
        """The longest turn of the last minute, in seconds, at most 50 ms too short."""
        return max(self._late_s)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            liveness.touch_heartbeat(self._alive)
            self._late_s.append(0.0)
            for _ in range(TICKS):
                due_s = clock() + _TICK_S
                await asyncio.sleep(_TICK_S)
                self._late_s[-1] = max(self._late_s[-1], clock() - due_s)
