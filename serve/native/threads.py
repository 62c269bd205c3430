"""Adapt the number of threads of a CPU runtime to the cores that other programs leave free.

All threads of a matrix product wait for the slowest one. If another program keeps one of two cores
busy, two threads are several times slower than one. The runtime therefore reads the machine's load
from time to time.

The number of threads changes the last bits of sums, and in bfloat16 many of them.
"""

import math
import os
import time

import psutil
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.devices import usable_cores

_READ_INTERVAL_S = 0.1  # the kernel counts in hundredths of a second
_IGNORED = 0.4  # cores that other programs may use before the runtime gives up a thread
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are in "user" already


def busy_s() -> float:
    """Return the seconds that this process's cores have been busy with any program's work."""
    cores = psutil.cpu_times(percpu=True)
    usable = (cores[number] for number in os.sched_getaffinity(0) if number < len(cores))
    times = (core._asdict().items() for core in usable)
    return float(sum(seconds for core in times for name, seconds in core if name not in _IDLE))


class Threads:
    """Sets the number of threads with which the calling thread computes.

    Args:
        config: `threads` is the maximum; 0: OMP_NUM_THREADS, or else every usable core.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        environment = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        # Like libgomp, ignore a value that is not a number.
        default = int(environment) if environment.isdecimal() else 0
        self.max_count = config.threads or default or usable_cores()
        self._last = _reading()
        self.set(self.max_count)

    def set(self, count: int) -> None:
        """Compute with `count` threads from now on."""
        self.count = count
        torch.set_num_threads(count)

    def adapt(self) -> None:
        """Adapt to the machine's load, at most every `_READ_INTERVAL_S` seconds."""
        if self.max_count == 1 or time.perf_counter() - self._last[0] < _READ_INTERVAL_S:
            return
        reading = _reading()
        elapsed, busy, own_busy = (new - old for new, old in zip(reading, self._last, strict=True))
        self._last = reading
        free_cores = len(os.sched_getaffinity(0)) - max(0.0, busy - own_busy) / elapsed
        count = max(1, min(self.max_count, math.floor(free_cores + _IGNORED)))
        if count != self.count:
            self.set(count)


def _reading() -> tuple[float, float, float]:
    """Return the time, the cores' seconds for any program, and those for this process."""
    return time.perf_counter(), busy_s(), time.process_time()
