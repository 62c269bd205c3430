"""Drives clips through a system at a fixed concurrency: a closed loop.

Each of `concurrency` callers sends its next clip as soon as its last answer is there. Files are
read before the clock starts; decoding the audio belongs to the system and is timed.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.data import ClipSet, Phase, Prediction, TimedCall
from eval.load import closed_loop
from serve.contract.errors import EarshotError
from serve.contract.files import read_bytes

SHUFFLE_SEED = 20  # the same order of clips for every system


class System:
    """One thing that turns audio into text."""

    settings: dict[str, str]  # everything that decides its figures, versions included

    def transcribe(self, audio: bytes, language: str | None = None) -> Prediction:
        """Return the text of an audio file's bytes; called from several threads at once.

        Args:
            audio: a whole file.
            language: code of what is spoken; None leaves the system to find out.

        Raises:
            EarshotError: this one call failed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free everything, child processes included; nothing, where nothing runs between calls."""


def drive(
    system: System,
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


def driven(
    system: System, clips: Sequence[Clip], title: str, *, phase: Phase, **options: Any
) -> list[TimedCall]:
    """Drive every clip once beside a bar; the calls in the order of the clips.

    Args:
        system, clips, phase: as of `drive`.
        title: of the bar.
        options: others of `drive`.
    """
    calls: dict[str, TimedCall] = {}
    with tqdm(total=len(clips), desc=title, unit="clip") as bar:

        def keep(call: TimedCall) -> None:
            calls[call.file] = call
            bar.update()

        drive(system, clips, phase=phase, emit=keep, **options)
    return [calls[clip.file] for clip in clips]


def _timed_call(
    system: System, clip: Clip, language: list[str], began_s: float, **facts: Any
) -> TimedCall:
    """Let a system hear a clip; `facts` are further fields of the call."""
    audio = read_bytes(clip.path)
    started_s = time.perf_counter()
    prediction, error = _transcribe(system, audio, *language)
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


def _transcribe(
    system: System, audio: bytes, *language: str
) -> tuple[Prediction | None, str | None]:
    try:
        return system.transcribe(audio, *language), None
    except EarshotError as error:
        return None, f"{type(error).__name__}: {error}"


def wall_s(calls: Sequence[TimedCall]) -> float:
    """Return the seconds from the first call's start to the last answer of one phase."""
    ended_s = max(call.started_s + call.latency_s for call in calls)
    return ended_s - min(call.started_s for call in calls)
