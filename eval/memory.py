"""Memory of processes, sampled while they work."""

import contextlib
import re
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from eval.processes import descendants

SAMPLE_S = 0.1


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory; 0 once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0


def tree_memory_bytes(pid: int) -> int:
    """Measure the resident memory of a process and all its descendants; 0 once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(map(resident_bytes, [psutil.Process(pid), *descendants(pid)]))
    return 0


def shared_fairly_bytes(pid: int) -> int:
    """Measure a process's memory, a page that n processes share as 1/n; 0 once it has ended."""
    with contextlib.suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0


class Watch:
    """Samples memory for the length of a `with` block.

    Args:
        measure: returns bytes.
    """

    def __init__(self, measure: Callable[[], int]) -> None:
        self.peak_bytes = 0
        self.first_bytes = 0
        self._measure = measure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "Watch":
        """Begin, and return itself."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            size = self._measure()
            self.first_bytes = self.first_bytes or size
            self.peak_bytes = max(self.peak_bytes, size)
            if self._stopped.wait(SAMPLE_S):
                return
