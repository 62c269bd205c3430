"""Set the threads of a CPU runtime to the number of cores that other programs leave free.

All threads of a matrix product wait for the slowest one. If another program keeps one of two cores
busy, two threads are several times slower than one. The runtime therefore reads the machine's load
from time to time.

The number of threads changes the last bits of sums, and in bfloat16 many of them.
"""

import math
import os
import time
from collections.abc import Callable

import psutil
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.devices import usable_cores

_LOOK_S = 0.1  # seconds between readings; the kernel counts in hundredths of a second
_IGNORED = 0.4  # cores that other programs may use before the runtime gives up a thread
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are in "user" already


def busy_s() -> float:
    """Return the seconds that this process's cores have been busy with any program's work."""
    cores = psutil.cpu_times(percpu=True)
    mine = (cores[number] for number in os.sched_getaffinity(0) if number < len(cores))
    times = (core._asdict().items() for core in mine)
    return float(sum(seconds for core in times for name, seconds in core if name not in _IDLE))


class Threads:
    """Sets the number of threads with which the calling thread computes.

    Args:
        config: `threads` is the maximum; 0: OMP_NUM_THREADS, or else every usable core.
        busy_s: returns the seconds that the cores were busy with any program's work.
        own_s: returns the seconds that the cores worked for this process.
        clock: returns the time in seconds.
        cores: the number of cores that this process may use; None: ask the system.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        busy_s: Callable[[], float] = busy_s,
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        cores: int | None = None,
    ) -> None:
        asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        # Like libgomp, ignore a value that is not a number.
        self.most = config.threads or (int(asked) if asked.isdecimal() else 0) or usable_cores()
        self._cores = cores or len(os.sched_getaffinity(0))
        self._busy_s = busy_s
        self._own_s = own_s
        self._clock = clock
        self._seen = (clock(), busy_s(), own_s())
        self.set(self.most)

    def set(self, count: int) -> None:
        """Compute with `count` threads from now on."""
        self.count = count
        torch.set_num_threads(count)

    def follow(self) -> None:
        """Adapt to the machine's load, at most every `_LOOK_S` seconds."""
        if self.most == 1 or self._clock() - self._seen[0] < _LOOK_S:
            return
        seen = self._clock(), self._busy_s(), self._own_s()
        elapsed, busy, own = (now - then for now, then in zip(seen, self._seen, strict=True))
        self._seen = seen
        free = self._cores - max(0.0, busy - own) / elapsed
        count = max(1, min(self.most, math.floor(free + _IGNORED)))
        if count != self.count:
            self.set(count)
