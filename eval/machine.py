"""The machine that figures were measured on."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil


def machine_facts() -> dict[str, str]:
    """The hardware and the software below every system, as a report shows them."""
    return {
        "CPU": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "RAM": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "GPU": _gpu(),
        "OS": platform.platform(),
        "Python": platform.python_version(),
    }


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
