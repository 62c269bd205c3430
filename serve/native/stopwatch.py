"""Measure how long work takes on its device."""

import collections
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch


class Stopwatch:
    """Measures seconds from construction to `stop`, with the device's clock on CUDA.

    Args:
        device: the device that works.
        phase: the name of the work for a profiler; empty if it is part of another phase.
    """

    ranges: ClassVar[Callable[[str], AbstractContextManager[object]] | None] = None
    """A function that opens a profiler's range by name; None without a profiler."""

    def __init__(self, device: torch.device, phase: str = "") -> None:
        self._range = Stopwatch.ranges(phase) if Stopwatch.ranges is not None and phase else None
        if self._range is not None:
            self._range.__enter__()
        self._events: list[Any] = []  # torch.cuda.Event
        if device.type == "cuda":
            event: Any = torch.cuda.Event  # its annotations are incomplete
            self._events = [event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self.began_s = self._ended = time.perf_counter()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._ended = time.perf_counter()
        if self._range is not None:
            self._range.__exit__(None, None, None)

    def delay(self, stream: torch.cuda.Stream) -> None:
        """Make later work on a stream wait for the measured work."""
        for event in self._events[1:]:
            stream.wait_event(event)

    @property
    def is_finished(self) -> bool:
        """Whether the device has reached `stop`."""
        return all(event.query() for event in self._events)

    def seconds(self) -> float:
        """Wait until the time is known, and return it."""
        if not self._events:
            return self._ended - self.began_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def total(stopwatches: collections.deque[Stopwatch]) -> float:
    """Remove the leading stopwatches with known times, and return the sum of these times."""
    seconds = 0.0
    while stopwatches and stopwatches[0].is_finished:
        seconds += stopwatches.popleft().seconds()
    return seconds
