"""Runs one system in a process of its own, so that memory, threads and crashes stay apart.

The child pins itself to the CPU threads that every system gets, opens the system, sends all clips
once to warm up, and then drives the three timed phases; rows come back through a pipe one by one.
The parent samples the memory of the child's process tree and gives up on a child that falls
silent. What the child writes to stdout and stderr goes to a log file.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import psutil

from eval.accuracy.data import Row, ten_second_clip
from eval.accuracy.load import drive
from eval.accuracy.systems import System
from eval.config import Config
from serve.clips import Clip
from serve.errors import DeadlineError, EarshotError, UnavailableError

START_TIMEOUT_S = 900.0  # opening a large model from a cold disk
STOP_TIMEOUT_S = 60.0  # for a child that has done its work
TERMINATE_TIMEOUT_S = 20.0  # for one that was told to stop
MEMORY_SAMPLE_S = 0.1
ONE_CLIP_CALLS_PER_REPEAT = 3

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Opener = Callable[[str, Config], System]


@dataclasses.dataclass(frozen=True)
class Ready:
    """The system is open."""

    settings: dict[str, str]
    start_s: float  # opening it, the process's own start apart


@dataclasses.dataclass(frozen=True)
class Warm:
    """One call of the warm-up pass is over."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The system could not be opened or driven, for an expected reason."""

    error: EarshotError


@dataclasses.dataclass(frozen=True)
class Done:
    """Every phase is over. Memory is the child's own peak, exact, without its children."""

    peak_memory_bytes: int


Message = Ready | Warm | Row | Failed | Done


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of one system beside its rows."""

    settings: dict[str, str]
    start_s: float
    peak_memory_bytes: int  # resident set, child and all its descendants together


def calls_per_system(clips: list[Clip], config: Config) -> int:
    """How many `Warm` and `Row` messages a whole run of one system sends."""
    one_clip = ONE_CLIP_CALLS_PER_REPEAT * config.eval.repeats if ten_second_clip(clips) else 0
    return len(clips) * (1 + 2 * config.eval.repeats) + one_clip


def measure(
    name: str,
    config: Config,
    clips: list[Clip],
    *,
    open_system: Opener,
    on_row: Callable[[Row], None],
    on_call: Callable[[], None],
    log: Path,
) -> Measured:
    """Run one system to its end.

    `on_row` gets every timed call; `on_call` is called after each call, the warm-up's too.

    Raises:
        EarshotError: the system's own error.
        UnavailableError: its process died.
        DeadlineError: it said nothing for too long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    process = context.Process(
        target=_child, args=(name, config, clips, open_system, theirs, str(log)), name=name
    )
    with _thread_environment(config.eval.threads):
        process.start()
    theirs.close()
    assert process.pid is not None  # it was started
    wait_s = 0.0  # where something went wrong there is nothing to wait for
    try:
        with _sampled_memory(process.pid) as peak:
            ready, own_peak = _receive(ours, name, config, log, on_row, on_call)
        wait_s = STOP_TIMEOUT_S
    finally:
        _stop(process, wait_s)
        ours.close()
    return Measured(ready.settings, ready.start_s, max(own_peak, peak[0]))


def _receive(
    pipe: Connection,
    name: str,
    config: Config,
    log: Path,
    on_row: Callable[[Row], None],
    on_call: Callable[[], None],
) -> tuple[Ready, int]:
    """What the child said when it was ready, and its own peak memory."""
    ready = Ready({}, 0.0)
    timeout_s = START_TIMEOUT_S
    while True:
        message = _next(pipe, timeout_s, name, log)
        match message:
            case Ready():
                ready = message
                timeout_s = 2 * config.transcriber.request_timeout_s
            case Failed():
                raise message.error
            case Done():
                return ready, message.peak_memory_bytes
            case Row():
                on_row(message)
                on_call()
            case Warm():
                on_call()


def _next(pipe: Connection, timeout_s: float, name: str, log: Path) -> Message:
    if not pipe.poll(timeout_s):
        raise DeadlineError(f"{name} said nothing for {timeout_s:.0f} s; its log is {log}")
    try:
        message: Message = pipe.recv()
    except EOFError:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
        raise UnavailableError(f"{name} ended early: {last.strip()}; its log is {log}") from None
    return message


@contextlib.contextmanager
def _thread_environment(threads: int) -> Iterator[None]:
    """Let a child that starts in here inherit the limits; libraries read them when they load."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sampled_memory(pid: int) -> Iterator[list[int]]:
    """Yield a list whose one entry is the highest resident set of a process tree seen so far."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(MEMORY_SAMPLE_S):
            peak[0] = max(peak[0], tree_memory_bytes(pid))

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join(STOP_TIMEOUT_S)


def tree_memory_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants; 0 once it is gone."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def _stop(process: SpawnProcess, wait_s: float) -> None:
    """End the child and everything below it: wait, then ask, then kill."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.join(wait_s)
    if process.is_alive():
        process.terminate()
        process.join(TERMINATE_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    for left in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


def _child(
    name: str,
    config: Config,
    clips: list[Clip],
    open_system: Opener,
    pipe: Connection,
    log: str,
) -> None:
    """Entry of the child process."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Ctrl-C reaches every process of the terminal; the parent decides and sends SIGTERM. A
    # handler, unlike SIG_IGN, is not inherited by the servers that this process starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, _terminate)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.eval.threads])
    began = time.perf_counter()
    try:
        with contextlib.closing(open_system(name, config)) as system:
            pipe.send(Ready(dict(system.settings), time.perf_counter() - began))
            _drive_phases(system, config, clips, pipe)
    except EarshotError as error:
        pipe.send(Failed(error))
    else:
        pipe.send(Done(_own_peak_bytes()))


def _own_peak_bytes() -> int:
    # Not getrusage: its peak outlives exec and so begins at the size of whoever started us.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _drive_phases(system: System, config: Config, clips: list[Clip], pipe: Connection) -> None:
    many, repeats = config.eval.concurrency, config.eval.repeats
    ten_second = ten_second_clip(clips)
    drive(
        system,
        clips,
        phase="loaded",
        concurrency=many,
        repeats=1,
        emit=lambda _row: pipe.send(Warm()),
    )
    drive(system, clips, phase="alone", concurrency=1, repeats=repeats, emit=pipe.send)
    if ten_second:
        calls = ONE_CLIP_CALLS_PER_REPEAT * repeats
        drive(system, [ten_second], phase="one_clip", concurrency=1, repeats=calls, emit=pipe.send)
    drive(system, clips, phase="loaded", concurrency=many, repeats=repeats, emit=pipe.send)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
