"""Systems that stand in for real ones in eval's tests; importable from a spawned process."""

import contextlib
import os
import time
from pathlib import Path

from build.clips import Clip
from eval.accuracy.predictions import Prediction, SystemFacts, TimedCall, TimedText
from eval.config import EvaluationProduct
from eval.record import Run
from eval.report import to_markdown
from serve.contract.errors import AudioError, UnavailableError
from serve.contract.messages import Segment, Timings, Transcript, Word


class FakeSystem:
    """Says what its clip's bytes say, in the language that it is told.

    "fail" fails, "die" ends the process, "hang" never ends after its first call.
    """

    def __init__(self, settings=None):
        self.settings = settings or {}
        self._hung = False

    def transcribe(self, audio, language=None):
        time.sleep(0.002)
        text = audio.decode(errors="replace")
        if text == "fail":
            raise AudioError("AUDIO: cannot be decoded")
        if text == "bug":
            raise ZeroDivisionError("a bug in the system")
        if text == "die":
            os._exit(7)
        if text == "hang" and self._hung:
            time.sleep(60)
        self._hung |= text == "hang"
        return Prediction(text, language or "und", (TimedText(0.0, 1.0, text),))


def open_fake(name, config):
    """What `eval.accuracy.systems.open_system` is to real systems."""
    if name == "missing":
        raise UnavailableError("missing needs a device that is not here")
    print(f"opening {name}")
    settings = {"threads": os.environ["OMP_NUM_THREADS"], "pid": str(os.getpid())}
    settings["cores"] = str(len(os.sched_getaffinity(0)))
    if name == "big":
        settings["ballast"] = str(len(b"x" * 200_000_000))
    return contextlib.nullcontext(FakeSystem(settings))


def write_clips(folder: Path, said: dict[str, str]) -> list[Clip]:
    """Clips with the bytes that a FakeSystem says; the reference is the same."""
    clips = []
    for number, (file, text) in enumerate(said.items()):
        path = folder / file
        path.write_text(text, encoding="utf-8")
        clips.append(Clip(file, path, text, "en" if text else None, 2.0 + 4 * number))
    return clips


def timed_call(file, reference, text, **fields):
    """A timed call with plain defaults."""
    values = {
        "language": "en" if reference else None,
        "duration_s": 10.0,
        "clip_set": "timed",
        "phase": "accuracy",
        "started_s": 0.0,
        "latency_s": 1.0,
        "prediction": Prediction(text, "en"),
        **fields,
    }
    return TimedCall(file=file, reference=reference, **values)


def transcript(text, avg_logprob=-0.5, confidence=None, language="en"):
    """What an engine hears: a word a second, two tokens each, and "so" is likelier than others."""
    words = tuple(
        Word(float(i), i + 1.0, f" {word}", 0.8 if word == "so" else 0.5, confidence)
        for i, word in enumerate(text.split())
    )
    tokens = tuple(range(2 * len(words)))
    segment = Segment(0.0, 9.0, text, tokens, avg_logprob, 0.0, 0.0, 1.0, words)
    timings = Timings(0.0, 0.0, 0.0, 0.0)
    return Transcript(text, language, None, 9.0, (segment,) if text else (), timings)


def facts(name):
    """What was measured of a system, where it does not matter."""
    return SystemFacts(name, {}, start_s=1.0, peak_memory_bytes=2**20)


def printed(result):
    """What a command prints for a result."""
    return to_markdown(Run("test", EvaluationProduct()), result, whole=False)
