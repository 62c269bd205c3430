"""The processes of a server: which live, and the most memory that each has taken."""

import contextlib
import re
from pathlib import Path

import psutil


def live_children(pid: int) -> list[int]:
    """Direct children of a process that have not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children() if is_alive(child.pid)]
    return []


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; a zombie, which nobody has asked about yet, has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def peak_memory_bytes(pid: int) -> int:
    """Largest resident memory that a process has had; 0 once it has ended."""
    # Linux keeps the peak itself, which sampling would miss; psutil gives the present size alone.
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(match.group(1)) * 1024 if match else 0
    return 0
