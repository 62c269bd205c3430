"""`python -m eval demo`: clips through a real server, with their figures."""

import os
import textwrap
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from eval.accuracy import score
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.predictions import LoadPhase, TimedCall
from eval.accuracy.systems import over_triton, prepare_engine
from eval.accuracy.worker import drive
from eval.config import EvaluationProduct, load_config
from eval.corpora.find import find_clips
from eval.record import Result, Run, Say
from eval.server import running
from serve.contract.errors import MissingCheckpointError

WIDTH = 100  # columns


def demo(run: Run, *, otherwise: str | None) -> Result:
    """Start a server, send it every clip of `build.verify_clips` once, and stop it.

    Args:
        run: its config names the clips and the number of calls at a time.
        otherwise: the config where the checkpoint cannot be had.

    Raises:
        EarshotError: the engine cannot be built, a clip is missing or the server did not start.
    """
    config = prepare_config(run.config_path, otherwise, run.say)
    clips, concurrency = find_clips(config.build.verify_clips).clips, config.eval.concurrency
    by_file: dict[str, TimedCall] = {}
    run.say(f"Starting Triton Inference Server with the engine {config.engine} …")
    with running(config) as server, over_triton(config, server.grpc) as system:
        run.say(f"Ready: HTTP {server.http}, gRPC {server.grpc}")
        with tqdm(total=len(clips), desc="Transcribing", unit="clip") as bar:

            def keep(call: TimedCall) -> None:
                by_file[call.file] = call
                bar.update()

            drive(system, LoadPhase("loaded", clips, concurrency), keep)
        memory_bytes = server.peak_memory_bytes()
        server.require_unbroken()
    run.say("Stopped the server.")
    calls = [by_file[clip.file] for clip in clips]
    checks = (score.all_answered({call.file: [call.error] for call in calls if call.error}),)
    for line in ("", *render(calls, concurrency, memory_bytes)):
        run.show(line)
    return Result({"calls": calls, "peak_memory_bytes": memory_bytes}, checks)


def prepare_config(path: str, otherwise: str | None, say: Say) -> EvaluationProduct:
    """Build the engine of a config unless it is up to date.

    Args:
        path: the config.
        otherwise: the config to use if the first one's checkpoint cannot be had.
        say: receives a line if the config is replaced.

    Raises:
        EarshotError: a config is wrong, or the build failed; it has said why.
        MissingCheckpointError: no checkpoint can be had.
    """
    config = load_config(path)
    try:
        prepare_engine(config, path, config.build.precision)
    except MissingCheckpointError:
        if not otherwise:
            raise
        say(f"Without {config.build.checkpoint}, so with {otherwise} in place of {path}:")
        return prepare_config(otherwise, None, say)
    return config


def render(calls: Sequence[TimedCall], concurrency: int, memory_bytes: int) -> Iterator[str]:
    """Yield the lines to print: a block per clip, then the totals."""
    normalize = normalizer(DEFAULT)
    longest = max(len(call.file) for call in calls)
    for call in calls:
        counts = score.char_counts(*score.compared_texts(call, normalize))
        cer = f"CER  none: no speech, {counts.errors} characters heard"
        if counts.length:
            cer = f"CER {100 * counts.errors / counts.length:5.1f} %"
        language = (call.prediction.language if call.prediction else None) or "--"
        yield (
            f"{call.file:{longest}}  {call.duration_s:5.1f} s  {language}  "
            f"latency {call.latency_s:5.2f} s  {cer}"
        )
        yield from _texts(call)
        yield ""
    rates, times = score.accuracy(calls, normalize), score.latency(calls)
    failed = sum(call.error is not None for call in calls)
    audio_s = sum(call.duration_s for call in calls if call.error is None)
    lines = {
        "clips": f"{len(calls)}, {concurrency} at a time, {failed} failed",
        "CER": f"{_percent(rates.cer.percent)} (normaliser {DEFAULT})",
        "WER": _percent(rates.wer.percent),
        "latency": f"p50 {times.p50_s:.2f} s, p95 {times.p95_s:.2f} s, p99 {times.p99_s:.2f} s",
        "RTFx": f"{score.rtfx(calls):.1f} ({audio_s:.1f} s of audio in "
        f"{score.wall_s(calls):.1f} s, {os.cpu_count()} CPU cores)",
        "peak memory": f"{memory_bytes / 2**20:.0f} MiB (server, gateway and model)",
    }
    for label, text in lines.items():
        yield f"{label:12}  {text}"


def _texts(call: TimedCall) -> Iterator[str]:
    """Yield the lines of a call's texts: label and text, wrapped."""
    segments = call.prediction.segments if call.prediction else ()
    texts = [(f"{s.start_s:6.2f} - {s.end_s:6.2f}", s.text.strip()) for s in segments]
    texts = texts or [("", call.text or "(no speech)")]
    texts.append(("reference", call.reference or "(no speech)"))
    for label, text in [("FAILED", call.error)] if call.error else texts:
        start = f"    {label:15}  "
        margin = " " * len(start)
        lines = textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=margin)
        yield from lines or [start.rstrip()]


def _percent(percent: float | None) -> str:
    return "none: no clip has text" if percent is None else f"{percent:.2f} %"
