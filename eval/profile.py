"""`python -m eval profile`: torch's profiler over a fixed load.

The report shows where the time goes: by phase and by kernel, and where the device is idle. On a GPU
the work is kernels and copies, which belong to the phase that launched them. On a CPU it is
operators, each without the operators that it calls. A phase is a range of the runtime's stopwatches
(`serve.native.stopwatch`).
"""

import bisect
import collections
import contextlib
import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from eval.config import changed
from eval.corpora.find import find_clips
from eval.random_whisper import published_shape, random_engine
from eval.record import ReportSection, Result, Run, Table
from serve.contract.devices import first_of
from serve.contract.messages import Request, Transcript
from serve.native.runtime import NativeRuntime
from serve.native.stopwatch import Stopwatch
from serve.transcriber.open import open_transcriber

LOAD = "load"
"""Name of the range around all of it."""
BETWEEN = "between"
"""Name of the time in no phase."""
PHASES = ("encode", "prompts", "steps", "words")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_US = 1e6


class TraceSlice(NamedTuple):
    """A piece of work, or a range; times in microseconds."""

    begin: float
    end: float
    name: str
    thread: object
    correlation: int | None  # of work on a GPU with its launch


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All work of a name in a phase."""

    name: str
    phase: str
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """The device's time in a phase."""

    name: str
    busy_s: float
    idle_s: float  # while nothing else was done either


@dataclasses.dataclass(frozen=True)
class DeviceTimeline:
    """The device's work and idle times during a load."""

    seconds: float  # length of the load
    busy_s: float
    phases: tuple[PhaseTime, ...]
    kernels: tuple[Kernel, ...]  # the longest first


PhaseRanges = dict[object, list[TraceSlice]]
"""The phases of each thread, in order; they do not overlap within a thread."""


def timeline_of(events: Iterable[Mapping[str, Any]]) -> DeviceTimeline:
    """Add up the events of a Chrome trace.

    Work belongs to the phase in which it began, on the thread that did or launched it. Idle time
    belongs to the phase that a thread was in at its begin. Work at the same time, as of kernels on
    two streams, is busy time once.
    """
    slices: dict[str, list[TraceSlice]] = collections.defaultdict(list)  # by category
    for event in events:
        if event.get("ph") == "X":
            begin, thread = float(event["ts"]), (event.get("pid"), event.get("tid"))
            end, correlation = begin + event.get("dur", 0), event.get("args", {}).get("correlation")
            piece = TraceSlice(begin, end, str(event["name"]), thread, correlation)
            slices[event.get("cat", "")].append(piece)
    ranges = sorted(slices["user_annotation"], key=lambda piece: piece.begin)
    load = next(piece for piece in ranges if piece.name == LOAD)
    phases: PhaseRanges = collections.defaultdict(list)
    for piece in ranges:
        if piece.name in PHASES:
            phases[piece.thread].append(piece)
    launches = {piece.correlation: piece for kind in _LAUNCHES for piece in slices[kind]}
    work = [(piece, piece.end - piece.begin) for kind in _ON_GPU for piece in slices[kind]]
    if not work:
        work = _own_times(piece for piece in slices["cpu_op"] if piece.thread in phases)
    durations_s: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    busy_s, idle_s = (collections.defaultdict[str, float](float) for _ in range(2))
    busy_until = load.begin
    for piece, own_us in sorted(work, key=lambda pair: pair[0].begin):
        if load.begin <= piece.begin < load.end:
            launch = launches.get(piece.correlation, piece)
            phase = _phase_at(phases, launch.begin, [launch.thread])
            durations_s[piece.name, phase].append(own_us / _US)
            idle_phase = _phase_at(phases, busy_until, phases)
            idle_s[idle_phase] += max(0.0, piece.begin - busy_until) / _US
            # What begins before the previous work has ended is busy time only after that.
            busy_s[phase] += max(0.0, piece.end - max(piece.begin, busy_until)) / _US
            busy_until = max(busy_until, piece.end)
    idle_s[_phase_at(phases, busy_until, phases)] += max(0.0, load.end - busy_until) / _US
    kernels = [Kernel(*key, len(times), sum(times)) for key, times in durations_s.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    times = [PhaseTime(name, busy_s[name], idle_s[name]) for name in (*PHASES, BETWEEN)]
    seconds = (load.end - load.begin) / _US
    return DeviceTimeline(
        seconds,
        seconds - sum(idle_s.values()),
        tuple(time for time in times if time.busy_s or time.idle_s),
        tuple(kernels),
    )


def _phase_at(phases: PhaseRanges, moment: float, threads: Iterable[object]) -> str:
    """Return the phase that one of these threads is in."""
    for thread in threads:
        ranges = phases.get(thread, [])
        index = bisect.bisect_right(ranges, moment, key=lambda piece: piece.begin) - 1
        if index >= 0 and moment < ranges[index].end:
            return ranges[index].name
    return BETWEEN


def _own_times(operators: Iterable[TraceSlice]) -> list[tuple[TraceSlice, float]]:
    """Return each operator with its microseconds without those of the operators that it calls."""
    ordered = sorted(operators, key=lambda piece: (piece.begin, -piece.end))
    own_us = [piece.end - piece.begin for piece in ordered]
    callers: dict[object, list[int]] = collections.defaultdict(list)  # under way, by thread
    for index, operator in enumerate(ordered):
        stack = callers[operator.thread]
        while stack and ordered[stack[-1]].end <= operator.begin:
            stack.pop()
        if stack:
            own_us[stack[-1]] -= operator.end - operator.begin
        stack.append(index)
    return [(piece, max(0.0, own)) for piece, own in zip(ordered, own_us, strict=True)]


TRACE = "trace.json.gz"
_KERNELS = 25  # shown for each phase


def profiled(
    run: Run, *, clips: str | None, requests: int, at_once: int, words: bool, random_weights: bool
) -> Result:
    """Profile a fixed load; write its page and a trace to open.

    Args:
        run: the run; its folder gets both.
        clips: the place of the clips; None: the config's `eval.manifest`.
        requests: the number of requests after a warm-up.
        at_once: the number of requests at a time.
        words: whether words are timed.
        random_weights: whether an engine of the configured shape is made up.

    Raises:
        EarshotError: the engine cannot be opened, or a request failed.
    """
    config = dataclasses.replace(run.config, runtime=first_of(run.config.runtime))
    device, folder = config.runtime.device, config.engine
    found = sorted(find_clips(clips or config.eval.manifest).clips, key=lambda clip: clip.file)
    files = [clip.path.read_bytes() for clip in found]
    load = [Request(files[i % len(files)], word_timestamps=words) for i in range(requests)]
    with contextlib.ExitStack() as stack:
        if random_weights:  # they say as many tokens as they may, once, for every window
            config = changed(config, "transcriber", temperatures=(0.0,))
            shape = published_shape(config.build.checkpoint)
            engine = stack.enter_context(random_engine(shape, config.build.precision, run.say))
            folder = str(engine.path)
        # In this process, where torch's profiler sees the runtime.
        transcriber = stack.enter_context(open_transcriber(config, folder, NativeRuntime))

        def transcribe(requests: Sequence[Request]) -> list[Transcript]:
            with ThreadPoolExecutor(at_once) as pool:
                transcripts = list(pool.map(transcriber.transcribe, requests))
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            return transcripts

        run.say(f"warm-up: {at_once} requests")
        transcribe(load[:at_once])
        run.say(f"{requests} requests, {at_once} at a time")
        threads = _ExperimentalConfig(profile_all_threads=True)  # the runtime has its own
        Stopwatch.ranges = record_function
        try:
            with profile(experimental_config=threads) as profiler, record_function(LOAD):
                transcripts = transcribe(load)
        finally:
            Stopwatch.ranges = None
    run.folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(run.folder / TRACE))
    audio_s = sum(transcript.duration for transcript in transcripts)
    about = f"{requests} requests on {device}, {audio_s:.0f} s of audio"
    with gzip.open(run.folder / TRACE, "rt", encoding="utf-8") as file:
        timeline = timeline_of(json.load(file)["traceEvents"])
    return result_of(timeline, about)


# ---------------------------------------------------------------- report


def result_of(timeline: DeviceTimeline, about: str) -> Result:
    """Return the result of a load: the phases, and the longest kernels of each phase."""
    rows = []
    for phase in timeline.phases:
        share = (phase.busy_s + phase.idle_s) / timeline.seconds
        rows.append((phase.name, _ms(phase.busy_s), _ms(phase.idle_s), f"{share:.1%}"))
    kernels = [_kernels(timeline, phase.name) for phase in timeline.phases if phase.busy_s]
    times = Table(("phase", "busy, ms", "idle, ms", "of the load"), rows, note=_ABOUT_PHASES)
    busy = f"{timeline.busy_s / timeline.seconds:.1%}"
    return Result(
        timeline,
        sections=(
            ReportSection("Phases", [times]),
            ReportSection("Kernels", kernels, printed=False),
        ),
        about=f"{about}: the device is busy {busy} of {timeline.seconds:.2f} s under the profiler, "
        f"which itself takes time. `{TRACE}` opens in Perfetto (ui.perfetto.dev).",
    )


_ABOUT_PHASES = (
    "Busy: kernels that were launched in the phase, or operators on a CPU. Idle: nothing ran while "
    "the runtime's thread was in the phase: it launched, copied or computed in Python. Between: "
    "log-mels, judging, and waiting for requests."
)


def _kernels(timeline: DeviceTimeline, phase: str) -> Table:
    """Tabulate the kernels of a phase, the longest first."""
    kernels = [kernel for kernel in timeline.kernels if kernel.phase == phase]
    all_s, rows = sum(kernel.seconds for kernel in timeline.kernels), []
    for kernel in kernels[:_KERNELS]:
        call_us, share = _US * kernel.seconds / kernel.calls, kernel.seconds / all_s
        numbers = (f"{kernel.calls:,}", _ms(kernel.seconds), f"{call_us:.1f}", f"{share:.1%}")
        rows.append((f"`{kernel.name}`", *numbers))
    header = ("name", "calls", "ms", "µs a call", "of all work")
    return Table(header, rows, f"{phase}: {len(kernels)} names", folded="closed", prose=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
