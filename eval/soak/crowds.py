"""Scenarios of very long files: others must not wait for them, and memory must hold."""

import concurrent.futures
import io
import statistics
import time

import numpy as np
import soundfile

from build.clips import Clip
from eval.config import Config, changed
from eval.memory import Watch
from eval.record import Check
from eval.soak.client import Ending, all_answered, by_grpc, counted, crowd, endings
from eval.soak.findings import Found
from eval.soak.memory import memory_of
from eval.soak.stage import Stage
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import Limits

MAX_RATIO = 2.0
MAX_BYTES = 4 * 2**30
_HOUR_S = 3600
_LONG = 20
_FORTY = 40
_QUIET_ASKS = 11
_BESIDE_ASKS = 5
_TIMEOUT_S = 60.0
_LONG_LIMIT_S = 90.0  # after which the server ends a long file, so that the scenario has an end
_ARRIVED_S = 2.0  # in which all of them are uploaded
_BLOCK = 1 << 16


def hour_of(clips: tuple[Clip, ...]) -> bytes:
    """Make an hour of the clips in turn, as an OGG Vorbis file of some 16 MB.

    Raises:
        AudioError: a clip cannot be decoded.
    """
    limits = Limits(_HOUR_S)
    parts = [audio.whole(audio.decode(clip.path.read_bytes(), limits)) for clip in clips]
    samples = np.resize(np.concatenate(parts), _HOUR_S * SAMPLE_RATE)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", SAMPLE_RATE, 1, format="OGG", subtype="VORBIS") as ogg:
        for start in range(0, len(samples), _BLOCK):  # in one go libsndfile overflows its stack
            ogg.write(samples[start : start + _BLOCK])
    return file.getvalue()


def with_limit(config: Config) -> Config:
    """Return the config with a limit on requests that lets 20 hours of audio end in this life."""
    return changed(config, "transcriber", request_timeout_s=_LONG_LIMIT_S)


def short_beside_long(stage: Stage) -> Found:
    """Ask with a short clip while 20 hours of audio wait: at most twice its quiet time."""
    quiet = [stage.ask(_TIMEOUT_S) for _ in range(_QUIET_ASKS)]
    yield all_answered(quiet)
    quiet_s = max(ending.seconds for ending in quiet)
    stage.say(f"short beside long: {quiet_s:.2f} s quiet; making an hour of audio …")
    hour = hour_of(stage.clips)
    with crowd(_LONG) as pool:
        calls = [pool.submit(by_grpc, stage.at, hour, 4 * _LONG_LIMIT_S) for _ in range(_LONG)]
        time.sleep(_ARRIVED_S)
        beside = list[Ending]()
        while len(beside) < _BESIDE_ASKS and not all(call.done() for call in calls):
            beside.append(stage.ask(_TIMEOUT_S))
        stage.say(f"short beside long: {[f'{ending.seconds:.1f} s' for ending in beside]}")
    beside_s = max(ending.seconds for ending in beside)
    yield "short clip alone, slowest, s", quiet_s
    yield f"short clip beside {_LONG} hours, slowest, s", beside_s
    yield "median beside them, s", statistics.median(ending.seconds for ending in beside)
    yield "ratio of the slowest", beside_s / quiet_s
    yield all_answered(beside)
    yield Check(
        f"the slowest takes at most {MAX_RATIO:g} times as long beside them",
        beside_s <= MAX_RATIO * quiet_s,
        f"{beside_s:.2f} s against {quiet_s:.2f} s, {beside_s / quiet_s:.1f} times",
    )


def forty_hours(stage: Stage) -> Found:
    """Send forty one-hour files at once: memory stays bounded, each is answered or refused."""
    stage.say("forty hours: making an hour of audio …")
    hour = hour_of(stage.clips)
    with Watch(memory_of(stage.processes)) as watch, crowd(_FORTY) as pool:
        calls = [pool.submit(by_grpc, stage.at, hour, 4 * _LONG_LIMIT_S) for _ in range(_FORTY)]
        while waiting := concurrent.futures.wait(calls, timeout=10).not_done:
            gb = watch.peak_bytes / 2**30
            stage.say(f"forty hours: {len(waiting)} wait, at most {gb:.2f} GB so far")
        ended = endings(calls)
    recovered_s, last = stage.answers_again(_TIMEOUT_S)
    yield "memory before, MB", watch.first_bytes / 2**20
    yield "peak memory of all processes, MB", watch.peak_bytes / 2**20
    yield "answered again after, s", recovered_s
    clear = all(ending.kind in ("answered", "refused") for ending in ended)
    yield Check("each is answered or refused as UNAVAILABLE", clear, counted(ended))
    yield Check(
        f"all processes together stay below {MAX_BYTES / 2**30:g} GB",
        watch.peak_bytes < MAX_BYTES,
        f"at most {watch.peak_bytes / 2**30:.2f} GB, shared pages counted once",
    )
    yield Check("a short clip is answered afterwards", last.kind == "answered", str(last))
