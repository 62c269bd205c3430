"""The workloads of the native runtime on this machine, beside the best that the machine could do.

Lengths are forced (see `eval.random_whisper`), and each workload has its own warm-up. Times
count from samples in host memory to tokens on the host; see `eval.bench.runtime_load`.
"""

import dataclasses
import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from eval.bench import BenchPlan
from eval.bench.floor import Ceilings, Floor
from eval.bench.runtime_load import (
    WindowLoad,
    accepting,
    closed_loop,
    joules_so_far,
    noise_jobs,
    offline,
    open_loop,
)
from eval.bench.table import OURS, Measurement, measure_latency, percentiles_ms, refused
from eval.config import EvaluationProduct
from eval.load import poisson
from eval.record import Say
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, checked_meanwhile
from serve.contract.errors import UnavailableError
from serve.contract.fields import ShortEncoder
from serve.native.runtime import NativeRuntime
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.transcriber.active import encoder_frames

THROUGHPUT_TOKENS = 128
REQUEST_S, REQUEST_TOKENS = 10.0, 40
MLPERF_MEAN, MLPERF_MIN, MLPERF_MAX = 75, 4, 200
_SHARES = (0.30, 0.50, 0.70, 0.85, 0.95)  # shares of the saturated rate
_DRAIN_S = 30.0  # longest wait for the last arrivals


@dataclasses.dataclass(frozen=True)
class RuntimeBench:
    """The conditions of the workloads.

    Attributes:
        engine: with end-of-text suppressed.
        config: the config of the runtime, and how much of short audio it encodes.
        plan: the bench's plan.
        ceilings: the machine's ceilings.
        say: receives lines of progress.
    """

    engine: Engine
    config: EvaluationProduct
    plan: BenchPlan
    ceilings: Ceilings
    say: Say

    def run(self) -> Iterator[Measurement]:
        """Run the plan's workloads one after another; a refusal of the machine becomes a row."""
        for slots in self.plan.slots:
            if names := self.plan.workloads_with(slots):
                config = dataclasses.replace(self.config, runtime=with_slots(self.config, slots))
                yield from dataclasses.replace(self, config=config).measure_runtime(names)

    def measure_runtime(self, names: Sequence[str]) -> Iterator[Measurement]:
        """Run workloads on one runtime, whose memory is free afterwards."""
        runtime = self.config.runtime
        try:
            session = RuntimeSession(self)
        except UnavailableError as error:
            yield refused("opening", system_name(runtime), "s", error)
            return
        yield session.opening
        for name in names:
            self.say(f"workload {name} with {runtime.slots} slots")
            yield from session.workloads[name]()
        session.runtime.close()


class RuntimeSession:
    """An open runtime, and the workloads on it.

    Args:
        bench: the conditions.

    Raises:
        UnavailableError: the machine cannot run this configuration.
    """

    def __init__(self, bench: RuntimeBench) -> None:
        self._engine, self._plan = bench.engine, bench.plan
        self._short = bench.config.transcriber.short_encoder
        self.config = config = bench.config.runtime
        self._system = system_name(config)
        runtime_class, accepted = NativeRuntime, bench.plan.draft_acceptance
        if accepted is not None:
            runtime_class = accepting(accepted)
            self._system += f", drafts of {config.draft_tokens} with {100 * accepted:g} % right"
        memory_bytes, began_s = release_memory(config.device), time.perf_counter()
        self.runtime = runtime_class(self._engine, config)
        opening_s = time.perf_counter() - began_s
        detail = f"weights made up on the device, no file is read; {self.runtime.description}"
        gib = (release_memory(config.device) - memory_bytes) / 2**30
        self.opening = Measurement(
            "opening", self._system, opening_s, "s", None, detail, {"device_gib": gib}
        )
        # One for each slot, and a batch to encode.
        self._in_flight = config.slots + config.encoder_batch
        self._floor = Floor(bench.engine.manifest, config, bench.ceilings, self.runtime.fp8)
        self.workloads: dict[str, Callable[[], Iterator[Measurement]]] = {
            "latency": self.latency,
            "throughput": self.throughput,
            "words": functools.partial(self.throughput, words=True),
            "open-loop": self.open_loop,
            "mlperf": self.mlperf,
        }

    def make_load(
        self,
        batch: int | None = None,
        seconds: float = WINDOW_S,
        short: ShortEncoder = "off",
        words: bool = False,
    ) -> WindowLoad:
        """Return a load of windows; the parameters are those of `noise_jobs`."""
        config, batch = self.config, batch or self.config.encoder_batch
        beam_size = max(1, config.rows // config.slots)
        jobs = noise_jobs(self._engine, config.device, batch, seconds, beam_size, words, short)
        return WindowLoad(self.runtime, jobs, batch)

    def _closed_loop(self, load: WindowLoad, lengths: Iterator[int]) -> dict[str, float]:
        joules = functools.partial(joules_so_far, self.config.device)
        slots, seconds = self.config.slots, self._plan.seconds
        return closed_loop(load, lengths, slots, self._in_flight, seconds, joules)

    def throughput(self, *, words: bool = False) -> Iterator[Measurement]:
        """Measure windows of 30 s that arrive as others end, with or without word times."""
        load = self.make_load(words=words)
        figures = self._closed_loop(load, itertools.repeat(THROUGHPUT_TOKENS))
        name, rtfx = "words" if words else "throughput", figures["windows_per_s"] * WINDOW_S
        ideal = WINDOW_S / self._floor.window_s(THROUGHPUT_TOKENS, self.config.slots)
        detail = f"30 s of sound, {THROUGHPUT_TOKENS} tokens{', each timed' * words}"
        yield Measurement(name, self._system, rtfx, "RTFx", ideal, detail, figures)

    def latency(self) -> Iterator[Measurement]:
        """Measure one request at a time; the value is the median."""
        load, ideal_s = self.make_load(1, self._plan.request_s, self._short), self._ideal_s(1)

        def send() -> None:
            load.submit([REQUEST_TOKENS])
            load.drain()

        ideal_ms = 1e3 * ideal_s if ideal_s else None
        yield measure_latency(self._system, send, self._plan.requests, ideal_ms, self._request)

    def _ideal_s(self, slots: int) -> float | None:
        """Return the shortest time of a request; None: no floor of a shorter encoder is known."""
        whole = encoder_frames(self._plan.request_s, self._short) == N_FRAMES
        return self._floor.window_s(REQUEST_TOKENS, slots) if whole else None

    @property
    def _request(self) -> str:
        """Describe a request of the latency and open-loop workloads."""
        request_s = self._plan.request_s
        encoded_s = encoder_frames(request_s, self._short) * HOP_LENGTH / SAMPLE_RATE
        return f"{request_s:g} s of sound, encoded as {encoded_s:g} s, {REQUEST_TOKENS} tokens"

    def mlperf(self) -> Iterator[Measurement]:
        """Measure a full runtime, then a given number of windows from empty to empty.

        The first tells how many windows the second needs to last. It is also the rate that the
        second would reach in MLPerf's ten minutes, in which fill and drain weigh little.
        """
        load, seconds, wall_s = self.make_load(), self._plan.seconds, 0.0
        always_full = self._closed_loop(load, mlperf_lengths())
        count = max(2 * self.config.slots, math.ceil(always_full["windows_per_s"] * seconds))
        while wall_s < seconds:
            lengths = list(itertools.islice(mlperf_lengths(), count))
            wall_s = offline(load, lengths, self._in_flight)
            count = math.ceil(1.2 * count * seconds / wall_s)
        floors_s = [self._floor.window_s(length, self.config.slots) for length in lengths]
        tokens, ideal = f"{statistics.mean(lengths):.1f} tokens", 1 / statistics.mean(floors_s)
        rate, figures = len(lengths) / wall_s, {"windows": len(lengths), "seconds": wall_s}
        detail = f"windows at hand at the start, {tokens} on average, with fill and drain"
        yield Measurement("MLPerf-shaped", self._system, rate, "samples/s", ideal, detail, figures)
        name, rate = "MLPerf-shaped, always full", always_full["windows_per_s"]
        yield Measurement(
            name,
            self._system,
            rate,
            "samples/s",
            ideal,
            "the same without fill and drain",
            always_full,
        )

    def open_loop(self) -> Iterator[Measurement]:
        """Measure the saturated rate, then the p99 of Poisson arrivals at shares of it."""
        load = self.make_load(None, self._plan.request_s, self._short)
        saturated = self._closed_loop(load, itertools.repeat(REQUEST_TOKENS))
        ideal_s, max_rate = self._ideal_s(self.config.slots), saturated["windows_per_s"]
        ideal, name = 1 / ideal_s if ideal_s else None, "open loop, saturated"
        yield Measurement(
            name, self._system, max_rate, "requests/s", ideal, self._request, saturated
        )
        for share in _SHARES:
            warm_s, rate = self._plan.seconds / 4, share * max_rate
            arrivals = poisson(rate, warm_s + self._plan.seconds, seed=round(100 * share))
            latency_s, unfinished = open_loop(load, arrivals, REQUEST_TOKENS, warm_s, _DRAIN_S)
            counts = {"arrivals": len(latency_s), "unfinished": unfinished}
            figures = {"offered_per_s": rate, **percentiles_ms(latency_s), **counts}
            name = f"open loop, {100 * share:.0f} % load"
            yield Measurement(name, self._system, figures["p99_ms"], "ms", None, "p99", figures)


def measure_start(folder: Path, config: RuntimeConfig) -> Measurement:
    """Measure the time from an engine folder to a ready runtime, as a server starts.

    The folder was written just now, so its files come from memory, not from the disk. Kernels that
    Triton's cache lacks are compiled.

    Raises:
        UnavailableError: the machine cannot run this configuration.
    """
    release_memory(config.device)
    began = time.perf_counter()
    with checked_meanwhile(folder) as engine:
        runtime = NativeRuntime(engine, config)
    ready_s = time.perf_counter() - began
    runtime.close()
    size = sum(file.bytes for file in engine.manifest.files.values()) / 2**30
    detail = f"from a folder of {size:.2f} GiB in the page cache, whose files are checked meanwhile"
    return Measurement("start", system_name(config), ready_s, "s", detail=detail)


def with_slots(config: EvaluationProduct, slots: int) -> RuntimeConfig:
    """Configure `slots` slots, with a row for each beam of the configured search."""
    beam_size = config.transcriber.beam_size
    rows = slots * beam_size if beam_size > 1 else 0
    return dataclasses.replace(config.runtime, slots=slots, rows=rows)


def system_name(config: RuntimeConfig) -> str:
    """Name a runtime as the table does."""
    beams = f", beam {config.rows // config.slots}" if config.rows else ""
    return f"{OURS}, {config.slots} slots{beams}"


def mlperf_lengths() -> Iterator[int]:
    """Yield endless lengths in tokens, with the mean and maximum of MLPerf's set."""
    rng = random.Random(0)
    while True:
        length = round(rng.gammavariate(6, MLPERF_MEAN / 6))
        yield max(MLPERF_MIN, min(MLPERF_MAX, length))


def release_memory(device: str) -> int:
    """Free unused memory of a GPU; return the bytes of it that are taken, 0 on a CPU."""
    gc.collect()
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
