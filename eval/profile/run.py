"""`python -m eval profile`: torch's profiler, or Nsight Systems, over a fixed load."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from eval.accuracy.page.page import render
from eval.bench.floor import PROMPT_TOKENS, Ceilings, encoder_work, measure_ceilings, step_bytes
from eval.config import Config
from eval.corpora.find import find_clips
from eval.files import write_text
from eval.measurement import Result, Run, table
from eval.profile.load import Done, Load, opened, synchronize
from eval.profile.timeline import LOAD, Timeline, read_timeline
from serve.contract.devices import first_of
from serve.contract.engine import Manifest
from serve.contract.errors import ConfigError, EarshotError, UnavailableError
from serve.native.stopwatch import Stopwatch

PAGE = "profile.html"
TRACE = "trace.json.gz"
NSYS = "profile.nsys-rep"
_TEMPLATES = Path(__file__).parent / "templates"
_KERNELS = 25  # that the page has of each phase
_SHOWN = 10  # that the report has


@dataclasses.dataclass(frozen=True)
class Part:
    """A phase of requests' time, as their traces show it."""

    name: str
    requests: int
    mean_s: float  # from its begin to its end, of a request
    busy_s: float  # of all requests together


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast a phase worked, beside what the machine can do."""

    phase: str
    what: str
    achieved: float  # a second of the device's time in the phase
    ceiling: float

    @property
    def share(self) -> float:
        """Return the achieved share of the ceiling."""
        return self.achieved / self.ceiling


@dataclasses.dataclass(frozen=True)
class Profile:
    """All that was found."""

    device: str
    audio_s: float
    windows: int
    steps: int
    mean_batch: float
    timeline: Timeline
    parts: tuple[Part, ...]
    rates: tuple[Rate, ...]
    ceilings: Ceilings


def profiled(
    run: Run,
    *,
    clips: str | None,
    requests: int,
    at_once: int,
    words: bool,
    random_weights: bool,
    nsys: bool,
    under_nsys: bool,
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
        under_nsys: it does so now.

    Raises:
        ConfigError: the device is none that can be profiled so.
        UnavailableError: Nsight Systems is not installed.
        EarshotError: the engine cannot be opened, or a request failed.
    """
    config = dataclasses.replace(run.config, runtime=first_of(run.config.runtime))
    device = config.runtime.device
    if nsys:
        return _under_nsys(run, device)
    found = sorted(find_clips(clips or config.eval.manifest).clips, key=lambda clip: clip.file)
    on = torch.device(device)
    with opened(config, random_weights) as (transcriber, runtime, manifest):
        load = Load(transcriber, runtime, found, requests, at_once, words)
        run.say(f"warm-up: {at_once} requests")
        load.warm_up()
        synchronize(device)
        run.say(f"{requests} requests, {at_once} at a time")
        if under_nsys:
            return _marked(load)
        ceilings = measure_ceilings(config.runtime, manifest.dims)
        done = _recorded(load, on, run.folder / TRACE)
    profile = _profile(config, manifest, done, read_timeline(run.folder / TRACE), ceilings, device)
    write_text(run.folder / PAGE, _page(run, profile))
    text = f"{_text(profile)}\n\nThe page: {run.folder / PAGE}; to open in Perfetto: {TRACE}"
    return Result(profile, text=text)


def _recorded(load: Load, device: torch.device, path: Path) -> Done:
    """Run the load under torch's profiler, and keep the trace."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    threads = _ExperimentalConfig(profile_all_threads=True)  # the runtime has its own
    path.parent.mkdir(parents=True, exist_ok=True)
    Stopwatch.ranges = record_function
    try:
        with (
            profile(activities=activities, experimental_config=threads) as profiler,
            record_function(LOAD),
        ):
            done = load.run()
            synchronize(str(device))
    finally:
        Stopwatch.ranges = None
    profiler.export_chrome_trace(str(path))
    return done


def _marked(load: Load) -> Result:
    """Run the load between the marks that Nsight Systems waits for, with its own ranges."""
    Stopwatch.ranges = torch.cuda.nvtx.range
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        load.run()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        Stopwatch.ranges = None
    return Result()


def _under_nsys(run: Run, device: str) -> Result:
    """Run this command again, under Nsight Systems.

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
    run.folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([*nsys_command(program, report), *_again(run)], check=False)
    if done.returncode:
        raise EarshotError(f"{program} ended with status {done.returncode}; see above")
    return Result(text=f"To open in Nsight Systems: {report}")


def _again(run: Run) -> list[str]:
    """Return the command that is to run under it: this one."""
    command = [sys.executable, "-m", "eval", "profile", "--under-nsys"]
    command += [f"--config={run.config_path}", f"--output={run.folder}"]
    for name, value in run.flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True and name != "nsys":
            command.append(flag)
        elif value and value is not True:
            command.append(f"{flag}={value}")
    return command


def nsys_command(program: str, report: Path) -> list[str]:
    """Return how Nsight Systems is called, but for what it is to run."""
    traced = "--trace=cuda,nvtx,osrt"
    graphs = "--cuda-graph-trace=node"  # each kernel of a graph by itself
    marks = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")
    return [program, "profile", traced, graphs, *marks, "--force-overwrite=true", f"-o{report}"]


def _profile(
    config: Config,
    manifest: Manifest,
    done: Done,
    timeline: Timeline,
    ceilings: Ceilings,
    device: str,
) -> Profile:
    windows = done.after.windows - done.before.windows
    steps = done.after.steps - done.before.steps
    slots = (done.after.step_slots - done.before.step_slots) / max(1, steps)
    tokens = (done.after.tokens - done.before.tokens) / max(1, windows)
    busy = {phase.name: phase.busy_s for phase in timeline.phases}
    work, rates = encoder_work(manifest.dims), []
    if busy.get("encode"):
        flops = windows * (work.products + work.attention + work.rest)
        rates.append(Rate("encode", "FLOP/s", flops / busy["encode"], ceilings.product))
    if busy.get("steps"):
        rows = max(config.transcriber.beam_size, 1)
        age = PROMPT_TOKENS + tokens / 2
        cross_kv, precision = config.runtime.cross_kv, manifest.precision
        size = steps * step_bytes(manifest.dims, precision, cross_kv, 0, age)
        size += steps * slots * _slot_bytes(manifest, config, age, rows)
        rates.append(Rate("steps", "bytes/s", size / busy["steps"], ceilings.memory))
    audio_s = sum(answer.duration for answer in done.answers)
    parts = _parts(done)
    return Profile(device, audio_s, windows, steps, slots, timeline, parts, tuple(rates), ceilings)


def _slot_bytes(manifest: Manifest, config: Config, age: float, rows: int) -> float:
    """Return the bytes that a step reads for one slot more."""
    sizes = [
        step_bytes(manifest.dims, manifest.precision, config.runtime.cross_kv, slots, age, rows)
        for slots in (0, 1)
    ]
    return sizes[1] - sizes[0]


def _parts(done: Done) -> tuple[Part, ...]:
    """Add up the phases of all requests, in the order in which a request has them."""
    phases = [phase for answer in done.answers for phase in answer.phases]
    names = dict.fromkeys(phase.name for phase in phases)
    parts = []
    for name in names:
        mine = [phase for phase in phases if phase.name == name]
        whole_s = sum(phase.end - phase.begin for phase in mine)
        busy_s = sum(phase.busy_s for phase in mine)
        parts.append(Part(name, len(mine), whole_s / len(mine), busy_s))
    return tuple(parts)


def _text(profile: Profile) -> str:
    """Write the report that is printed."""
    timeline = profile.timeline
    phases = [
        (phase.name, f"{phase.busy_s:.3f} s", f"{phase.idle_s:.3f} s") for phase in timeline.phases
    ]
    kernels = [
        (kernel.name[:60], kernel.phase, str(kernel.calls), f"{1e3 * kernel.seconds:.1f} ms")
        for kernel in timeline.kernels[:_SHOWN]
    ]
    rates = [
        f"{rate.phase}: {rate.achieved:.3g} {rate.what}, {rate.share:.0%} of {rate.ceiling:.3g}"
        for rate in profile.rates
    ]
    return "\n\n".join(
        [
            f"{profile.device}: {timeline.seconds:.2f} s for {profile.audio_s:.0f} s of audio, "
            f"{profile.windows} windows; busy {timeline.busy_s / timeline.seconds:.0%}",
            table(("phase", "busy", "idle"), phases),
            "\n".join(rates),
            table(("kernel", "phase", "calls", "time"), kernels),
        ]
    )


def _page(run: Run, profile: Profile) -> str:
    timeline = profile.timeline
    kernels = {
        phase.name: [k for k in timeline.kernels if k.phase == phase.name]
        for phase in timeline.phases
    }
    longest_s = max((phase.busy_s + phase.idle_s for phase in timeline.phases), default=1.0)
    return render(
        "profile.html",
        _TEMPLATES,
        run=run,
        profile=profile,
        kernels=kernels,
        shown=_KERNELS,
        longest_s=longest_s,
        trace=TRACE,
        settings=_settings(run),
    )


def _settings(run: Run) -> Sequence[tuple[str, str]]:
    runtime = dataclasses.asdict(run.config.runtime)
    flags = {key: value for key, value in run.flags.items() if not key.endswith("nsys")}
    return [(key, str(value)) for key, value in {**flags, **runtime}.items()]
