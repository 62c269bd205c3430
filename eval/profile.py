"""`python -m eval profile`: torch's profiler, or Nsight Systems, over a fixed load.

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
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from eval.config import EvaluationProduct, changed
from eval.corpora.find import find_clips
from eval.random_whisper import published_shape, random_engine, write_engine
from eval.record import ReportSection, Result, Run, Table
from serve.contract.devices import first_of
from serve.contract.errors import ConfigError, EarshotError, UnavailableError
from serve.contract.messages import Request, Transcript
from serve.native.stopwatch import Stopwatch
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber

LOAD = "load"
"""Name of the range around all of it."""
BETWEEN = "between"
"""Name of the time in no phase."""
PHASES = ("encode", "prompts", "steps", "words")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_US = 1e6
_GAPS = 15  # the longest, that are kept


@dataclasses.dataclass(frozen=True)
class TraceSlice:
    """A piece of work, or a range; times in microseconds."""

    name: str
    begin: float
    end: float
    thread: object
    correlation: int | None = None


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
class DeviceIdle:
    """A time in which the device did nothing."""

    at_s: float  # after the load's begin
    seconds: float
    phase: str  # that the host was in at its begin
    after: str  # the work before it
    before: str


@dataclasses.dataclass(frozen=True)
class DeviceTimeline:
    """The device's work and idle times during a load."""

    seconds: float  # length of the load
    busy_s: float
    phases: tuple[PhaseTime, ...]
    kernels: tuple[Kernel, ...]  # the longest first
    gaps: tuple[DeviceIdle, ...]  # likewise


def read_timeline(path: Path) -> DeviceTimeline:
    """Read a Chrome trace, a JSON file packed by gzip.

    Raises:
        ValueError: the load is not in it.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return timeline_of(json.load(file)["traceEvents"])


def timeline_of(events: Iterable[Mapping[str, Any]]) -> DeviceTimeline:
    """Add up the events of a trace; see `read_timeline`."""
    slices: dict[str, list[TraceSlice]] = collections.defaultdict(list)  # by category
    for event in events:
        if event.get("ph") == "X":
            slices[event.get("cat", "")].append(_slice(event))
    ranges = slices["user_annotation"]
    load = next((one for one in ranges if one.name == LOAD), None)
    if load is None:
        raise ValueError(f"the trace has no range {LOAD}")
    phases: PhaseRanges = collections.defaultdict(list)
    for one in sorted(ranges, key=lambda one: one.begin):
        if one.name in PHASES:
            phases[one.thread].append(one)
    work = [one for one in _work(slices, phases) if load.begin <= one[0].begin < load.end]
    durations: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for piece, phase, own_us in work:
        durations[piece.name, phase].append(own_us / _US)
    kernels = [Kernel(*key, len(times), sum(times)) for key, times in durations.items()]
    gaps = list(_gaps(load, [piece for piece, _, _ in work], phases))
    times = [
        PhaseTime(
            name,
            sum(kernel.seconds for kernel in kernels if kernel.phase == name),
            sum(gap.seconds for gap in gaps if gap.phase == name),
        )
        for name in (*PHASES, BETWEEN)
    ]
    seconds = (load.end - load.begin) / _US
    return DeviceTimeline(
        seconds,
        seconds - sum(gap.seconds for gap in gaps),
        tuple(time for time in times if time.busy_s or time.idle_s),
        tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:_GAPS]),
    )


def _slice(event: Mapping[str, Any]) -> TraceSlice:
    begin, correlation = float(event["ts"]), event.get("args", {}).get("correlation")
    thread = event.get("pid"), event.get("tid")
    end = begin + float(event.get("dur", 0))
    return TraceSlice(str(event["name"]), begin, end, thread, correlation)


PhaseRanges = dict[object, list[TraceSlice]]
"""The phases of each thread, in order; they do not overlap within a thread."""


def _phase_at(phases: PhaseRanges, moment: float, threads: Iterable[object]) -> str:
    """Return the phase that one of these threads is in."""
    for thread in threads:
        ranges = phases.get(thread, [])
        index = bisect.bisect_right(ranges, moment, key=lambda one: one.begin) - 1
        if index >= 0 and moment < ranges[index].end:
            return ranges[index].name
    return BETWEEN


def _work(
    slices: Mapping[str, list[TraceSlice]], phases: PhaseRanges
) -> list[tuple[TraceSlice, str, float]]:
    """Return the device's work in order, each piece with its phase and its own microseconds.

    Work belongs to the phase in which it began, on the thread that did or launched it.
    """
    launches = {one.correlation: one for kind in _LAUNCHES for one in slices[kind]}
    pieces = [(one, one.end - one.begin) for kind in _ON_GPU for one in slices[kind]]
    if not pieces:
        pieces = _own_times(one for one in slices["cpu_op"] if one.thread in phases)
        launches = {}
    work = []
    for piece, own_us in sorted(pieces, key=lambda pair: pair[0].begin):
        launch = launches.get(piece.correlation, piece)
        work.append((piece, _phase_at(phases, launch.begin, [launch.thread]), own_us))
    return work


def _own_times(operators: Iterable[TraceSlice]) -> list[tuple[TraceSlice, float]]:
    """Return each operator with its time without that of the operators that it calls."""
    ordered = sorted(operators, key=lambda one: (one.begin, -one.end))
    own_us = [one.end - one.begin for one in ordered]
    callers: dict[object, list[int]] = collections.defaultdict(list)  # under way, by thread
    for index, operator in enumerate(ordered):
        stack = callers[operator.thread]
        while stack and ordered[stack[-1]].end <= operator.begin:
            stack.pop()
        if stack:
            own_us[stack[-1]] -= operator.end - operator.begin
        stack.append(index)
    return [(one, max(0.0, own)) for one, own in zip(ordered, own_us, strict=True)]


def _gaps(
    load: TraceSlice, work: Sequence[TraceSlice], phases: PhaseRanges
) -> Iterator[DeviceIdle]:
    """Yield the times of a load without work."""
    busy_until, previous = load.begin, "the load's begin"
    after_load = TraceSlice("the load's end", load.end, load.end, None)
    for piece in (*work, after_load):
        if piece.begin > busy_until:
            at_s, seconds = (busy_until - load.begin) / _US, (piece.begin - busy_until) / _US
            phase = _phase_at(phases, busy_until, phases)
            yield DeviceIdle(at_s, seconds, phase, previous, piece.name)
        if piece.end > busy_until:
            busy_until, previous = piece.end, piece.name


TRACE = "trace.json.gz"
NSYS = "profile.nsys-rep"
UNDER_NSYS = "EARSHOT_PROFILE_UNDER_NSYS"
"""Environment variable of the process that Nsight Systems records."""
_KERNELS = 25  # shown for each phase


def profiled(
    run: Run,
    *,
    clips: str | None,
    requests: int,
    at_once: int,
    words: bool,
    random_weights: bool,
    nsys: bool,
) -> Result:
    """Profile a fixed load; write its page and a trace to open.

    Args:
        run: the run; its folder gets both.
        clips: the place of the clips; None: the config's `eval.manifest`.
        requests: the number of requests after a warm-up.
        at_once: the number of requests at a time.
        words: whether words are timed.
        random_weights: whether an engine of the configured shape is made up.
        nsys: whether the load runs under Nsight Systems instead.

    Raises:
        ConfigError: the device cannot be profiled so.
        UnavailableError: Nsight Systems is not installed.
        EarshotError: the engine cannot be opened, or a request failed.
    """
    config = dataclasses.replace(run.config, runtime=first_of(run.config.runtime))
    device, under_nsys = config.runtime.device, UNDER_NSYS in os.environ
    if nsys and not under_nsys:
        return _under_nsys(run, device)
    found = sorted(find_clips(clips or config.eval.manifest).clips, key=lambda clip: clip.file)
    files = [clip.path.read_bytes() for clip in found]
    load = [Request(files[i % len(files)], word_timestamps=words) for i in range(requests)]
    with _opened(config, random_weights) as transcriber:

        def transcribe(requests: Sequence[Request]) -> list[Transcript]:
            with ThreadPoolExecutor(at_once) as pool:
                transcripts = list(pool.map(transcriber.transcribe, requests))
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            return transcripts

        run.say(f"warm-up: {at_once} requests")
        transcribe(load[:at_once])
        run.say(f"{requests} requests, {at_once} at a time")
        if under_nsys:
            with _marked():
                transcribe(load)
            return Result()
        with _recorded(device, run.folder / TRACE):
            transcripts = transcribe(load)
    audio_s = sum(transcript.duration for transcript in transcripts)
    about = f"{requests} requests on {device}, {audio_s:.0f} s of audio"
    return result_of(read_timeline(run.folder / TRACE), about)


@contextlib.contextmanager
def _opened(config: EvaluationProduct, random_weights: bool) -> Iterator[Transcriber]:
    """Open the config's engine, or one with random weights, for the length of a block.

    Random weights say as many tokens as they may, once, for every window.

    Raises:
        EarshotError: it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(config.engine)
        if random_weights:
            config = changed(config, "transcriber", temperatures=(0.0,))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="earshot-")))
            engine = random_engine(published_shape(config.build.checkpoint), config.build.precision)
            write_engine(engine, folder, config.runtime.device)
        yield stack.enter_context(open_transcriber(config, str(folder)))


@contextlib.contextmanager
def _recorded(device: str, path: Path) -> Iterator[None]:
    """Run a block under torch's profiler, and keep the trace."""
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    threads = _ExperimentalConfig(profile_all_threads=True)  # the runtime has its own
    path.parent.mkdir(parents=True, exist_ok=True)
    Stopwatch.ranges = record_function
    try:
        with (
            profile(activities=activities, experimental_config=threads) as profiler,
            record_function(LOAD),
        ):
            yield
    finally:
        Stopwatch.ranges = None
    profiler.export_chrome_trace(str(path))


# ---------------------------------------------------------------- Nsight Systems


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Run a block between the marks that Nsight Systems waits for, with its own ranges."""
    Stopwatch.ranges = torch.cuda.nvtx.range
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        Stopwatch.ranges = None


def _under_nsys(run: Run, device: str) -> Result:
    """Run the command of this process again, under Nsight Systems.

    Raises:
        UnavailableError: it is not installed.
        ConfigError: the device is no GPU.
        EarshotError: it failed.
    """
    program = shutil.which("nsys")
    if program is None:
        raise UnavailableError(
            "--nsys needs NVIDIA Nsight Systems, whose program nsys is not in PATH; install it, or "
            "leave --nsys out for torch's own profiler"
        )
    if not device.startswith("cuda"):
        raise ConfigError(f'--nsys needs runtime.device = "cuda", got {device!r}; leave it out')
    run.folder.mkdir(parents=True, exist_ok=True)
    report = run.folder / NSYS
    options = (
        "--trace=cuda,nvtx,osrt",
        "--cuda-graph-trace=node",  # each kernel of a graph by itself
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"-o{report}"),
    )
    command = [program, "profile", *options, *sys.orig_argv]
    if status := subprocess.call(command, env={**os.environ, UNDER_NSYS: "1"}):
        raise EarshotError(f"{program} ended with status {status}; see above")
    run.say(f"To open in Nsight Systems: {report}")
    return Result()


# ---------------------------------------------------------------- report


def result_of(timeline: DeviceTimeline, about: str) -> Result:
    """Return the result of a load: a section each for phases, kernels and gaps."""
    phases = []
    for phase in timeline.phases:
        share = (phase.busy_s + phase.idle_s) / timeline.seconds
        phases.append((phase.name, _ms(phase.busy_s), _ms(phase.idle_s), f"{share:.1%}"))
    gaps = [
        (gap.phase, _ms(gap.at_s), _ms(gap.seconds), f"`{gap.after}`", f"`{gap.before}`")
        for gap in timeline.gaps
    ]
    times = Table(("phase", "busy, ms", "idle, ms", "of the load"), phases, note=_ABOUT_PHASES)
    idle = Table(("phase", "at, ms", "ms", "after", "before"), gaps, note=_ABOUT_GAPS, prose=True)
    kernels = [_kernels(timeline, phase.name) for phase in timeline.phases]
    busy = f"{timeline.busy_s / timeline.seconds:.1%}"
    return Result(
        timeline,
        sections=(
            ReportSection("Phases", [times]),
            ReportSection("Kernels", [table for table in kernels if table.rows], printed=False),
            ReportSection("Gaps", [idle], printed=False),
        ),
        about=f"{about}, {timeline.seconds:.2f} s under the profiler, which itself takes time. The "
        f"device is busy {busy} of it. `{TRACE}` opens in Perfetto (ui.perfetto.dev).",
    )


_ABOUT_PHASES = (
    "Busy: kernels that were launched in the phase, or operators on a CPU. Idle: nothing ran while "
    "the runtime's thread was in the phase: it launched, copied or computed in Python. Between: "
    "log-mels, judging, and waiting for requests."
)
_ABOUT_GAPS = "Times in which the device did nothing, with the work before and after."


def _kernels(timeline: DeviceTimeline, phase: str) -> Table:
    """Tabulate the kernels of a phase, the longest first."""
    kernels = [kernel for kernel in timeline.kernels if kernel.phase == phase]
    rows = []
    for kernel in kernels[:_KERNELS]:
        call_us, share = 1e6 * kernel.seconds / kernel.calls, kernel.seconds / timeline.busy_s
        numbers = (f"{kernel.calls:,}", _ms(kernel.seconds), f"{call_us:.1f}", f"{share:.1%}")
        rows.append((f"`{kernel.name}`", *numbers))
    header = ("name", "calls", "ms", "µs a call", "of the busy time")
    return Table(header, rows, f"{phase}: {len(kernels)} names", folded=True, prose=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
