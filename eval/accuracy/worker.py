"""Run one system in its own process, so that memory, threads and crashes stay separate.

The child pins itself to the CPU threads that every system gets, opens the system and drives its
phases: the scored clips once for their texts, which also warms the system up, then the timed ones.
It sends each call to the parent, which samples the memory of the child's process tree and gives up
on a child that falls silent.

A drive is a closed loop: each caller sends its next clip once it has an answer. Files are read
before the clock starts; decoding the audio belongs to the system and is timed.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from build.clips import Clip
from eval.accuracy.predictions import (
    LoadPhase,
    Prediction,
    SystemFacts,
    TimedCall,
    clip_nearest_10_s,
)
from eval.config import EvalConfig, EvaluationProduct
from eval.load import closed_loop
from eval.processes import ChildProcess, Send, Watch, tree_memory_bytes
from serve.contract.errors import EarshotError
from serve.contract.files import read_bytes
from serve.supervisor.processes import peak_memory_bytes

SHUFFLE_SEED = 20  # the same order of clips for every system
START_TIMEOUT_S = 900.0  # opening a large model from a cold disk
ONE_CLIP_CALLS_PER_REPEAT = 3

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class TranscriptionSystem:
    """A system under test, open.

    Attributes:
        settings: everything that decides its figures, versions included.
        transcribe: takes the bytes of a whole audio file and the code of the spoken language, None
            to detect it; returns the text, or raises an EarshotError if this one call failed.
            Called from several threads at once.
    """

    settings: Mapping[str, Any]
    transcribe: Callable[[bytes, str | None], Prediction]


OpenedSystem = contextlib.AbstractContextManager[TranscriptionSystem]
"""A system that is ready in the `with` block; everything is freed at its end."""

OpenSystem = Callable[[str, EvaluationProduct], OpenedSystem]
"""Opens a system by name."""


OnCall = Callable[[TimedCall], object]
"""Receives each call once it has ended, one at a time."""


def drive(
    system: TranscriptionSystem, load: LoadPhase, on_call: OnCall, *, tell_language: bool = False
) -> None:
    """Send the clips of a phase in a closed loop; each pass has its own shuffled order.

    An expected error of the system becomes the `error` of its call. Any other exception ends the
    drive and is raised, such as the FileError of a clip that cannot be read. With `tell_language`
    the system gets the language of each clip.
    """
    order, lock, clips = random.Random(SHUFFLE_SEED), threading.Lock(), list(load.clips)
    passes = [order.sample(clips, len(clips)) for _ in range(load.repeats)]
    began_s = time.perf_counter()

    def call(clip: Clip) -> None:
        audio = read_bytes(clip.path)
        prediction, error = None, None
        started_s = time.perf_counter()
        try:
            prediction = system.transcribe(audio, clip.language if tell_language else None)
        except EarshotError as problem:
            error = f"{type(problem).__name__}: {problem}"
        latency_s = time.perf_counter() - started_s
        timed_call = TimedCall(
            file=clip.file,
            reference=clip.text,
            language=clip.language,
            duration_s=clip.duration_s,
            clip_set=load.clip_set,
            phase=load.phase,
            started_s=started_s - began_s,
            latency_s=latency_s,
            prediction=prediction,
            error=error,
            path=str(clip.path),
            group=clip.group,
        )
        with lock:
            on_call(timed_call)

    closed_loop(call, itertools.chain(*passes), at_once=load.concurrency)


def timed_phases(clips: Sequence[Clip], settings: EvalConfig) -> list[LoadPhase]:
    """List the phases that measure speed on these clips."""
    phases = [LoadPhase("alone", clips, 1, settings.repeats)]
    if nearest := clip_nearest_10_s(clips):
        calls = ONE_CLIP_CALLS_PER_REPEAT * settings.repeats
        phases.append(LoadPhase("one_clip", [nearest], 1, calls))
    return [*phases, LoadPhase("loaded", clips, settings.concurrency, settings.repeats)]


# ---------------------------------------------------------------- worker


def measure_system(
    name: str,
    config: EvaluationProduct,
    phases: Sequence[LoadPhase],
    *,
    open_system: OpenSystem,
    on_call: OnCall,
    log: Path,
) -> SystemFacts:
    """Run one system to its end.

    Args:
        name: the system's name.
        config: `eval` says how many CPU threads the system gets.
        phases: driven one after another.
        open_system: opens it, in the child.
        on_call: receives every call as it ends.
        log: receives the output of the child.

    Raises:
        EarshotError: the system's own error.
        UnavailableError: its process died.
        DeadlineError: it said nothing for too long.
    """
    before = dict(os.environ)  # the child inherits the limits; libraries read them when they load
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(config.eval.threads)))
    try:
        child = ChildProcess(name, _run_phases, (name, config, phases, open_system), log)
    finally:
        os.environ.clear()
        os.environ.update(before)
    with child, Watch(functools.partial(tree_memory_bytes, child.pid)) as watch:
        facts, timeout_s = SystemFacts(name, {}, 0.0, 0), START_TIMEOUT_S
        while (message := child.receive(timeout_s)) is not None:
            if isinstance(message, SystemFacts):  # it is open; or it is closed, and all is known
                facts, timeout_s = message, 2 * config.transcriber.request_timeout_s
            else:
                on_call(message)
    peak_bytes = max(facts.peak_memory_bytes, watch.peak_bytes)
    return dataclasses.replace(facts, peak_memory_bytes=peak_bytes)


def _run_phases(
    send: Send,
    name: str,
    config: EvaluationProduct,
    phases: Sequence[LoadPhase],
    open_system: OpenSystem,
) -> None:
    """Do the child's work: open the system and drive every phase."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.eval.threads])
    began_s = time.perf_counter()
    with open_system(name, config) as system:
        settings = {key: str(value) for key, value in system.settings.items()}
        facts = SystemFacts(name, settings, time.perf_counter() - began_s, 0)
        send(facts)
        for phase in phases:
            drive(system, phase, send, tell_language=config.eval.tell_language)
    # The child's own peak. Not getrusage's, which outlives exec: it begins at our starter's size.
    send(dataclasses.replace(facts, peak_memory_bytes=peak_memory_bytes(os.getpid())))
