"""`python -m eval demo`: clips through a real server, with their figures."""

import contextlib
import itertools
import os
import textwrap
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from build.clips import Clip
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.predictions import TimedCall
from eval.accuracy.score import (
    Accuracy,
    accuracy,
    all_answered,
    char_counts,
    compared_texts,
    latency,
    rtfx,
    wall_s,
)
from eval.accuracy.systems import EarshotTriton, prepare_engine
from eval.accuracy.worker import drive
from eval.config import EvaluationProduct, load_config
from eval.corpora.find import find_clips
from eval.record import Result, Run, Say
from serve.contract.errors import MissingCheckpointError

WIDTH = 100  # columns
_MARGIN = " " * 4


def demo(run: Run, *, otherwise: str | None) -> Result:
    """Start a server, send it every clip of `build.verify_clips` once, and stop it.

    Args:
        run: its config names the clips and the number of calls at a time.
        otherwise: the config where the checkpoint cannot be had.

    Raises:
        EarshotError: the engine cannot be built, a clip is missing or the server did not start.
    """
    config = prepared([run.config_path, *([otherwise] if otherwise else [])], run.say)
    clips, many = find_clips(config.build.verify_clips).clips, config.eval.concurrency
    run.say(f"Starting Triton Inference Server with the engine {config.engine} …")
    with contextlib.closing(EarshotTriton(config)) as system:
        run.say(f"Ready: HTTP {system.server.http}, gRPC {system.server.grpc}")
        calls = _transcribed(system, clips, many)
        memory_bytes = system.server.peak_memory_bytes()
    run.say("Stopped the server.")
    checks = (all_answered({call.file: [call.error] for call in calls if call.error}),)
    for line in ("", *render(calls, many, memory_bytes)):
        run.show(line)
    return Result({"calls": calls, "peak_memory_bytes": memory_bytes}, checks)


def _transcribed(system: EarshotTriton, clips: Sequence[Clip], many: int) -> list[TimedCall]:
    """Send every clip once; return the calls in the order of the clips."""
    calls: dict[str, TimedCall] = {}
    with tqdm(total=len(clips), desc="Transcribing", unit="clip") as bar:

        def keep(call: TimedCall) -> None:
            calls[call.file] = call
            bar.update()

        drive(system, clips, phase="loaded", concurrency=many, emit=keep)
    return [calls[clip.file] for clip in clips]


def prepared(paths: Sequence[str], say: Say) -> EvaluationProduct:
    """Build the engine of a config unless it is up to date.

    Args:
        paths: configs; each replaces the one before if that one's checkpoint cannot be had.
        say: receives a line if a config is replaced.

    Raises:
        EarshotError: a config is wrong, or the build failed; it has said why.
        MissingCheckpointError: the last one's checkpoint cannot be had either.
    """
    for path, instead in itertools.pairwise(paths):
        config = load_config(path)
        try:
            prepare_engine(config, path, config.build.precision)
        except MissingCheckpointError:
            say(f"Without {config.build.checkpoint}, so with {instead} in place of {path}:")
        else:
            return config
    config = load_config(paths[-1])
    prepare_engine(config, paths[-1], config.build.precision)
    return config


def render(calls: Sequence[TimedCall], concurrency: int, memory_bytes: int) -> Iterator[str]:
    """Yield the lines to print: a block per clip, then the totals."""
    longest = max(len(call.file) for call in calls)
    for call in calls:
        yield from _clip_lines(call, longest)
        yield ""
    yield from _totals(calls, concurrency, memory_bytes)


def _clip_lines(call: TimedCall, file_width: int) -> Iterator[str]:
    language = (call.prediction.language if call.prediction else None) or "--"
    yield (
        f"{call.file:{file_width}}  {call.duration_s:5.1f} s  {language}  "
        f"latency {call.latency_s:5.2f} s  {_error_rate(call)}"
    )
    if call.error is not None:
        yield from _wrapped("FAILED", call.error)
        return
    segments = call.prediction.segments if call.prediction else ()
    for segment in segments:
        yield from _wrapped(f"{segment.start_s:6.2f} - {segment.end_s:6.2f}", segment.text.strip())
    if not segments:
        yield from _wrapped("", call.text or "(no speech)")
    yield from _wrapped("reference", call.reference or "(no speech)")


def _error_rate(call: TimedCall) -> str:
    counts = char_counts(*compared_texts(call, normalizer(DEFAULT)))
    if counts.length:
        return f"CER {100 * counts.errors / counts.length:5.1f} %"
    return f"CER  none: no speech, {counts.errors} characters heard"


def _wrapped(label: str, text: str) -> list[str]:
    start = f"{_MARGIN}{label:15}  "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [
        start.rstrip()
    ]


def _totals(calls: Sequence[TimedCall], concurrency: int, memory_bytes: int) -> Iterator[str]:
    failed = sum(call.error is not None for call in calls)
    rates: Accuracy = accuracy(calls, normalizer(DEFAULT))
    times = latency(calls)
    audio_s = sum(call.duration_s for call in calls if call.error is None)
    lines = {
        "clips": f"{len(calls)}, {concurrency} at a time, {failed} failed",
        "CER": f"{_rate(rates.cer.percent)} (normaliser {DEFAULT})",
        "WER": _rate(rates.wer.percent),
        "latency": f"p50 {times.p50_s:.2f} s, p95 {times.p95_s:.2f} s, p99 {times.p99_s:.2f} s",
        "RTFx": f"{rtfx(calls):.1f} ({audio_s:.1f} s of audio in {wall_s(calls):.1f} s, "
        f"{os.cpu_count()} CPU cores)",
        "peak memory": f"{memory_bytes / 2**20:.0f} MiB (server, gateway and model)",
    }
    for label, text in lines.items():
        yield f"{label:12}  {text}"


def _rate(percent: float | None) -> str:
    return "none: no clip has text" if percent is None else f"{percent:.2f} %"
