"""The load generator for servers and systems: a closed loop, an open loop, and client processes."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.synchronize import Event
from typing import Any, Generic, TypeVar

from eval.processes import ChildProcess, Send, wait_for_any
from serve.contract.errors import DeadlineError

STALL_S = 120.0  # no answer for so long: the server is stuck
MAX_PROCESSES = 6
_CONNECTIONS = 512  # threads of an open loop
_NO_ITEM: Any = object()  # after the last one
T = TypeVar("T")


def closed_loop(
    work: Callable[[T], object],
    items: Iterable[T],
    *,
    at_once: int,
    stop: threading.Event | None = None,
) -> None:
    """Keep `at_once` items in work: each thread takes the next item once its last one is done.

    An interrupt does not end calls in progress; the system's owner must end them.

    Args:
        work: called with one item, from several threads.
        items: taken one by one, never from two threads at once; may be endless if `stop` is given.
        at_once: number of threads.
        stop: ends the loop when it is set.

    Raises:
        Exception: the first one that `work` or `items` raised.
    """
    remaining, lock, ended = iter(items), threading.Lock(), stop or threading.Event()

    def run_worker() -> None:
        while not ended.is_set():
            with lock:
                item = next(remaining, _NO_ITEM)
            if item is _NO_ITEM:
                return
            work(item)

    pool = ThreadPoolExecutor(at_once, thread_name_prefix="load")
    workers = [pool.submit(run_worker) for _ in range(at_once)]
    try:
        done, _ = wait(workers, return_when=FIRST_EXCEPTION)
        for worker in done:
            worker.result()
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Draw arrival times (s) of a Poisson process up to `seconds`, and one more."""
    rng, times = random.Random(seed), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + rng.expovariate(rate))
    return times[1:]


def open_loop(
    work: Callable[[T], float | None], arrivals: Iterable[tuple[float, T]], *, seconds: float
) -> None:
    """Begin items when they are due, independent of earlier ones.

    Args:
        work: called with one item; returns the seconds after which the item comes again, or None.
        arrivals: due times (s from now) and items.
        seconds: after which no item begins; the loop returns when the items in work are done.

    Raises:
        Exception: the first one that `work` raised.
    """
    pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="load")

    async def run_item(due_s: float, item: T) -> None:
        wait_s: float | None = due_s
        while wait_s is not None:
            await asyncio.sleep(wait_s)
            wait_s = await asyncio.get_running_loop().run_in_executor(pool, work, item)

    async def run_items() -> None:
        items = asyncio.gather(*(run_item(*arrival) for arrival in arrivals))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(items, seconds)

    try:
        asyncio.run(run_items())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def processes_for(requests: int, max_processes: int = MAX_PROCESSES) -> int:
    """Return the number of client processes for `requests` in flight: at most half of the cores."""
    return max(1, min(max_processes, (os.cpu_count() or 1) // 2, requests))


class ClientProcesses(contextlib.ExitStack, Generic[T]):
    """Processes that send small messages; use in a `with` block.

    Otherwise all clients would share one interpreter's time.

    Args:
        work: what each process does, as `ChildProcess` takes it; sends messages.
        arguments: further arguments of `work`, for each process.
        timeout_s: the longest time without a message.
    """

    def __init__(
        self,
        work: Callable[..., None],
        arguments: Iterable[tuple[Any, ...]],
        timeout_s: float = STALL_S,
    ) -> None:
        super().__init__()
        self._timeout_s, self._running = timeout_s, list[ChildProcess]()
        for i, values in enumerate(arguments):
            child = ChildProcess(f"client process {i}", work, values, log=None)
            self._running.append(self.enter_context(child))

    def answers(self) -> list[T]:
        """Wait for messages; return at least one, or none once all processes have ended.

        Raises:
            EarshotError: the error of a process.
            UnavailableError: a process died.
            DeadlineError: no message came for too long.
        """
        answers: list[T] = []
        while self._running and not answers:
            children = wait_for_any(self._running, self._timeout_s)
            if not children:
                raise DeadlineError(f"the clients had no answer for {self._timeout_s:.0f} s")
            for child in children:
                answer: T | None = child.receive(self._timeout_s)
                if answer is None:
                    self._running.remove(child)
                else:
                    answers.append(answer)
        return answers


class RequestProcesses(ClientProcesses[T]):
    """Processes that keep requests in flight until told to stop, and check the answers.

    Args:
        opened: a module's function; called in each process with its number, returns a context
            manager of a function that makes the n-th request and returns its answer.
        arguments: arguments of `opened` before the number; pickled.
        in_flight: requests in flight at any time.
        processes: the number of processes.
    """

    def __init__(
        self,
        opened: Callable[..., contextlib.AbstractContextManager[Callable[[int], T]]],
        arguments: tuple[object, ...],
        in_flight: int,
        processes: int,
    ) -> None:
        self._stop = multiprocessing.get_context("spawn").Event()
        threads = [in_flight // processes + (i < in_flight % processes) for i in range(processes)]
        child_arguments = (
            (opened, (*arguments, i), count, self._stop) for i, count in enumerate(threads)
        )
        super().__init__(_keep_in_flight, child_arguments)
        self.callback(self._stop.set)  # called before the processes are ended

    def finish(self) -> list[T]:
        """Send no more, wait for the requests in flight and return their answers, as `answers`."""
        self._stop.set()
        answers = list[T]()
        while more := self.answers():
            answers += more
        return answers


def _keep_in_flight(
    send: Send,
    opened: Callable[..., contextlib.AbstractContextManager[Callable[[int], object]]],
    arguments: Sequence[object],
    threads: int,
    stop: Event,
) -> None:
    """Work in a client process: keep `threads` requests in flight until told to stop."""

    numbers = itertools.takewhile(lambda _: not stop.is_set(), itertools.count())
    with opened(*arguments) as ask:
        closed_loop(lambda number: send(ask(number)), numbers, at_once=threads)
