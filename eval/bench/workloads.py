"""The workloads of the native runtime on this machine, beside the best that the machine could do.

Lengths are forced (see `eval.random_whisper`), and each workload has its own warm-up. Times
count from samples in host memory to tokens on the host; see `eval.bench.runtime_load`.
"""

import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.bench import BenchPlan
from eval.bench.floor import Ceilings, Floor
from eval.bench.runtime_load import WindowLoad, closed_loop, noise_load, offline, open_loop
from eval.bench.table import OURS, Measurement, measure_latency, percentiles_ms, refused
from eval.config import EvaluationProduct, changed
from eval.load import poisson
from eval.record import Say
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine, checked_meanwhile
from serve.contract.errors import UnavailableError
from serve.native.runtime import NativeRuntime
from serve.speech.features import HOP_LENGTH, N_FRAMES, SAMPLE_RATE, WINDOW_S
from serve.transcriber.active import encoder_frames

THROUGHPUT_TOKENS = 128
REQUEST_S, REQUEST_TOKENS = 10.0, 40
MLPERF_MEAN, MLPERF_MIN, MLPERF_MAX = 75, 4, 200
_SHARES = (0.30, 0.50, 0.70, 0.85, 0.95)  # shares of the saturated rate


def run_workloads(
    engine: Engine, config: EvaluationProduct, plan: BenchPlan, ceilings: Ceilings, say: Say
) -> Iterator[Measurement]:
    """Run the plan's workloads one after another; a refusal of the machine becomes a row."""
    for slots in plan.slots:
        if names := plan.workloads_with(slots):
            yield from measure_runtime(
                engine, with_slots(config, slots), plan, ceilings, say, names
            )


def measure_runtime(
    engine: Engine,
    config: EvaluationProduct,
    plan: BenchPlan,
    ceilings: Ceilings,
    say: Say,
    names: Sequence[str],
) -> Iterator[Measurement]:
    """Run workloads on one runtime, whose memory is free afterwards."""
    try:
        session = RuntimeSession(engine, config, plan, ceilings)
    except UnavailableError as error:
        yield refused("opening", system_name(config.runtime), "s", error)
        return
    yield session.opening
    for name in names:
        say(f"workload {name} with {config.runtime.slots} slots")
        yield from session.workloads[name]()
    session.runtime.close()


class RuntimeSession:
    """An open runtime, and the workloads on it.

    Args:
        engine: with end-of-text suppressed.
        config: the config of the runtime, and how much of short audio it encodes.
        plan: the bench's plan.
        ceilings: the machine's ceilings.

    Raises:
        UnavailableError: the machine cannot run this configuration.
    """

    def __init__(
        self, engine: Engine, config: EvaluationProduct, plan: BenchPlan, ceilings: Ceilings
    ) -> None:
        self._plan, self.config = plan, config.runtime
        self._system = system_name(self.config)
        memory_bytes, began_s = release_memory(self.config.device), time.perf_counter()
        self.runtime = NativeRuntime(engine, self.config)
        opening_s = time.perf_counter() - began_s
        self.make_load = functools.partial(noise_load, self.runtime, engine, self.config)
        detail = f"from files in the page cache, not checked; {self.runtime.description}"
        gib = (release_memory(self.config.device) - memory_bytes) / 2**30
        self.opening = self._row("opening", opening_s, "s", None, detail, {"device_gib": gib})
        # One for each slot, and a batch to encode.
        self._in_flight = self.config.slots + self.config.encoder_batch
        self._floor = Floor(engine.manifest, self.config, ceilings, self.runtime.fp8)
        self._short = config.transcriber.short_encoder
        self._encoded_frames = encoder_frames(plan.request_s, self._short)
        encoded_s = self._encoded_frames * HOP_LENGTH / SAMPLE_RATE
        sound = f"{plan.request_s:g} s of sound, encoded as {encoded_s:g} s"
        self._request = f"{sound}, {REQUEST_TOKENS} tokens"
        self.workloads: dict[str, Callable[[], Iterator[Measurement]]] = {
            "latency": self.latency,
            "throughput": self.throughput,
            "words": functools.partial(self.throughput, words=True),
            "open-loop": self.open_loop,
            "mlperf": self.mlperf,
        }

    def _row(self, workload: str, value: float, unit: str, *others: Any) -> Measurement:
        return Measurement(workload, self._system, value, unit, *others)

    def _closed_loop(self, load: WindowLoad, lengths: Iterator[int]) -> dict[str, float]:
        return closed_loop(load, lengths, self.config.slots, self._in_flight, self._plan.seconds)

    def throughput(self, *, words: bool = False) -> Iterator[Measurement]:
        """Measure windows of 30 s that arrive as others end, with or without word times."""
        load = self.make_load(words=words)
        figures = self._closed_loop(load, itertools.repeat(THROUGHPUT_TOKENS))
        name, rtfx = "words" if words else "throughput", figures["windows_per_s"] * WINDOW_S
        ideal = WINDOW_S / self._floor.window_s(THROUGHPUT_TOKENS, self.config.slots)
        detail = f"30 s of sound, {THROUGHPUT_TOKENS} tokens{', each timed' * words}"
        yield self._row(name, rtfx, "RTFx", ideal, detail, figures)

    def latency(self) -> Iterator[Measurement]:
        """Measure one request at a time; the value is the median."""
        load, ideal_s = self.make_load(1, self._plan.request_s, short=self._short), self._ideal_s(1)

        def send() -> None:
            load.submit([REQUEST_TOKENS])
            load.drain()

        ideal_ms = 1e3 * ideal_s if ideal_s else None
        yield measure_latency(self._system, send, self._plan.requests, ideal_ms, self._request)

    def _ideal_s(self, slots: int) -> float | None:
        """Return the shortest time of a request; None: no floor of a shorter encoder is known."""
        is_whole = self._encoded_frames == N_FRAMES
        return self._floor.window_s(REQUEST_TOKENS, slots) if is_whole else None

    def mlperf(self) -> Iterator[Measurement]:
        """Measure windows from empty to empty, then a runtime that stays full.

        The second is the rate of MLPerf's ten minutes, in which fill and drain weigh little.
        """
        load, in_flight = self.make_load(), self._in_flight
        run = functools.partial(offline, load, in_flight=in_flight)
        lengths, figures = measure_sustained(run, mlperf_lengths(), in_flight, self._plan.seconds)
        floors_s = [self._floor.window_s(length, self.config.slots) for length in lengths]
        tokens = f"{statistics.mean(lengths):.1f} tokens on average"
        always_full = self._closed_loop(load, mlperf_lengths())
        for name, detail, values in (
            ("MLPerf-shaped", f"windows at hand at the start, {tokens}, fill and drain", figures),
            ("MLPerf-shaped, always full", "the same without fill and drain", always_full),
        ):
            rate = values["windows_per_s"]
            yield self._row(name, rate, "samples/s", 1 / statistics.mean(floors_s), detail, values)

    def open_loop(self) -> Iterator[Measurement]:
        """Measure the saturated rate, then the p99 of Poisson arrivals at shares of it."""
        load = self.make_load(seconds=self._plan.request_s, short=self._short)
        saturated = self._closed_loop(load, itertools.repeat(REQUEST_TOKENS))
        ideal_s, max_rate = self._ideal_s(self.config.slots), saturated["windows_per_s"]
        ideal, name = 1 / ideal_s if ideal_s else None, "open loop, saturated"
        yield self._row(name, max_rate, "requests/s", ideal, self._request, saturated)
        for share in _SHARES:
            warm_s, rate = self._plan.seconds / 4, share * max_rate
            arrivals = poisson(rate, warm_s + self._plan.seconds, seed=round(100 * share))
            latency_s = open_loop(load, arrivals, REQUEST_TOKENS, warm_s)
            figures = {"offered_per_s": rate, **percentiles_ms(latency_s)}
            figures["arrivals"] = len(latency_s)
            name = f"open loop, {100 * share:.0f} % load"
            yield self._row(name, figures["p99_ms"], "ms", None, "p99", figures)


def measure_sustained(
    run: Callable[[Sequence[int]], float], endless: Iterator[int], in_flight: int, seconds: float
) -> tuple[list[int], dict[str, float]]:
    """Run windows from empty to empty, enough of them to last `seconds`.

    The first run, of `in_flight` windows, warms up and tells how many are enough.

    Args:
        run: runs windows of these lengths (tokens); returns the seconds.
        endless: lengths.
        in_flight: at least twice as many windows are counted.
        seconds: to count.

    Returns:
        the lengths of the counted windows; figures by name.
    """
    lengths = list(itertools.islice(endless, in_flight))
    wall_s = run(lengths)
    while True:
        count = max(2 * in_flight, math.ceil(1.2 * len(lengths) * seconds / wall_s))
        lengths += itertools.islice(endless, max(0, count - len(lengths)))
        wall_s = run(lengths)
        if wall_s >= seconds:
            rate = len(lengths) / wall_s
            return lengths, {
                "windows_per_s": rate,
                "windows": len(lengths),
                "seconds": wall_s,
                "in_flight": in_flight,
            }


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


def with_slots(config: EvaluationProduct, slots: int) -> EvaluationProduct:
    """Configure `slots` slots, with a row for each beam of the configured search."""
    beam_size = config.transcriber.beam_size
    return changed(config, "runtime", slots=slots, rows=slots * beam_size if beam_size > 1 else 0)


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
