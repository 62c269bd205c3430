"""How fast the native runtime is on this machine, beside what the machine could do at best.

Random weights of a published shape say nonsense at the speed of the real ones, so nothing has to be
downloaded. Lengths are forced honestly: the engine's own suppress list holds end-of-text, so every
window goes on to its `max_tokens` under all rules, and the runtime does not know beforehand.

Timed from samples in host memory to tokens: log-mel, encoder, decoder; no audio decoding, no text.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eval.bench_table import Row
from serve.config import Config, Precision
from serve.engine import Dims, Engine
from serve.features import SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES, log_mel
from serve.native import NativeRuntime
from serve.runtime import DecodingOptions, Job

THROUGHPUT_TOKENS = 128
REQUEST_S, REQUEST_TOKENS = 10.0, 40
MLPERF_MEAN, MLPERF_MAX = 75, 200


class Bench:
    """Workloads over one engine.

    Args:
        engine: with end-of-text suppressed.
        config: its `runtime` section says where and how to run.
        seconds: how long a throughput figure is sustained.
        say: gets a line on each stage.
    """

    def __init__(
        self, engine: Engine, config: Config, seconds: float, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._config = config
        self._seconds = seconds
        self._say = say
        self._dims = engine.manifest.dims
        facts = engine.manifest.tokenizer
        self._prompt = (
            facts.sot,
            facts.languages["en"],
            facts.transcribe or 0,
            facts.no_timestamps,
        )
        self._samples = torch.randn(8, WINDOW_SAMPLES) * 0.1
        self._ids = 0
        self.gemm_flops, self.copy_bytes = ceilings(torch.device(config.runtime.device))

    def rows(self, requests: int, slot_counts: tuple[int, int] = (64, 256)) -> Iterator[Row]:
        """Run every workload, one after the other; single requests with the fewer slots."""
        yield Row("ceiling", "fp16 GEMM 8192", self.gemm_flops / 1e12, "TFLOP/s", None)
        yield Row("ceiling", "copy, read + write", self.copy_bytes / 1e12, "TB/s", None)
        for slots in slot_counts:
            runtime = self._open(slots)
            if slots == slot_counts[0]:
                yield self.one_request(runtime, requests)
            yield self.throughput(runtime, slots)
            if slots == slot_counts[-1]:
                yield self.mlperf(runtime, slots)
            runtime.close()
            del runtime
            torch.cuda.empty_cache()

    def _open(self, slots: int) -> NativeRuntime:
        began = time.perf_counter()
        config = dataclasses.replace(self._config.runtime, slots=slots)
        runtime = NativeRuntime(self._engine, config)
        self._say(f"{runtime.description}; ready after {time.perf_counter() - began:.1f} s")
        return runtime

    def _jobs(self, tokens: list[int], seconds: float = WINDOW_S) -> list[Job]:
        """Jobs of at most 8 windows, from samples on the host."""
        samples = self._samples[: len(tokens)].clone()
        samples[:, round(seconds * SAMPLE_RATE) :] = 0
        features = log_mel(samples.to(self._config.runtime.device), self._dims.n_mels)
        jobs = []
        for row, count in zip(features, tokens, strict=True):
            self._ids += 1
            options = DecodingOptions(timestamps=False, max_tokens=count)
            jobs.append(Job(self._ids, row, self._prompt, options))
        return jobs

    def one_request(self, runtime: NativeRuntime, requests: int) -> Row:
        """(b) One 10 s request at a time, padded to 30 s, 40 tokens."""
        times = []
        for i in range(requests + 10):
            began = time.perf_counter()
            runtime.submit(self._jobs([REQUEST_TOKENS], REQUEST_S)[0])
            event = next(self._ended(runtime))
            if i >= 10:
                times.append(time.perf_counter() - began)
            assert len(event) == REQUEST_TOKENS
        times.sort()
        p50, p99 = (1e3 * times[min(int(q * len(times)), len(times) - 1)] for q in (0.5, 0.99))
        ideal = 1e3 * (self._encode_s(1) + (REQUEST_TOKENS + 3) * self._step_s(1, 22))
        return Row("one request", "earshot", p50, "ms", ideal, f"p99 {p99:.1f} ms, n {requests}")

    def throughput(self, runtime: NativeRuntime, slots: int) -> Row:
        """(a) `slots` windows in the runtime at any time, a new one for each that ends."""
        done, began, finished = 0, 0.0, 0
        pending = slots + self._config.runtime.encoder_batch
        queued = 0
        while True:
            while queued < pending:
                for job in self._jobs([THROUGHPUT_TOKENS] * min(8, pending - queued)):
                    runtime.submit(job)
                    queued += 1
            ended = len(next(self._ended_batches(runtime)))
            queued -= ended
            done += ended
            if not began and done >= 2 * slots:  # warm: ages are mixed as they will stay
                began, finished = time.perf_counter(), done
            elif began and time.perf_counter() - began > self._seconds:
                break
        rate = (done - finished) / (time.perf_counter() - began)
        self._drain(runtime, queued)
        window_s = self._encode_s(1) + (THROUGHPUT_TOKENS + 3) * self._step_s(slots, 66) / slots
        load = runtime.load()
        return Row(
            f"throughput, {slots} slots", "earshot", rate * WINDOW_S, "RTFx", WINDOW_S / window_s,
            f"{done - finished} windows of 30 s, 128 tokens; since start: step "
            f"{1e3 * load.decode_s / load.steps:.2f} ms, encode "
            f"{1e3 * load.encode_s / load.windows:.2f} ms a window, "
            f"{load.step_slots / load.steps:.0f} slots busy",
        )  # fmt: skip

    def mlperf(self, runtime: NativeRuntime, slots: int) -> Row:
        """(c) All windows queued at once; token counts as of MLPerf's set in mean and maximum."""
        rate = 60.0  # a guess, only to choose how many windows last long enough
        count = 8 * math.ceil(max(slots, rate * self._seconds) / 8)
        dice = random.Random(0)
        lengths = [
            max(4, min(MLPERF_MAX, round(dice.gammavariate(6, MLPERF_MEAN / 6))))
            for _ in range(count)
        ]
        began = time.perf_counter()
        for i in range(0, count, 8):
            for job in self._jobs(lengths[i : i + 8]):
                runtime.submit(job)
        self._drain(runtime, count)
        wall = time.perf_counter() - began
        mean = statistics.mean(lengths)
        ideal = 1 / (self._encode_s(1) + (mean + 3) * self._step_s(slots, 40) / slots)
        return Row(
            "MLPerf-shaped", "earshot", count / wall, "samples/s", ideal,
            f"{count} windows at once, {mean:.1f} tokens on average, {slots} slots",
        )  # fmt: skip

    @staticmethod
    def _ended_batches(runtime: NativeRuntime) -> Iterator[list[tuple[int, ...]]]:
        while True:
            ended = [event.tokens for event in runtime.poll(1.0) if event.finished]
            if ended:
                yield ended

    def _ended(self, runtime: NativeRuntime) -> Iterator[tuple[int, ...]]:
        for ended in self._ended_batches(runtime):
            yield from ended

    def _drain(self, runtime: NativeRuntime, count: int) -> None:
        ended = self._ended(runtime)
        for _ in range(count):
            next(ended)

    def _encode_s(self, windows: int) -> float:
        return windows * encode_flops(self._dims) / self.gemm_flops

    def _step_s(self, slots: int, age: int) -> float:
        precision = self._engine.manifest.precision
        return step_bytes(self._dims, precision, slots, age) / self.copy_bytes


def encode_flops(dims: Dims) -> float:
    """Operations to encode one window and project its cross keys and values."""
    d, ffn, time_ = dims.n_audio_state, dims.n_audio_ffn, dims.n_audio_ctx
    layer = 2 * time_ * (4 * d * d + 2 * d * ffn) + 4 * time_ * time_ * d
    stem = 2 * time_ * 3 * d * (2 * dims.n_mels + d)
    return dims.n_audio_layer * layer + stem + dims.n_text_layer * 2 * 2 * time_ * d * d


def step_bytes(dims: Dims, precision: Precision, slots: int, age: int) -> float:
    """Least bytes of a decoder step: its weights and every slot's FP16 keys and values, once.

    Args:
        dims: the network's sizes.
        precision: of the decoder's matrices; cross-attention's own are used by the encoder.
        slots: how many decode.
        age: how many tokens each has.
    """
    d, layers = dims.n_text_state, dims.n_text_layer
    weights = layers * (6 * d * d + 2 * d * dims.n_text_ffn) + dims.n_vocab * d
    keys = layers * 2 * d * (dims.n_audio_ctx + age)
    return (1 if precision == "int8" else 2) * weights + 2 * slots * keys


def ceilings(device: torch.device) -> tuple[float, float]:
    """What the machine does at best: (FP16 FLOP/s of a big product, bytes/s of a big copy)."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.float16) for _ in range(2))
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    product_s = _seconds(lambda: a @ b)
    copy_s = _seconds(lambda: target.copy_(source))
    return 2 * 8192**3 / product_s, 2 * source.nbytes / copy_s


def _seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median device time of one call."""
    for _ in range(3):
        work()
    event: Any = torch.cuda.Event  # its annotations are incomplete
    times = []
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))
