"""`python -m eval profile`: torch's profiler, or Nsight Systems, over a fixed load."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from eval.config import EvaluationProduct, changed
from eval.corpora.find import find_clips
from eval.profile.timeline import LOAD, DeviceTimeline, read_timeline
from eval.random_whisper import published_shape, random_engine, write_engine
from eval.record import Card, ReportSection, Result, Run, Table
from serve.contract.devices import first_of
from serve.contract.errors import ConfigError, EarshotError, UnavailableError
from serve.contract.messages import Request, Transcript
from serve.native.stopwatch import Stopwatch
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber

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
        run: of the product; its folder gets both.
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
    times = Table(("phase", "busy, ms", "idle, ms", "of the load"), phases, note=_PHASES)
    idle = Table(("phase", "at, ms", "ms", "after", "before"), gaps, note=_GAPS, prose=True)
    kernels = [_kernels(timeline, phase.name) for phase in timeline.phases]
    busy = f"{timeline.busy_s / timeline.seconds:.1%}"
    return Result(
        timeline,
        sections=(
            ReportSection("Phases", [times]),
            ReportSection("Kernels", [table for table in kernels if table.rows]),
            ReportSection("Gaps", [idle], printed=False),
        ),
        about=f"{about}, {timeline.seconds:.2f} s under the profiler, which itself takes time. "
        f"`{TRACE}` opens in Perfetto (ui.perfetto.dev).",
        cards=(Card("The device is busy", busy, (f"of {timeline.seconds:.2f} s",)),),
    )


_PHASES = (
    "Busy: kernels that were launched in the phase, or operators on a CPU. Idle: nothing ran while "
    "the runtime's thread was in the phase: it launched, copied or computed in Python. Between: "
    "log-mels, judging, and waiting for requests."
)
_GAPS = "Times in which the device did nothing, with the work before and after."


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
