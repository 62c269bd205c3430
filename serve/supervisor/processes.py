"""Start, inspect and end processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from serve.contract.devices import CORES
from serve.contract.errors import UnavailableError

_PR_SET_PDEATHSIG = 1
_UMASK = 0o077  # files and shared memory of a server are for its own user
_KILL_S = 10.0
_POLL_S = 0.02
_LOG_BYTES = 2**20
_CGROUP = Path("/sys/fs/cgroup")  # the limits of this container

# A program that replaces itself with the command. It gets SIGKILL when its parent ends in any way.
# The check afterwards covers a parent that ended before the call.
_LAUNCH = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.umask({_UMASK})
if cores := os.environ.get("{CORES}"):
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A process that ends with the thread that started it, and never outlives this process.

    Args:
        command: the program's full path and its arguments.
        log_path: the log file; the process's output is appended.
        environment: the environment; None: that of this process.
        folder: the working folder; None: that of this process.
        kept: file descriptors that the process inherits.

    Raises:
        UnavailableError: the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        kept: Sequence[int] = (),
    ) -> None:
        self._log_path = log_path
        try:
            with log_path.open("ab") as log:
                self._log_begin = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                    env=environment,
                    cwd=folder,
                    pass_fds=kept,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C goes to this process, which stops it
                )
        except OSError as error:
            raise UnavailableError(f"cannot start {command[0]}: {error}") from error
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def log(self) -> list[str]:
        """Return the lines of the log since the start, at most the last ones of a long log."""
        with self._log_path.open("rb") as log:
            log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read().decode("utf-8", errors="replace").splitlines()

    def terminate(self, timeout_s: float) -> int | None:
        """Terminate the process and wait up to a limit; return its exit status, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGTERM)
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """Kill the process and all its descendants, and wait until they have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # blocked in the kernel
            self._process.wait(_KILL_S)
        end = time.monotonic() + _KILL_S
        while any(map(is_alive, _group_members(self.pid))) and time.monotonic() < end:
            time.sleep(_POLL_S)


def log_tail(log: Sequence[str]) -> str:
    """Return the last lines of a log."""
    return "\n".join(log[-5:])


def _group_members(leader: int) -> list[int]:
    """List the processes of a process group. They may outlive the leader."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                members.append(pid)
    return members


def live_children(pid: int) -> list[int]:
    """List the running direct children of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children() if is_alive(child.pid)]
    return []


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def peak_memory_bytes(pid: int) -> int:
    """Return the peak resident memory of a process; 0 after its end."""
    # Linux records the peak, which sampling would miss; psutil has only the present size.
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(match.group(1)) * 1024 if match else 0
    return 0


def memory_bytes(pid: int) -> int:
    """Return the present resident memory of a process; 0 after its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def free_memory_bytes() -> int:
    """Return the machine's free memory, or the container's if that is less."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no such limit
        most = int((_CGROUP / "memory.max").read_text())
        taken = int((_CGROUP / "memory.current").read_text())
        stat = dict(map(str.split, (_CGROUP / "memory.stat").read_text().splitlines()))
        free = min(free, most - taken + int(stat.get("inactive_file", 0)))
    return free
