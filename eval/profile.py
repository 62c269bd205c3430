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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from eval.config import EvaluationProduct, changed
from eval.corpora.find import find_clips
from eval.random_whisper import published_shape, random_engine, write_engine
from eval.record import Card, ReportSection, Result, Run, Table
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

    seconds: float  # of the load
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
    by_kind: dict[str, list[TraceSlice]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(_slice(event))
    ranges = by_kind["user_annotation"]
    load = next((part for part in ranges if part.name == LOAD), None)
    if load is None:
        raise ValueError(f"the trace has no range {LOAD}")
    phases = _TracePhases(part for part in ranges if part.name in PHASES)
    work = [one for one in _work(by_kind, phases) if load.begin <= one[0].begin < load.end]
    work.sort(key=lambda one: one[0].begin)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    spent: dict[tuple[str, str], float] = collections.defaultdict(float)
    busy: dict[str, float] = collections.defaultdict(float)
    idle: dict[str, float] = collections.defaultdict(float)
    for part, phase, own in work:
        calls[part.name, phase] += 1
        spent[part.name, phase] += own / _US
        busy[phase] += own / _US
    gaps = [
        DeviceIdle((begin - load.begin) / _US, (end - begin) / _US, phases.at(begin), after, before)
        for begin, end, after, before in _gaps(load, [part for part, _, _ in work])
    ]
    for gap in gaps:
        idle[gap.phase] += gap.seconds
    seconds = (load.end - load.begin) / _US
    times = [PhaseTime(name, busy[name], idle[name]) for name in (*PHASES, BETWEEN)]
    kernels = [Kernel(*key, calls[key], spent[key]) for key in calls]
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


class _TracePhases:
    """The phases of a trace, by thread and time; they do not overlap within a thread."""

    def __init__(self, ranges: Iterable[TraceSlice]) -> None:
        self._ranges: dict[object, list[TraceSlice]] = collections.defaultdict(list)
        for part in sorted(ranges, key=lambda part: part.begin):
            self._ranges[part.thread].append(part)

    @property
    def threads(self) -> set[object]:
        """Return the threads that have phases."""
        return set(self._ranges)

    def of(self, part: TraceSlice) -> str:
        """Return the phase in which something began, by the thread that did it."""
        return self._at(part.thread, part.begin)

    def at(self, moment: float) -> str:
        """Return the phase that any thread is in."""
        found = (self._at(thread, moment) for thread in self._ranges)
        return next((phase for phase in found if phase != BETWEEN), BETWEEN)

    def _at(self, thread: object, moment: float) -> str:
        ranges = self._ranges.get(thread, [])
        index = bisect.bisect_right(ranges, moment, key=lambda part: part.begin) - 1
        return ranges[index].name if index >= 0 and moment < ranges[index].end else BETWEEN


def _work(
    by_kind: Mapping[str, list[TraceSlice]], phases: _TracePhases
) -> list[tuple[TraceSlice, str, float]]:
    """Return the work of the device, each with its phase and its own time in microseconds."""
    on_gpu = [part for kind in _ON_GPU for part in by_kind[kind]]
    if on_gpu:
        launches = {part.correlation: part for kind in _LAUNCHES for part in by_kind[kind]}
        return [
            (part, phases.of(launches.get(part.correlation, part)), part.end - part.begin)
            for part in on_gpu
        ]
    operators = [part for part in by_kind["cpu_op"] if part.thread in phases.threads]
    return [(part, phases.of(part), own) for part, own in _own_times(operators)]


def _own_times(parts: Iterable[TraceSlice]) -> list[tuple[TraceSlice, float]]:
    """Return each operator with its time without that of the operators that it calls."""
    ordered = sorted(parts, key=lambda part: (part.begin, -part.end))
    own = [part.end - part.begin for part in ordered]
    callers: dict[object, list[int]] = collections.defaultdict(list)  # under way, by thread
    for index, part in enumerate(ordered):
        calling = callers[part.thread]
        while calling and ordered[calling[-1]].end <= part.begin:
            calling.pop()
        if calling:
            own[calling[-1]] -= part.end - part.begin
        calling.append(index)
    return [(part, max(0.0, seconds)) for part, seconds in zip(ordered, own, strict=True)]


def _gaps(load: TraceSlice, work: Sequence[TraceSlice]) -> Iterable[tuple[float, float, str, str]]:
    """Yield begin and end of the times without work, and the work before and after each."""
    reached, last = load.begin, "the load's begin"
    for part in work:
        if part.begin > reached:
            yield reached, part.begin, last, part.name
        if part.end > reached:
            reached, last = part.end, part.name
    if load.end > reached:
        yield reached, load.end, last, "the load's end"


TRACE = "trace.json.gz"
NSYS = "profile.nsys-rep"
UNDER_NSYS = "EARSHOT_PROFILE_UNDER_NSYS"
"""Environment variable of the process that Nsight Systems records."""
_KERNELS = 25  # of each phase


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
        clips: where they are; None: the config's `eval.manifest`.
        requests: how many, after a warm-up.
        at_once: how many at a time.
        words: whether words are timed.
        random_weights: an engine of the configured shape is made up.
        nsys: the load runs under Nsight Systems instead.

    Raises:
        ConfigError: the device is none that can be profiled so.
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

        def answer(requests: Sequence[Request]) -> list[Transcript]:
            with ThreadPoolExecutor(at_once) as pool:
                answers = list(pool.map(transcriber.transcribe, requests))
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            return answers

        run.say(f"warm-up: {at_once} requests")
        answer(load[:at_once])
        run.say(f"{requests} requests, {at_once} at a time")
        if under_nsys:
            _marked(lambda: answer(load))
            return Result()
        with _recorded(device, run.folder / TRACE):
            answers = answer(load)
    audio_s = sum(answer.duration for answer in answers)
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


def _marked(work: Callable[[], object]) -> None:
    """Work between the marks that Nsight Systems waits for, with its own ranges."""
    Stopwatch.ranges = torch.cuda.nvtx.range
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        work()
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
    report = run.folder / NSYS
    report.parent.mkdir(parents=True, exist_ok=True)
    options = (
        "--trace=cuda,nvtx,osrt",
        "--cuda-graph-trace=node",  # each kernel of a graph by itself
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("--force-overwrite=true", f"-o{report}"),
    )
    command = [program, "profile", *options, *sys.orig_argv]
    done = subprocess.run(command, env={**os.environ, UNDER_NSYS: "1"}, check=False)
    if done.returncode:
        raise EarshotError(f"{program} ended with status {done.returncode}; see above")
    run.show(f"To open in Nsight Systems: {report}")
    return Result()


# ---------------------------------------------------------------- report


def result_of(timeline: DeviceTimeline, about: str) -> Result:
    """Return the result of a load: a card, and a section each for phases, kernels and gaps."""
    phases = [
        (
            phase.name,
            _ms(phase.busy_s),
            _ms(phase.idle_s),
            f"{(phase.busy_s + phase.idle_s) / timeline.seconds:.1%}",
        )
        for phase in timeline.phases
    ]
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
        about=f"{about}, {timeline.seconds:.2f} s under the profiler, which itself takes time. "
        f"`{TRACE}` opens in Perfetto (ui.perfetto.dev).",
        cards=(Card("The device is busy", busy, (f"of {timeline.seconds:.2f} s",)),),
    )


_ABOUT_PHASES = (
    "Busy: kernels that were launched in the phase, or operators on a CPU. Idle: nothing ran while "
    "the runtime's thread was in the phase: it launched, copied or computed in Python. Between: "
    "log-mels, judging, and waiting for requests."
)
_ABOUT_GAPS = "Times in which the device did nothing, with the work before and after."


def _kernels(timeline: DeviceTimeline, phase: str) -> Table:
    """Tabulate the kernels of a phase, the longest first."""
    mine = [kernel for kernel in timeline.kernels if kernel.phase == phase]
    rows = [
        (
            f"`{kernel.name}`",
            f"{kernel.calls:,}",
            _ms(kernel.seconds),
            f"{1e6 * kernel.seconds / kernel.calls:.1f}",
            f"{kernel.seconds / timeline.busy_s:.1%}",
        )
        for kernel in mine[:_KERNELS]
    ]
    header = ("name", "calls", "ms", "µs a call", "of the busy time")
    return Table(header, rows, f"{phase}: {len(mine)} names", folded="closed", prose=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
