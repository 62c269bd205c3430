"""The machine that figures are measured on, and the packages that it has."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

_LOAD_S = 1.0  # for which the load is measured
_QUIET_CORES = 0.2  # that other programs may keep busy


def machine_facts() -> dict[str, str]:
    """Describe the hardware and the software below every system, as a report shows them."""
    return {
        "CPU": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "RAM": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "GPU": _gpu(),
        "OS": platform.platform(),
        "Python": platform.python_version(),
    }


def load_line(busy: Callable[[], float] = lambda: psutil.cpu_percent(_LOAD_S)) -> str:
    """Tell what else the machine computes, and warn where times are not worth measuring.

    Args:
        busy: returns the share of the cores that is busy, in percent, while this process waits.
    """
    cores = os.cpu_count() or 1
    taken = busy() / 100 * cores
    line = f"other programs keep {taken:.1f} of {cores} cores busy"
    if taken < _QUIET_CORES:
        return line
    return f"warning: {line}; times that are measured now say little: end those programs first"


def missing_packages(names: Iterable[str]) -> list[str]:
    """List which of these packages, by import name, are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def versions(*distributions: str) -> dict[str, str]:
    """Return versions by name of distribution; "none" where it is not installed."""
    by_name = {}
    for name in distributions:
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_name[name] = "none"
    return by_name


def _cpu_model() -> str:
    # psutil and platform do not know a CPU's name on Linux.
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else "none"
