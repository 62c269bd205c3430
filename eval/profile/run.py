"""`python -m eval profile`: torch's profiler, or Nsight Systems, over a fixed load."""

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from build.clips import Clip
from eval.bench.floor import PROMPT_TOKENS, Ceilings, encoder_work, measure_ceilings, step_bytes
from eval.config import Config, changed
from eval.corpora.find import find_clips
from eval.profile.timeline import LOAD, Timeline, read_timeline
from eval.random_whisper.engine import random_engine, write_engine
from eval.random_whisper.shapes import published_shape
from eval.record import Card, Result, Run, Section, Table, Text
from serve.contract.config import RuntimeConfig
from serve.contract.devices import first_of
from serve.contract.engine import Engine, Manifest, open_engine
from serve.contract.errors import ConfigError, EarshotError, UnavailableError
from serve.contract.messages import Request, Transcript
from serve.native.stopwatch import Stopwatch
from serve.runtime.open import open_runtime
from serve.runtime.protocol import Gauges, Runtime
from serve.transcriber.loop import Transcriber
from serve.transcriber.open import open_transcriber


@dataclasses.dataclass(frozen=True)
class Done:
    """What came of the load."""

    answers: tuple[Transcript, ...]
    before: Gauges  # of the runtime
    after: Gauges


class Load:
    """Requests for the text of clips, one for each, over and over as many as there are to be.

    Args:
        transcriber: answers them.
        runtime: behind it.
        clips: in this order.
        requests: how many.
        at_once: how many at a time.
        words: whether their words are timed.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        runtime: Runtime,
        clips: Sequence[Clip],
        requests: int,
        at_once: int,
        words: bool,
    ) -> None:
        self._transcriber = transcriber
        self._runtime = runtime
        self._at_once = at_once
        files = [clip.path.read_bytes() for clip in clips]
        self._requests = [
            Request(files[i % len(files)], word_timestamps=words) for i in range(requests)
        ]

    def warm_up(self) -> None:
        """Answer as many as there are at a time.

        Raises:
            EarshotError: one failed.
        """
        self._answer(self._requests[: self._at_once])

    def run(self) -> Done:
        """Answer all.

        Raises:
            EarshotError: one failed.
        """
        before = self._runtime.gauges()
        answers = self._answer(self._requests)
        return Done(tuple(answers), before, self._runtime.gauges())

    def _answer(self, requests: Sequence[Request]) -> list[Transcript]:
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(self._transcriber.transcribe, requests))


@contextlib.contextmanager
def opened(config: Config, random_weights: bool) -> Iterator[tuple[Transcriber, Runtime, Manifest]]:
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
            try:
                write_engine(engine, folder, config.runtime.device)
            except OSError as error:
                raise UnavailableError(
                    f"cannot write an engine to {folder}: {error.strerror}; free some space there "
                    "or set TMPDIR"
                ) from error
        runtimes: list[Runtime] = []

        def start(engine: Engine, runtime: RuntimeConfig) -> Runtime:
            runtimes.append(open_runtime(engine, runtime))
            return runtimes[0]

        transcriber = stack.enter_context(open_transcriber(config, str(folder), start))
        yield transcriber, runtimes[0], open_engine(folder).manifest


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------- run


TRACE = "trace.json.gz"
NSYS = "profile.nsys-rep"
_KERNELS = 25  # of each phase


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
    return result_of(profile, config.runtime.slots)


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
    run.show(f"To open in Nsight Systems: {report}")
    return Result()


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


def result_of(profile: Profile, slots: int) -> Result:
    """Return the result: cards, and a section each for phases, requests, kernels and gaps."""
    timeline = profile.timeline
    whole_s = timeline.seconds
    busy = f"{timeline.busy_s / whole_s:.1%}"
    cards = [Card("The device is busy", busy, (f"of {whole_s:.2f} s",))]
    for rate in profile.rates:
        title = f"{rate.phase}: of the ceiling of {rate.what}"
        achieved = f"{rate.achieved:.3g} of {rate.ceiling:.3g}"
        cards.append(Card(title, f"{rate.share:.1%}", (achieved,)))
    steps = f"of {slots} slots, {profile.steps} steps"
    cards.append(Card("Windows in a step", f"{profile.mean_batch:.1f}", (steps,)))
    phases = [
        (
            phase.name,
            _ms(phase.busy_s),
            _ms(phase.idle_s),
            f"{(phase.busy_s + phase.idle_s) / whole_s:.1%}",
        )
        for phase in timeline.phases
    ]
    requests = [
        (part.name, str(part.requests), _ms(part.mean_s), f"{part.busy_s:.3f}")
        for part in profile.parts
    ]
    gaps = [
        (gap.phase, _ms(gap.at_s), _ms(gap.seconds), f"`{gap.after}`", f"`{gap.before}`")
        for gap in timeline.gaps
    ]
    windows = profile.windows
    rates = (
        f"The rates count the least work over the busy time: the encoder's arithmetic of {windows} "
        f"windows, and the weights, keys and values that {profile.steps} steps have to read. "
        "Ceilings are what this machine reached before the load: a matrix product, and a copy."
    )
    kernels = [_kernels(profile, phase.name) for phase in timeline.phases]
    return Result(
        profile,
        sections=(
            Section(
                "Phases",
                [
                    Table(("phase", "busy, ms", "idle, ms", "of the load"), phases, note=_PHASES),
                    Text(rates),
                ],
            ),
            Section(
                "Requests",
                [Table(("phase", "requests", "mean, ms", "all, s"), requests, note=_REQUESTS)],
            ),
            Section("Kernels", [table for table in kernels if table.rows]),
            Section(
                "Gaps",
                [Table(("phase", "at, ms", "ms", "after", "before"), gaps, note=_GAPS, prose=True)],
                printed=False,
            ),
        ),
        about=f"{len(profile.parts) and profile.parts[0].requests} requests on {profile.device}, "
        f"{profile.audio_s:.0f} s of audio in {windows} windows, {whole_s:.2f} s under the "
        f"profiler, which itself takes time. `{TRACE}` opens in Perfetto (ui.perfetto.dev).",
        cards=tuple(cards),
    )


_PHASES = (
    "Busy: kernels that were launched in the phase, or operators on a CPU. Idle: nothing ran while "
    "the runtime's thread was in the phase: it launched, copied or computed in Python. Between: "
    "log-mels, judging, and waiting for requests."
)
_REQUESTS = (
    "From the begin of a phase to its end, of an average request; and the seconds that all of them "
    "were worked on, of which many may be at the same time. `decode` is of audio."
)
_GAPS = "Times in which the device did nothing, by what stood before and after."


def _kernels(profile: Profile, phase: str) -> Table:
    """Tabulate the kernels of a phase, the longest first."""
    timeline = profile.timeline
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
    title = f"{phase}: {len(mine)} names"
    return Table(header, rows, title, folded="closed", prose=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
