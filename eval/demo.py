"""What `python -m eval demo` shows: bundled clips through a real server, with their figures."""

import contextlib
import dataclasses
import os
import textwrap
from collections.abc import Callable, Iterator

from tqdm import tqdm

from eval.accuracy.data import TimedCall
from eval.accuracy.load import drive, wall_s
from eval.accuracy.normalize import DEFAULT, normalizer
from eval.accuracy.score import Accuracy, accuracy, char_counts, latency, rtfx
from eval.accuracy.systems import EarshotTriton
from eval.config import Config
from serve.clips import Clip, load_clips

WIDTH = 100  # columns
_MARGIN = " " * 4


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What came of a demo."""

    rows: tuple[TimedCall, ...]  # in the order of the manifest
    concurrency: int
    peak_memory_bytes: int  # of the server and its model process

    @property
    def failed(self) -> int:
        """Calls without an answer."""
        return sum(row.error is not None for row in self.rows)


def demo(config: Config, say: Callable[[str], None]) -> DemoResult:
    """Start a server, send it every clip once, `concurrency` at a time, and stop it.

    `say` gets a line on each stage; a progress bar goes to stderr.

    Raises:
        EarshotError: a clip is missing or the server did not start.
    """
    clips = load_clips(config.eval.manifest)
    say(f"Starting Triton Inference Server with the engine {config.engine} …")
    with contextlib.closing(EarshotTriton(config)) as system:
        say(f"Ready: HTTP {system.server.http}, gRPC {system.server.grpc}")
        rows = _send(system, clips, config.eval.concurrency)
        memory = system.server.peak_memory_bytes()
    say("Stopped the server.")
    return DemoResult(tuple(rows), config.eval.concurrency, memory)


def _send(system: EarshotTriton, clips: list[Clip], concurrency: int) -> list[TimedCall]:
    rows: dict[str, TimedCall] = {}
    with tqdm(total=len(clips), desc="Transcribing", unit="clip", leave=False) as bar:

        def keep(row: TimedCall) -> None:
            rows[row.file] = row
            bar.update()

        drive(system, clips, phase="loaded", concurrency=concurrency, repeats=1, emit=keep)
    return [rows[clip.file] for clip in clips]


def render(result: DemoResult) -> Iterator[str]:
    """The lines to print: a block per clip, then the totals."""
    longest = max(len(row.file) for row in result.rows)
    for row in result.rows:
        yield from _clip_lines(row, longest)
        yield ""
    yield from _totals(result)


def _clip_lines(row: TimedCall, longest: int) -> Iterator[str]:
    language = (row.prediction.language if row.prediction else None) or "--"
    yield (
        f"{row.file:{longest}}  {row.duration_s:5.1f} s  {language}  "
        f"latency {row.latency_s:5.2f} s  {_error_rate(row)}"
    )
    if row.error is not None:
        yield from _wrapped("FAILED", row.error)
        return
    segments = row.prediction.segments if row.prediction else ()
    for segment in segments:
        yield from _wrapped(f"{segment.start_s:6.2f} - {segment.end_s:6.2f}", segment.text.strip())
    if not segments:
        yield from _wrapped("", row.text or "(no speech)")
    yield from _wrapped("reference", row.reference or "(no speech)")


def _error_rate(row: TimedCall) -> str:
    normalize = normalizer(DEFAULT)
    counts = char_counts(normalize(row.reference), normalize(row.text))
    if counts.length:
        return f"CER {100 * counts.errors / counts.length:5.1f} %"
    return f"CER  none: no speech, {counts.errors} characters heard"


def _wrapped(label: str, text: str) -> list[str]:
    start = f"{_MARGIN}{label:15}  "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [
        start.rstrip()
    ]


def _totals(result: DemoResult) -> Iterator[str]:
    rows = result.rows
    found: Accuracy = accuracy(rows, normalizer(DEFAULT))
    times = latency(rows)
    audio_s = sum(row.duration_s for row in rows if row.error is None)
    lines = {
        "clips": f"{len(rows)}, {result.concurrency} at a time, {result.failed} failed",
        "CER": f"{_rate(found.cer.percent)} (normaliser {DEFAULT})",
        "WER": _rate(found.wer.percent),
        "latency": f"p50 {times.p50_s:.2f} s, p95 {times.p95_s:.2f} s, p99 {times.p99_s:.2f} s",
        "RTFx": f"{rtfx(rows):.1f} ({audio_s:.1f} s of audio in {wall_s(rows):.1f} s, "
        f"{os.cpu_count()} CPU cores)",
        "peak memory": f"{result.peak_memory_bytes / 2**20:.0f} MiB (server and model)",
    }
    for label, text in lines.items():
        yield f"{label:12}  {text}"


def _rate(percent: float | None) -> str:
    return "none: no clip has text" if percent is None else f"{percent:.2f} %"
