"""Child processes, and the memory of processes.

A child has its own session, so Ctrl-C reaches only the parent, which then ends the child. If
the parent is killed, the child ends by itself. Its stdout and stderr go to a log file. If it dies,
the error contains the last line of that file.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil

from serve.contract.errors import (
    DeadlineError,
    EarshotError,
    MissingCheckpointError,
    UnavailableError,
)

FINISH_TIMEOUT_S = 60.0  # for a child to free its resources once its work is done
TERMINATE_TIMEOUT_S = 20.0  # for a child that was told to stop, before it is killed

Send = Callable[[Any], None]
"""Sends one message to the parent, from any thread of the child. None and errors end it."""


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """A spawned process that sends messages to this one; leaving a `with` block ends it.

    Args:
        name: the child's name in errors.
        work: called in the child as `work(send, *arguments)`; a function of a module.
        arguments: further arguments of `work`; they and its messages are pickled.
        log: the file for the child's stdout and stderr, which stays. None: a file in the folder of
            the child's temporary files, which is removed at its end.
    """

    def __init__(
        self, name: str, work: Callable[..., None], arguments: tuple[Any, ...], log: Path | None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.finished = name, False
        self._where = f"; its log is {log}" if log else ""
        self._folder = tempfile.TemporaryDirectory(
            prefix="earshot-child-", ignore_cleanup_errors=True
        )
        self._log = log or Path(self._folder.name) / "log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.touch()
        self._pipe, child_pipe = context.Pipe(duplex=False)
        child_arguments = (work, arguments, child_pipe, str(self._log), self._folder.name)
        self._process = context.Process(target=_child, args=child_arguments, name=name)
        self._process.start()
        child_pipe.close()
        assert self._process.pid is not None  # it was started
        self.pid = self._process.pid

    def receive(self, timeout_s: float) -> Any:
        """Wait for the next message; return None when the child's work is done.

        Raises:
            EarshotError: the child's own error.
            UnavailableError: the child died; the message has the last line that it printed.
            DeadlineError: the child sent nothing in time.
        """
        if not self._pipe.poll(timeout_s):
            raise DeadlineError(f"{self.name} said nothing for {timeout_s:.0f} s{self._where}")
        try:
            message = self._pipe.recv()
        except EOFError:
            last = (self.last_lines(1) or ["it wrote nothing"])[0]
            raise UnavailableError(f"{self.name} ended early: {last}{self._where}") from None
        # A child's last message is None or an expected error.
        self.finished = message is None or isinstance(message, EarshotError)
        if isinstance(message, EarshotError):
            raise message
        return message

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the child's output, without blank ones."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-count:]

    def __exit__(self, *_: object) -> None:
        """Wait for the child if its work is done, else terminate it; kill its descendants."""
        subprocesses = descendants(self.pid)
        if not self._has_ended(FINISH_TIMEOUT_S if self.finished else 0.0):
            self._process.terminate()
            if not self._has_ended(TERMINATE_TIMEOUT_S):
                self._process.kill()
        kill(subprocesses)
        # The child is not reaped yet, so the session's number cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()

    def _has_ended(self, timeout_s: float) -> bool:
        return bool(connection.wait([self._process.sentinel], timeout_s))


def wait_for_any(children: Sequence[ChildProcess], timeout_s: float) -> list[ChildProcess]:
    """Wait for children that have a message or have ended; none after `timeout_s`."""
    by_pipe = {child._pipe: child for child in children}
    ready = connection.wait(list(by_pipe), timeout_s)
    return [child for pipe, child in by_pipe.items() if pipe in ready]


def run_tool(command: Sequence[str], what: str, timeout_s: float) -> None:
    """Run a command to its end; its output goes to this process's stderr.

    Ctrl-C and the timeout end the command and its descendants.

    Args:
        command: program and arguments.
        what: the name of the command in errors.
        timeout_s: the longest time for the command.

    Raises:
        EarshotError: the command failed; its output has the reason.
        MissingCheckpointError: a command of this project lacks a checkpoint.
        DeadlineError: it took too long.
    """
    tool = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)
    try:
        status = tool.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"{what} took more than {timeout_s:.0f} s") from error
    finally:
        if tool.returncode is None:
            subprocesses = descendants(tool.pid)
            tool.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tool.wait(TERMINATE_TIMEOUT_S)
            kill(subprocesses)
            tool.kill()
            tool.wait()
    if status:
        missing = status == MissingCheckpointError.exit_code
        kind = MissingCheckpointError if missing else EarshotError
        raise kind(f"{what} failed with exit code {status}: {' '.join(command)}")


def descendants(pid: int) -> list[psutil.Process]:
    """List every process below one; none once it has ended."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _child(
    work: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection, log: str, folder: str
) -> None:
    """Run the child process."""
    os.setsid()
    tempfile.tempdir = folder
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    try:
        work(send, *arguments)
    except EarshotError as error:
        send(error)
    else:
        send(None)


def _end_with_parent() -> None:
    """Wait for an unexpected end of the parent, then end this process and all below it."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child
    parent.join()
    kill(descendants(os.getpid()))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_TIMEOUT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that open files and servers are closed."""
    raise SystemExit(128 + signal.SIGTERM)


# ---------------------------------------------------------------- memory


SAMPLE_S = 0.1


def tree_memory_bytes(pid: int) -> int:
    """Measure the resident memory of a process and all its descendants; 0 as one of them ends."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(pid), *descendants(pid)]
        return sum(process.memory_info().rss for process in processes)
    return 0


class Watch:
    """Samples memory during a `with` block.

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


def shared_memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum the memory of processes; a page that n processes share counts as 1/n for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


_BLOCKS = 10
_T95 = 2.306  # Student's t for the 8 degrees of freedom of a line through 10 points


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line to the means of 10 blocks, because a value of memory resembles the one before.

    Args:
        x: at least 10 values in equal steps.
        y: the measured values.

    Returns:
        the slope by least squares, and half the 95 % interval.
    """
    x_means, y_means = (
        [part.mean() for part in np.array_split(values, _BLOCKS)] for values in (x, y)
    )
    (value, _), covariance = np.polyfit(x_means, y_means, 1, cov=True)
    return float(value), _T95 * math.sqrt(covariance[0, 0])
