"""The load generator for servers and systems: a closed loop, an open loop, and client processes."""

import contextlib
import heapq
import itertools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.synchronize import Event
from typing import Generic, TypeVar

from eval.processes import ChildProcess, Send, wait_for_any
from serve.contract.errors import DeadlineError

STALL_S = 120.0  # no answer for so long: the server is stuck
MAX_PROCESSES = 6
_CONNECTIONS = 512  # threads of an open loop
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

    def take_items() -> Iterator[T]:
        while not ended.is_set():
            with lock:
                try:
                    item = next(remaining)
                except StopIteration:
                    return
            yield item

    def run_worker() -> None:
        for item in take_items():
            work(item)

    pool = ThreadPoolExecutor(at_once, thread_name_prefix="load")
    loops = [pool.submit(run_worker) for _ in range(at_once)]
    try:
        done, _ = wait(loops, return_when=FIRST_EXCEPTION)
        for loop in done:
            loop.result()
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
        seconds: after which no item begins and the loop returns.
    """
    numbers, changed = itertools.count(), threading.Condition()
    coming = [(due_s, next(numbers), item) for due_s, item in arrivals]
    heapq.heapify(coming)
    left, began_s = len(coming), time.monotonic()

    def visit(item: T) -> None:
        nonlocal left
        again_s = None
        try:
            again_s = work(item)
        finally:
            with changed:
                if again_s is None:
                    left -= 1
                else:
                    due_s = time.monotonic() - began_s + again_s
                    heapq.heappush(coming, (due_s, next(numbers), item))
                changed.notify()

    pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="load")
    try:
        with changed:
            while left and (now_s := time.monotonic() - began_s) < seconds:
                if coming and coming[0][0] <= now_s:
                    pool.submit(visit, heapq.heappop(coming)[2])
                else:
                    until_s = min(coming[0][0], seconds) if coming else seconds
                    changed.wait(until_s - now_s)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def processes_for(requests: int, most: int = MAX_PROCESSES) -> int:
    """Return the number of client processes for `requests` in flight: at most half of the cores."""
    return max(1, min(most, (os.cpu_count() or 1) // 2, requests))


class ClientProcesses(Generic[T]):
    """Processes that keep requests in flight until told to stop; use in a `with` block.

    Otherwise all clients would share one interpreter's time. Each process checks its answers and
    passes on small records.

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
        self.answered: list[T] = []
        self._stop = multiprocessing.get_context("spawn").Event()
        self._running: list[ChildProcess] = []
        self._children = contextlib.ExitStack()
        for i in range(processes):
            threads = in_flight // processes + (i < in_flight % processes)
            given = (opened, (*arguments, i), threads, self._stop)
            child = ChildProcess(f"client process {i}", _keep_in_flight, given, log=None)
            self._running.append(self._children.enter_context(child))
        self.pids = tuple(child.pid for child in self._running)

    def __enter__(self) -> "ClientProcesses[T]":
        """Return itself; leaving the block ends the processes."""
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._children.close()

    def answers(self) -> list[T]:
        """Wait for answers; return at least one, or none once all processes have ended.

        Raises:
            EarshotError: a request failed, or its answer is wrong.
            UnavailableError: a process died.
            DeadlineError: no answer came for too long.
        """
        answers: list[T] = []
        while self._running and not answers:
            ready = wait_for_any(self._running, STALL_S)
            if not ready:
                raise DeadlineError(f"no request was answered for {STALL_S:.0f} s")
            for child in ready:
                answer: T | None = child.receive(STALL_S)
                if answer is None:
                    self._running.remove(child)
                else:
                    answers.append(answer)
        self.answered += answers
        return answers

    def finish(self) -> None:
        """Send no more and wait for the requests in flight; raises as `answers`."""
        self._stop.set()
        while self.answers():
            pass


def _keep_in_flight(
    send: Send,
    opened: Callable[..., contextlib.AbstractContextManager[Callable[[int], object]]],
    arguments: Sequence[object],
    threads: int,
    stop: Event,
) -> None:
    """Work in a client process: keep `threads` requests in flight until told to stop."""

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            if stop.is_set():
                return
            yield number

    with opened(*arguments) as ask:
        closed_loop(lambda number: send(ask(number)), numbers(), at_once=threads)
