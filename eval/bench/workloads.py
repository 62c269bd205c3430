"""The speed of the native runtime on this machine, beside what the machine could do at best.

The workloads of `eval.bench.plan`, over an engine whose lengths are forced (see
`eval.bench.engine`), each after a warm-up of its own. Timed from samples in host memory to tokens
on the host; see `eval.bench.load`.
"""

import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from eval.bench.floor import Ceilings, Floor
from eval.bench.plan import Plan, with_slots
from eval.bench.runtime_load import (
    ClosedLoop,
    Load,
    NoiseWindows,
    accepting,
    closed_loop,
    joules_so_far,
    offline,
    open_loop,
)
from eval.bench.table import OURS, Measurement, percentiles_ms, refused
from eval.config import Config
from eval.load import poisson
from eval.record import Say
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, checked_meanwhile
from serve.contract.errors import UnavailableError
from serve.contract.fields import ShortEncoder
from serve.native.runtime import NativeRuntime
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.transcriber.spans import encoder_frames

THROUGHPUT_TOKENS = 128
REQUEST_S, REQUEST_TOKENS = 10.0, 40
MLPERF_MEAN, MLPERF_LEAST, MLPERF_MAX = 75, 4, 200
SHARES = (0.30, 0.50, 0.70, 0.85, 0.95)  # of the saturated rate
WARM_REQUESTS = 10
DRAIN_S = 30.0  # how long the last arrivals are waited for


class Session:
    """A runtime that is open, and the workloads on it.

    Args:
        engine: with end-of-text suppressed.
        config: how to run it.
        ceilings: of the machine.
        acceptance: the share of its draft's guesses that is right, if it has one.

    Raises:
        UnavailableError: the machine cannot run it so.
    """

    def __init__(
        self,
        engine: Engine,
        config: RuntimeConfig,
        ceilings: Ceilings,
        progress: Say,
        acceptance: float | None = None,
    ) -> None:
        self._engine = engine
        self.config = config
        self._progress = progress
        self._system = system_name(config)
        if acceptance is not None:
            self._system += f", drafts of {config.draft_tokens} with {100 * acceptance:g} % right"
        held = release_memory(config.device)
        began = time.perf_counter()
        runtime_class = NativeRuntime if acceptance is None else accepting(acceptance)
        self.runtime = runtime_class(engine, config)
        self._floor = Floor(engine.manifest, config, ceilings, self.runtime.fp8)
        self.open_s = time.perf_counter() - began
        self.held_bytes = release_memory(config.device) - held
        progress(f"{self.runtime.description}; ready after {self.open_s:.1f} s")

    def opened(self) -> Iterator[Measurement]:
        """Yield the cost of opening: time and, on a GPU, memory."""
        made_up = "weights made up on the device: no file is read"
        yield Measurement("opening", self._system, self.open_s, "s", None, made_up)
        if self.held_bytes:
            text = f"taken from the device; {self.runtime.description}"
            yield Measurement("memory", self._system, self.held_bytes / 2**30, "GiB", None, text)

    def run(self, workload: str, plan: Plan) -> Iterator[Measurement]:
        """Yield the lines of one workload."""
        self._progress(f"workload {workload} with {self.config.slots} slots")
        if workload == "throughput":
            yield self.throughput(plan.seconds)
        elif workload == "words":
            yield self.throughput(plan.seconds, words=True)
        elif workload == "latency":
            yield self.latency(plan)
        elif workload == "mlperf":
            yield from self.mlperf(plan.seconds)
        else:
            yield from self.open_loop_sweep(plan)

    def _load(
        self,
        seconds: float = WINDOW_S,
        batch: int | None = None,
        words: bool = False,
        short: ShortEncoder = "off",
    ) -> Load:
        config = self.config
        batch = batch or config.encoder_batch
        beam_size = max(1, config.rows // config.slots)
        windows = NoiseWindows(self._engine, config.device, batch, seconds, beam_size, words, short)
        return Load(self.runtime, windows)

    @property
    def _in_flight(self) -> int:
        """Count windows that keep the runtime full: one a slot, and a batch for the encoder."""
        return self.config.slots + self.config.encoder_batch

    def _closed_loop(self, load: Load, lengths: Iterator[int], seconds: float) -> ClosedLoop:
        slots, device = self.config.slots, self.config.device
        joules = functools.partial(joules_so_far, device)
        return closed_loop(load, lengths, slots, self._in_flight, seconds, joules)

    def throughput(self, seconds: float, words: bool = False) -> Measurement:
        """Measure windows of 30 s that arrive as others end; with their words timed, or without."""
        slots, lengths = self.config.slots, itertools.repeat(THROUGHPUT_TOKENS)
        loop = self._closed_loop(self._load(words=words), lengths, seconds)
        ideal = WINDOW_S / self._floor.window_s(THROUGHPUT_TOKENS, slots)
        return Measurement(
            "words" if words else "throughput",
            self._system,
            loop.rate * WINDOW_S,
            "RTFx",
            ideal,
            f"30 s of sound, {THROUGHPUT_TOKENS} tokens{', each timed' * words}; {loop.detail}",
            {"windows_per_s": loop.rate, "seconds": loop.wall_s, **loop.energy},
        )

    def latency(self, plan: Plan) -> Measurement:
        """Measure one request at a time."""
        load, times = self._load(plan.request_s, batch=1, short=plan.short_encoder), []
        for _ in range(WARM_REQUESTS + plan.requests):
            began = time.perf_counter()
            load.submit([REQUEST_TOKENS])
            load.drain()
            times.append(time.perf_counter() - began)
        percentiles = percentiles_ms(times[WARM_REQUESTS:])
        return Measurement(
            "latency",
            self._system,
            percentiles["p50_ms"],
            "ms",
            1e3 * ideal_s if (ideal_s := self._ideal_s(plan, 1)) else None,
            f"p50 of {plan.requests}, p95 {percentiles['p95_ms']:.2f}, "
            f"p99 {percentiles['p99_ms']:.2f}; {_request(plan)}",
            {**percentiles, "requests": plan.requests},
        )

    def _ideal_s(self, plan: Plan, slots: int) -> float | None:
        """Compute the least seconds of a request; None: of a shorter encoder no floor is known."""
        whole = encoder_frames(plan.request_s, plan.short_encoder) == N_FRAMES
        return self._floor.window_s(REQUEST_TOKENS, slots) if whole else None

    def mlperf(self, seconds: float) -> Iterator[Measurement]:
        """Measure it always full, then a given number from an empty runtime to an empty one.

        The first tells how many windows the second needs to last, and what it would reach in the
        ten minutes that MLPerf asks for, where fill and drain weigh little.
        """
        slots, load = self.config.slots, self._load()
        full = self._closed_loop(load, mlperf_lengths(), seconds)
        count, wall_s = max(2 * slots, math.ceil(full.rate * seconds)), 0.0
        while wall_s < seconds:
            lengths = list(itertools.islice(mlperf_lengths(), count))
            wall_s = offline(load, lengths, self._in_flight)
            reached, count = count / wall_s, math.ceil(1.2 * count * seconds / wall_s)
        ideal = 1 / statistics.mean(self._floor.window_s(length, slots) for length in lengths)
        yield Measurement(
            "MLPerf-shaped",
            self._system,
            reached,
            "samples/s",
            ideal,
            f"{len(lengths)} windows at hand at the start, {statistics.mean(lengths):.1f} tokens "
            f"on average, {wall_s:.1f} s with fill and drain",
            {"windows": len(lengths), "seconds": wall_s},
        )
        yield Measurement(
            "MLPerf-shaped, always full",
            self._system,
            full.rate,
            "samples/s",
            ideal,
            f"the same lengths, without fill and drain: {full.detail}",
            {"windows": full.windows, "seconds": full.wall_s, **full.energy},
        )

    def open_loop_sweep(self, plan: Plan) -> Iterator[Measurement]:
        """Measure the saturated rate, then arrivals at shares of it."""
        slots, load = self.config.slots, self._load(plan.request_s, short=plan.short_encoder)
        full = self._closed_loop(load, itertools.repeat(REQUEST_TOKENS), plan.seconds)
        ideal_s = self._ideal_s(plan, slots)
        yield Measurement(
            "open loop, saturated",
            self._system,
            full.rate,
            "requests/s",
            1 / ideal_s if ideal_s else None,
            f"{_request(plan)}; {full.detail}",
            {"seconds": full.wall_s},
        )
        for share in SHARES:
            yield self._open_loop(load, share, full.rate, plan.seconds)

    def _open_loop(self, load: Load, share: float, saturated: float, seconds: float) -> Measurement:
        """Measure Poisson arrivals of requests at a share of the saturated rate."""
        warm_s, rate = seconds / 4, share * saturated
        arrivals = poisson(rate, warm_s + seconds, seed=round(100 * share))
        met = open_loop(load, arrivals, REQUEST_TOKENS, warm_s, DRAIN_S).figures
        return Measurement(
            f"open loop, {100 * share:.0f} % load",
            self._system,
            met["p99_ms"],
            "ms",
            None,
            f"p99 of {met['arrivals']:.0f} at {rate:.1f} a second, p50 {met['p50_ms']:.1f}, "
            f"p95 {met['p95_ms']:.1f}, jitter {met['jitter_ms']:.1f} (p99 - p50), deviation "
            f"{met['stdev_ms']:.1f}; {met['late']:.0f} handed over late (at most "
            f"{met['latest_ms']:.1f} ms), {met['unfinished']:.0f} unfinished",
            {"offered_per_s": rate, **met},
        )


def _request(plan: Plan) -> str:
    """Say what a request of the latency and open-loop workloads is."""
    encoded_s = encoder_frames(plan.request_s, plan.short_encoder) * HOP_LENGTH / SAMPLE_RATE
    return f"{plan.request_s:g} s of sound, encoded as {encoded_s:g} s, {REQUEST_TOKENS} tokens"


def measure_start(
    folder: Path, config: RuntimeConfig, ceilings: Ceilings, progress: Say
) -> Measurement:
    """Measure the time from an engine folder to ready, as a server starts.

    The folder was written just now, so its files come from memory, not from the disk; kernels that
    Triton has not in its cache are compiled.

    Raises:
        UnavailableError: the machine cannot run it.
    """
    release_memory(config.device)
    began = time.perf_counter()
    with checked_meanwhile(folder) as engine:
        session = Session(engine, config, ceilings, progress)
    ready_s = time.perf_counter() - began
    session.runtime.close()
    size = sum(file.bytes for file in engine.manifest.files.values()) / 2**30
    return Measurement(
        "start",
        system_name(config),
        ready_s,
        "s",
        None,
        f"from an engine folder of {size:.2f} GiB in the page cache, whose files are checked "
        "meanwhile",
    )


def run_workloads(
    engine: Engine, config: Config, plan: Plan, ceilings: Ceilings, progress: Say
) -> Iterator[Measurement]:
    """Run the plan's workloads, one after the other; what the machine refuses becomes a line."""
    for slots in plan.slots:
        yield from _with_slots(engine, config, plan, slots, ceilings, progress)


def _with_slots(
    engine: Engine, config: Config, plan: Plan, slots: int, ceilings: Ceilings, progress: Say
) -> Iterator[Measurement]:
    """Run those with so many slots, whose memory goes before the next runtime is opened."""
    workloads = plan.workloads_with(slots)
    if not workloads:
        return
    runtime = with_slots(config, slots)
    try:
        session = Session(engine, runtime, ceilings, progress, plan.draft_acceptance)
    except UnavailableError as error:
        yield refused("opening", system_name(runtime), "s", error)
        return
    yield from session.opened()
    for workload in workloads:
        yield from session.run(workload, plan)
    session.runtime.close()


def system_name(config: RuntimeConfig) -> str:
    """Name a runtime as the table does."""
    beams = f", beam {config.rows // config.slots}" if config.rows else ""
    return f"{OURS}, {config.slots} slots{beams}"


def mlperf_lengths() -> Iterator[int]:
    """Yield tokens of windows without end: MLPerf's set in mean and maximum, always the same."""
    rng = random.Random(0)
    while True:
        length = round(rng.gammavariate(6, MLPERF_MEAN / 6))
        yield max(MLPERF_LEAST, min(MLPERF_MAX, length))


def release_memory(device: str) -> int:
    """Give back what nobody holds; returns the bytes of the GPU that are taken, 0 on a CPU."""
    gc.collect()
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
