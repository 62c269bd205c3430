"""Run one system in its own process, so that memory, threads and crashes stay separate.

The child pins itself to the CPU threads that every system gets and opens the system. It sends the
scored clips once for their texts, which also warms the system up. Then it drives the three timed
phases if its speed is asked for. It sends each call to the parent, which samples the memory of the
child's process tree and gives up on a child that falls silent.

A drive is a closed loop: each caller sends its next clip once it has an answer. Files are read
before the clock starts; decoding the audio belongs to the system and is timed.
"""

import contextlib
import dataclasses
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from build.clips import Clip
from eval.accuracy.predictions import (
    ClipSet,
    Phase,
    Prediction,
    SystemFacts,
    TimedCall,
    clip_nearest_10_s,
)
from eval.config import EvaluationProduct
from eval.load import closed_loop
from eval.processes import ChildProcess, Send, Watch, tree_memory_bytes
from serve.contract.errors import EarshotError
from serve.contract.files import read_bytes
from serve.supervisor.processes import peak_memory_bytes

SHUFFLE_SEED = 20  # the same order of clips for every system


class TranscriptionSystem:
    """A system under test: audio in, text out."""

    settings: dict[str, str]  # everything that decides its figures, versions included

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """Return the text of an audio file's bytes; called from several threads at once.

        Args:
            audio: a whole file.
            language: code of the spoken language; None leaves the system to detect it.

        Raises:
            EarshotError: this one call failed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything, child processes included; nothing, where nothing runs between calls."""


def drive(
    system: TranscriptionSystem,
    clips: Sequence[Clip],
    *,
    phase: Phase,
    concurrency: int,
    repeats: int = 1,
    emit: Callable[[TimedCall], None],
    clip_set: ClipSet = "timed",
    tell_language: bool = False,
) -> None:
    """Send every clip `repeats` times, each pass in its own shuffled order, without a gap.

    `emit` gets every timed call, in order of completion, never two at the same time. An expected
    error of a call becomes its `error`; any other exception ends the drive and is raised, a
    FileError among them: a clip that cannot be read says nothing about the system. With
    `tell_language` the system is told what language is spoken.
    """
    order = random.Random(SHUFFLE_SEED)
    calls = [
        (clip, repeat)
        for repeat in range(repeats)
        for clip in order.sample(list(clips), len(clips))
    ]
    lock = threading.Lock()
    facts: dict[str, Any] = {"clip_set": clip_set, "phase": phase, "concurrency": concurrency}
    began = time.perf_counter()

    def call(of: tuple[Clip, int]) -> None:
        clip, repeat = of
        language = [clip.language] if tell_language and clip.language else []
        timed = _timed_call(system, clip, language, began, repeat=repeat, **facts)
        with lock:
            emit(timed)

    closed_loop(call, calls, at_once=concurrency)


def _timed_call(
    system: TranscriptionSystem, clip: Clip, language: list[str], began_s: float, **facts: Any
) -> TimedCall:
    """Transcribe a clip with a system; `facts` are further fields of the call."""
    audio = read_bytes(clip.path)
    prediction, error = None, None
    started_s = time.perf_counter()
    try:
        prediction = system.transcribe(audio, *language)
    except EarshotError as problem:
        error = f"{type(problem).__name__}: {problem}"
    return TimedCall(
        file=clip.file,
        reference=clip.text,
        language=clip.language,
        duration_s=clip.duration_s,
        started_s=started_s - began_s,
        latency_s=time.perf_counter() - started_s,
        prediction=prediction,
        error=error,
        path=str(clip.path),
        group=clip.group,
        **facts,
    )


def wall_s(calls: Sequence[TimedCall]) -> float:
    """Return the seconds from the first call's start to the last answer of one phase."""
    ended_s = max(call.started_s + call.latency_s for call in calls)
    return ended_s - min(call.started_s for call in calls)


# ---------------------------------------------------------------- worker


START_TIMEOUT_S = 900.0  # opening a large model from a cold disk
ONE_CLIP_CALLS_PER_REPEAT = 3

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

OpenSystem = Callable[[str, EvaluationProduct], TranscriptionSystem]


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
    config: EvaluationProduct,
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
        name: the system's name.
        config: `eval` says how many calls at a time, and how often the timed phases are repeated.
        clips: the clips to score, by set.
        timed: the clips to measure its speed on afterwards.
        run_id: the run's id.
        open_system: opens it, in the child.
        on_call: gets every call as it ends.
        log: receives the output of the child.

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
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name in _THREAD_VARIABLES:
            del os.environ[name]
        os.environ.update(before)


def _run_phases(
    send: Send,
    name: str,
    config: EvaluationProduct,
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
            repeats, nearest = config.eval.repeats, clip_nearest_10_s(timed)
            go(timed, phase="alone", concurrency=1, repeats=repeats)
            if nearest:
                calls = ONE_CLIP_CALLS_PER_REPEAT * repeats
                go([nearest], phase="one_clip", concurrency=1, repeats=calls)
            go(timed, phase="loaded", concurrency=many, repeats=repeats)
    # Not getrusage's peak, which outlives exec: it begins at our starter's size.
    send(PeakMemory(peak_memory_bytes(os.getpid())))
