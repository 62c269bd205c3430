"""Seconds that work took, on the device that did it."""

import collections
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch


class Stopwatch:
    """Seconds between construction and `stop`, of the device's own time where that is CUDA.

    Args:
        device: that works.
        phase: name of what it does; empty: it is a part of another phase.
    """

    ranges: ClassVar[Callable[[str], AbstractContextManager[object]] | None] = None
    """Opens a profiler's range of a name, for whoever profiles; None: there is no profiler."""

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
        """End the measurement."""
        if self._events:
            self._events[1].record()
        self._ended = time.perf_counter()
        if self._range is not None:
            self._range.__exit__(None, None, None)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on a stream from now on wait for what was measured."""
        for event in self._events[1:]:
            stream.wait_event(event)

    @property
    def known(self) -> bool:
        """Tell whether the device has come as far as `stop`."""
        return all(event.query() for event in self._events)

    def seconds(self) -> float:
        """Return the time measured; waits until it is known."""
        if not self._events:
            return self._ended - self.began_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def total(stopwatches: collections.deque[Stopwatch]) -> float:
    """Take the leading stopwatches that are known, and add them up."""
    seconds = 0.0
    while stopwatches and stopwatches[0].known:
        seconds += stopwatches.popleft().seconds()
    return seconds
