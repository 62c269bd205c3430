"""A heartbeat file: its modification time shows that a process is alive."""

import math
import os
import time
from pathlib import Path

INTERVAL_S = 1.0
STALE_S = 3.0  # an older heartbeat means that the process does not work


def touch_heartbeat(path: Path) -> None:
    """Set the heartbeat file's modification time to the monotonic clock.

    The clock counts from the machine's start and is the same in all processes.
    """
    now_ns = time.monotonic_ns()
    try:
        os.utime(path, ns=(now_ns, now_ns))
    except FileNotFoundError:
        path.touch()
        os.utime(path, ns=(now_ns, now_ns))


def heartbeat_age_s(path: Path) -> float:
    """Return the age of a file's last heartbeat; infinite if there is none."""
    try:
        return (time.monotonic_ns() - path.stat().st_mtime_ns) / 1e9
    except FileNotFoundError:
        return math.inf
