"""Start, inspect, restart and end processes."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from serve.contract.devices import CORES
from serve.contract.errors import EarshotError, UnavailableError

logger = logging.getLogger("earshot")

_PR_SET_PDEATHSIG = 1
_UMASK = 0o077  # files and shared memory of a server are for its own user
_KILL_S = 10.0
_POLL_S = 0.02
_LOG_BYTES = 2**20
_TAIL_LINES = 5
_FIRST_DELAY_S = 0.5  # before the first restart; doubled each time
_LONGEST_DELAY_S = 30.0
_SETTLED_S = 60.0  # without a failure for this time, the delays start over
MAX_FAILED_STARTS = 5

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


class ManagedProcess:
    """A started process. It ends with the thread that started it, and never outlives this process.

    Args:
        command: the program's full path and its arguments.
        log_path: the log file; the process's output is appended.
        environment: the environment; None: that of this process.
        folder: the working folder; None: that of this process.
        descriptors: file descriptors that the process inherits.

    Raises:
        UnavailableError: the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._log_path = log_path
        try:
            with log_path.open("ab") as log:
                self._log_begin = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                    env=environment,
                    cwd=folder,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C goes to this process, which stops it
                )
        except OSError as error:
            raise UnavailableError(f"cannot start {command[0]}: {error}") from error
        self.pid = self._process.pid

    def ready(self) -> bool:
        """Return whether the process works now."""
        return self.status() is None

    def failure(self) -> str | None:
        """Return why the process has failed; None while it works or starts."""
        status = self.status()
        if status is None:
            return None
        return f"it ended with status {status}; its log ends:\n{self.log_tail()}"

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def log(self) -> list[str]:
        """Return the lines of the log since the start, at most the last ones of a long log."""
        with self._log_path.open("rb") as log:
            log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read().decode("utf-8", errors="replace").splitlines()

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log()[-_TAIL_LINES:])

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
        deadline = time.monotonic() + _KILL_S
        while any(map(is_alive, _group_members(self.pid))) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class SupervisedProcess:
    """One of the server's processes through all its restarts. For one thread, except `kill`.

    Args:
        title: the name in messages.
        launch: starts the process; raises an EarshotError if that fails at once.
        start_timeout_s: the time in which it must be ready.
        needed: whether the server needs it; otherwise it is restarted for ever.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        title: str,
        launch: Callable[[], ManagedProcess],
        start_timeout_s: float,
        needed: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restarts = 0
        self.up = False  # at the last poll
        self.running: ManagedProcess | None = None
        self._title = title
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._needed = needed
        self._clock = clock
        self.ever_ready = False
        self._ready = False  # whether the present process has been ready
        self._failed_starts = 0  # in a row
        self._delay_s = _FIRST_DELAY_S
        self._next_start = 0.0  # a time of the clock
        self._started = 0.0
        self._killed = False

    def poll(self) -> None:
        """Start the process if that is due, check it, and end it after a failure.

        Raises:
            EarshotError: it failed before it was ever ready, or too many times in a row.
        """
        try:
            if self.running is not None:
                self._check(self.running)
            elif self._clock() >= self._next_start:
                self._started, self._ready = self._clock(), False
                self.running = self._launch()
        except EarshotError as error:
            self._fail(error)

    def kill(self) -> None:
        """Kill the process for good; its end does not count as a failure."""
        self._killed = True
        if (running := self.running) is not None:
            running.kill()

    def _check(self, running: ManagedProcess) -> None:
        reason = running.failure()
        if reason is not None:
            verb = "failed" if self._ready else "did not start"
            raise EarshotError(f"{self._title} {verb}: {reason}")
        self.up = running.ready()
        age_s = self._clock() - self._started
        if self.up:
            self._ready = self.ever_ready = True
            self._failed_starts = 0
            if age_s > _SETTLED_S:
                self._delay_s = _FIRST_DELAY_S
        elif not self._ready and age_s > self._start_timeout_s:
            raise EarshotError(
                f"{self._title} was not ready within {self._start_timeout_s:g} s "
                f"(server.start_timeout_s); its log ends:\n{running.log_tail()}"
            )

    def _fail(self, reason: EarshotError) -> None:
        self.up = False
        if self.running is not None:
            self.running.kill()
        self.running = None
        if self._killed:  # by another thread meanwhile
            return
        if not self._ready:
            self._failed_starts += 1
        if not self.ever_ready:
            raise reason
        if self._failed_starts >= MAX_FAILED_STARTS and self._needed():
            raise EarshotError(f"gave up after {self._failed_starts} failed starts: {reason}")
        self.restarts += 1
        logger.warning("%s; it restarts in %g s", reason, self._delay_s)
        self._next_start = self._clock() + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)


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
    """Return the present resident memory of a process and its descendants; 0 after its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        members = process, *process.children(recursive=True)
        return sum(int(member.memory_info().rss) for member in members)
    return 0


def free_memory_bytes() -> int:
    """Return the machine's free memory, or the container's if that is less."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no such limit
        limit = int((_CGROUP / "memory.max").read_text())
        usage = int((_CGROUP / "memory.current").read_text())
        stat = dict(map(str.split, (_CGROUP / "memory.stat").read_text().splitlines()))
        free = min(free, limit - usage + int(stat.get("inactive_file", 0)))
    return free
