"""Load on a runtime without a server: noise of forced lengths, in a closed and an open loop.

It calls `Runtime.submit` and `poll` in one thread, as the transcriber does; the blocking clients of
`eval.load` would measure threads.
"""

import bisect
import collections
import concurrent.futures
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from serve.contract.config import RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import DeadlineError
from serve.contract.fields import ShortEncoder
from serve.runtime.protocol import DecodingOptions, Job, JobEvent, Runtime
from serve.speech.features import HOP_LENGTH, SAMPLE_RATE, WINDOW_S, WINDOW_SAMPLES, LogMel
from serve.speech.words import monotonic_path
from serve.transcriber.active import WINDOW_LENGTHS, encoder_frames

STALL_S = 120.0  # no window ended for so long: the runtime is stuck
_MAX_UNTIMED = 64  # windows with words that are not timed yet; at more the load waits
_job_ids = itertools.count()  # shared: a runtime may still report jobs of an earlier load


class WindowLoad:
    """Windows in a runtime; each must end once, with its forced length.

    Args:
        runtime: idle, and used by nothing else meanwhile.
        make_jobs: makes a job for each length in tokens, at most a batch.
        batch: the number of windows that are submitted together.
    """

    def __init__(
        self, runtime: Runtime, make_jobs: Callable[[Sequence[int]], list[Job]], batch: int
    ) -> None:
        self.runtime, self.batch = runtime, batch
        self._make_jobs = make_jobs
        self._missing_tokens: dict[int, int] = {}  # by job id
        self._progress_s = time.perf_counter()
        self._timers = concurrent.futures.ThreadPoolExecutor(2)  # as many as a transcriber has
        self._timing: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

    @property
    def in_flight(self) -> int:
        """Count the windows in the runtime."""
        return len(self._missing_tokens)

    def submit(self, lengths: Sequence[int]) -> list[int]:
        """Submit a window for each length, at most a batch; return their ids."""
        if not self._missing_tokens:
            self._progress_s = time.perf_counter()
        jobs = self._make_jobs(lengths)
        for job in jobs:
            self._missing_tokens[job.id] = job.options.max_tokens
            self.runtime.submit(job)
        return [job.id for job in jobs]

    def fill(self, lengths: Iterator[int], in_flight: int) -> None:
        """Submit windows until `in_flight` are in the runtime, or there are no more lengths."""
        while (room := in_flight - self.in_flight) > 0:
            batch = list(itertools.islice(lengths, min(room, self.batch)))
            if not batch:
                return
            self.submit(batch)

    def poll(self, timeout_s: float = 1.0) -> list[int]:
        """Let the runtime work; return the ids of the windows that ended.

        Raises:
            EarshotError: a window failed.
            DeadlineError: no window has ended for too long.
        """
        ended = [event.job_id for event in self.runtime.poll(timeout_s) if self._has_ended(event)]
        now = time.perf_counter()
        if ended:
            self._progress_s = now
        elif self._missing_tokens and now - self._progress_s > STALL_S:
            raise DeadlineError(
                f"no window ended for {STALL_S:.0f} s, with {self.in_flight} in the runtime; "
                "expected one every few seconds"
            )
        return ended

    def _has_ended(self, event: JobEvent) -> bool:
        """Count the tokens of an event; return whether its window has ended."""
        if event.error is not None:
            raise event.error
        self._missing_tokens[event.job_id] -= len(event.tokens)
        if event.finished is None:
            return False
        if event.alignment is not None and event.alignment.matrix is not None:
            self._timing.append(self._timers.submit(monotonic_path, event.alignment.matrix))
        missing = self._missing_tokens.pop(event.job_id)
        assert not missing, f"{missing} tokens short: {event.finished}"
        return True

    def drain(self) -> None:
        """Wait until the runtime is empty and all words are timed."""
        while self._missing_tokens:
            self.poll()
        self.wait_for_words(0)

    def wait_for_words(self, untimed: int) -> None:
        """Wait until at most `untimed` windows have words that are not timed yet."""
        while len(self._timing) > untimed:
            self._timing.popleft().result()


def noise_load(
    runtime: Runtime,
    engine: Engine,
    config: RuntimeConfig,
    batch: int | None = None,
    seconds: float = WINDOW_S,
    words: bool = False,
    short: ShortEncoder = "off",
) -> WindowLoad:
    """Return a load of windows of noise.

    Args:
        runtime: as for `WindowLoad`.
        engine: with end-of-text suppressed, so that every window reaches its length.
        config: the runtime's; its device computes the log-mels, and the host does not wait for
            them.
        batch: the number of windows that are submitted together; None: the encoder's batch.
        seconds: the noise in each window; silence fills the rest up to 30 s.
        words: whether the text of a job is aligned with its audio.
        short: how much of a window is encoded, as `TranscriberConfig.short_encoder` says.
    """
    facts, device = engine.manifest.tokenizer, torch.device(config.device)
    batch = batch or config.encoder_batch
    assert facts.transcribe is not None
    prompt = (facts.sot, facts.languages["en"], facts.transcribe, facts.no_timestamps)
    align_frames = engine.manifest.dims.n_audio_ctx if words else 0
    beam_size = max(1, config.rows // config.slots)
    log_mel = LogMel(engine.load_mel_filters(), device, WINDOW_LENGTHS)
    noise = torch.randn(batch, WINDOW_SAMPLES, generator=torch.Generator().manual_seed(0)) * 0.1
    noise[:, round(seconds * SAMPLE_RATE) :] = 0
    noise = noise[:, : encoder_frames(seconds, short) * HOP_LENGTH].contiguous()
    samples = noise.pin_memory() if device.type == "cuda" else noise

    @torch.inference_mode()
    def make_jobs(lengths: Sequence[int]) -> list[Job]:
        jobs = []
        for window, length in zip(samples[: len(lengths)], lengths, strict=True):
            features = log_mel(window, len(window))
            options = DecodingOptions(timestamps=False, max_tokens=length, beam_size=beam_size)
            jobs.append(Job(next(_job_ids), features, prompt, options, align_frames=align_frames))
        return jobs

    return WindowLoad(runtime, make_jobs, batch)


def closed_loop(
    load: WindowLoad, lengths: Iterator[int], slots: int, in_flight: int, seconds: float
) -> dict[str, float]:
    """Keep `in_flight` windows in the runtime: submit a new one for each that ends.

    Counting starts after `2 * slots` windows have ended; by then, the slots are at different
    positions. It lasts at least `seconds`. Windows of equal length may end together, so multiples
    of `slots` windows are counted. The runtime is empty afterwards.

    Args:
        load: the load to run, with no window in flight.
        lengths: the windows' numbers of tokens, without end.
        slots: the number of the runtime's slots.
        in_flight: the number of windows in flight; with fewer than `slots`, some slots stay free.
        seconds: the minimum duration of the measurement.
    """
    done = 0
    while done < 2 * slots:
        load.fill(lengths, in_flight)
        done += len(load.poll())
    before, began, done, rounds = load.runtime.gauges(), time.perf_counter(), 0, 1
    while (wall_s := time.perf_counter() - began) < seconds or done < rounds * slots:
        if wall_s < seconds:
            rounds = done // slots + 1
        load.fill(lengths, in_flight)
        done += len(load.poll())
        load.wait_for_words(_MAX_UNTIMED)
    after = load.runtime.gauges()
    load.drain()
    figures = {"windows_per_s": done / wall_s, "windows": done, "seconds": wall_s}
    steps, windows = after.steps - before.steps, after.windows - before.windows
    if steps and windows:
        figures |= {
            "step_ms": 1e3 * (after.decode_s - before.decode_s) / steps,
            "encode_ms": 1e3 * (after.encode_s - before.encode_s) / windows,
            "busy_slots": (after.step_slots - before.step_slots) / steps,
        }
    return figures


def offline(load: WindowLoad, lengths: Sequence[int], in_flight: int) -> float:
    """Run windows that all exist at the start (MLPerf's offline scenario); return the seconds.

    The time includes filling and draining the runtime. Log-mels are computed as the runtime makes
    room, so any number of windows fits in memory.
    """
    began, coming = time.perf_counter(), iter(lengths)
    load.fill(coming, in_flight)
    while load.in_flight:
        load.poll()
        load.fill(coming, in_flight)
    return time.perf_counter() - began


def open_loop(
    load: WindowLoad, arrivals: Sequence[float], length: int, warm_s: float
) -> list[float]:
    """Submit windows when they are due, independent of earlier ones; return when all have ended.

    All due windows are submitted before each poll, and latency counts from the due time: a runtime
    that keeps the host busy cannot hide the wait.

    Args:
        load: empty, and empty again afterwards.
        arrivals: due times (s), ascending.
        length: the length of each window, in tokens.
        warm_s: arrivals before this time are not counted.

    Returns:
        the latency (s) of each counted window, in the order of their ends.
    """
    due_s, latency_s = dict[int, float](), list[float]()  # the first by job id
    began_s = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began_s

    while len(due_s) < len(arrivals) or load.in_flight:
        due_count = bisect.bisect_right(arrivals, now())
        for start in range(len(due_s), due_count, load.batch):
            batch = arrivals[start : min(start + load.batch, due_count)]
            due_s.update(zip(load.submit([length] * len(batch)), batch, strict=True))
        wait_s = max(0.0, arrivals[due_count] - now()) if due_count < len(arrivals) else 1.0
        if load.in_flight:
            ended_due_s = [due_s[job_id] for job_id in load.poll(min(wait_s, 1.0))]
            latency_s += [now() - due for due in ended_due_s if due >= warm_s]
        else:
            time.sleep(wait_s)
    return latency_s
