"""Runs one system in a process of its own, so that memory, threads and crashes stay apart.

The child pins itself to the CPU threads that every system gets, opens the system, sends the scored
clips once for their texts, which also warms it up, and then drives the three timed phases where its
speed is asked for; calls are sent to the parent one by one.
The parent samples the memory of the child's process tree and gives up on a child that falls
silent.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from build.clips import Clip
from eval.accuracy.data import ClipSet, SystemFacts, TimedCall, clip_nearest_10_s
from eval.accuracy.load import System, drive
from eval.config import Config
from eval.memory import Watch, tree_memory_bytes
from eval.processes import ChildProcess, Send
from serve.supervisor.processes import peak_memory_bytes

START_TIMEOUT_S = 900.0  # opening a large model from a cold disk
ONE_CLIP_CALLS_PER_REPEAT = 3

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

OpenSystem = Callable[[str, Config], System]


@dataclasses.dataclass(frozen=True)
class SystemReady:
    """The system is open."""

    settings: dict[str, str]
    start_s: float  # opening it, the process's own start apart


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Every phase is over. The child's own peak resident set, exact, without its children."""

    bytes: int


def timed_calls_of(timed: Sequence[Clip], repeats: int) -> list[Clip]:
    """List the clip of every call that the timed phases make."""
    nearest = clip_nearest_10_s(timed)
    one_clip = [nearest] * ONE_CLIP_CALLS_PER_REPEAT if nearest else []
    return repeats * [*timed, *one_clip, *timed]


def measure_system(
    name: str,
    config: Config,
    clips: Mapping[ClipSet, list[Clip]],
    *,
    timed: Sequence[Clip] = (),
    run_id: str,
    open_system: OpenSystem,
    on_call: Callable[[TimedCall], None],
    log: Path,
) -> SystemFacts:
    """Run one system to its end.

    Args:
        name: of the system.
        config: `eval` says how many calls at a time, and how often the timed phases are repeated.
        clips: that are scored, by set.
        timed: those that its speed is measured on afterwards, if any.
        run_id: of the run that it belongs to.
        open_system: opens it, in the child.
        on_call: gets every call as it ends.
        log: gets what the child writes.

    Raises:
        EarshotError: the system's own error.
        UnavailableError: its process died.
        DeadlineError: it said nothing for too long.
    """
    with _thread_environment(config.eval.threads):
        child = ChildProcess(name, _run_phases, (name, config, clips, timed, open_system), log)
    with child, Watch(functools.partial(tree_memory_bytes, child.pid)) as watch:
        ready, own_peak, calls = SystemReady({}, 0.0), 0, 0
        timeout_s = START_TIMEOUT_S
        while (message := child.receive(timeout_s)) is not None:
            match message:
                case SystemReady():
                    ready = message
                    timeout_s = 2 * config.transcriber.request_timeout_s
                case PeakMemory():
                    own_peak = message.bytes
                case TimedCall():
                    calls += 1
                    on_call(message)
    memory_bytes = max(own_peak, watch.peak_bytes)
    return SystemFacts(run_id, name, ready.settings, ready.start_s, memory_bytes, calls)


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


def _run_phases(
    send: Send,
    name: str,
    config: Config,
    clips: Mapping[ClipSet, list[Clip]],
    timed: Sequence[Clip],
    open_system: OpenSystem,
) -> None:
    """Do the child's work: open the system and drive every phase."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.eval.threads])
    began = time.perf_counter()
    with contextlib.closing(open_system(name, config)) as system:
        send(SystemReady(dict(system.settings), time.perf_counter() - began))
        go = functools.partial(drive, system, emit=send, tell_language=config.eval.tell_language)
        many = config.eval.concurrency
        for clip_set, of_set in clips.items():
            go(of_set, clip_set=clip_set, phase="accuracy", concurrency=many)
        if timed:
            _drive_timed_phases(go, timed, many, config.eval.repeats)
    # Not getrusage's peak, which outlives exec: it begins at our starter's size.
    send(PeakMemory(peak_memory_bytes(os.getpid())))


def _drive_timed_phases(
    go: Callable[..., None], clips: Sequence[Clip], many: int, repeats: int
) -> None:
    nearest = clip_nearest_10_s(clips)
    go(clips, phase="alone", concurrency=1, repeats=repeats)
    if nearest:
        repeated = ONE_CLIP_CALLS_PER_REPEAT * repeats
        go([nearest], phase="one_clip", concurrency=1, repeats=repeated)
    go(clips, phase="loaded", concurrency=many, repeats=repeats)
