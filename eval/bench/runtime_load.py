"""Load on a runtime: windows of noise with forced lengths, in a closed and in an open loop."""

import collections
import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from eval.bench.table import percentiles_ms
from serve.contract.engine import Engine
from serve.contract.errors import DeadlineError
from serve.contract.fields import ShortEncoder
from serve.native.decoder import Cache
from serve.native.kernels.feed import Feed
from serve.native.network import Whisper
from serve.native.runtime import NativeRuntime
from serve.runtime.protocol import DecodingOptions, Event, Gauges, Job, Runtime
from serve.speech.features import (
    HOP_LENGTH,
    SAMPLE_RATE,
    WINDOW_S,
    WINDOW_SAMPLES,
    LogMel,
)
from serve.speech.words import handovers
from serve.transcriber.spans import WINDOW_LENGTHS, encoder_frames

_OTHER = 1000  # a token of text
_SURE = 1e4  # of logits: above all others
_DICE = 10_007  # sides


def accepting(share: float) -> type[NativeRuntime]:
    """A runtime whose network agrees with such a share of guesses."""

    class Agreeing(Whisper):
        """Says what was guessed, or something else."""

        def step(
            self,
            feed: Feed,
            cache: Cache,
            wanted: torch.Tensor | None = None,
            queries: dict[int, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            logits = super().step(feed, cache, wanted, queries)
            if feed.several and wanted is None and queries is None:  # guesses are verified
                logits.scatter_(1, _following(feed, share)[:, None], _SURE)
            return logits

    class AgreeingRuntime(NativeRuntime):
        """Opens engines with that network."""

        network_class = Agreeing

    return AgreeingRuntime


def _following(feed: Feed, share: float) -> torch.Tensor:
    """Choose what follows each feed: the guess that stands there, or another token; int64 (n,)."""
    after = (feed.positions + 1).clamp(max=feed.ids.shape[1] - 1)
    guess = feed.ids[feed.rows, after]
    thrown = (feed.rows * 7_919 + after * 104_729) % _DICE
    return torch.where(thrown < share * _DICE, guess, _OTHER + (guess == _OTHER))


# ---------------------------------------------------------------- energy


try:
    import pynvml
except ImportError:  # the rest of the bench needs it as little
    pynvml = None


def joules_so_far(device: str) -> float | None:
    """Read the J that a GPU has used since its driver was loaded; None where NVML does not tell."""
    if pynvml is None or torch.device(device).type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except pynvml.NVMLError:  # older than Volta, or a container without the library
        return None


# ---------------------------------------------------------------- load


STALL_S = 120.0  # nothing ended for so long: the runtime is stuck
MOST_UNTIMED = 64  # windows; the runtime waits where their words are timed too slowly
LATE_S = 0.010  # an arrival that is handed over later than this after it was due is called late
_COUNTED = ("steps", "step_slots", "windows", "encode_s", "decode_s")


class NoiseWindows:
    """Makes jobs, each of one window of noise.

    Args:
        engine: with end-of-text suppressed, so that every window reaches its length.
        device: where log-mels are computed.
        batch: windows whose log-mels are computed together.
        seconds: of noise in each window; the rest is silence up to 30 s.
        beam_size: of each.
        words: whether their text is to be aligned with all of it.
        short: how much of them is encoded, as `TranscriberConfig.short_encoder` says.
    """

    _ids = itertools.count()  # of all: a runtime may still have news of the ones before

    def __init__(
        self,
        engine: Engine,
        device: torch.device | str,
        batch: int,
        seconds: float = WINDOW_S,
        beam_size: int = 1,
        words: bool = False,
        short: ShortEncoder = "off",
    ) -> None:
        facts = engine.manifest.tokenizer
        assert facts.transcribe is not None
        self.batch = batch
        self.prompt = (facts.sot, facts.languages["en"], facts.transcribe, facts.no_timestamps)
        self._beam_size = beam_size
        self._align_frames = engine.manifest.dims.n_audio_ctx if words else 0
        self._device = torch.device(device)
        self._log_mel = LogMel(engine.load_mel_filters(), self._device, WINDOW_LENGTHS)
        noise = torch.randn(batch, WINDOW_SAMPLES, generator=torch.Generator().manual_seed(0)) * 0.1
        noise[:, round(seconds * SAMPLE_RATE) :] = 0
        noise = noise[:, : encoder_frames(seconds, short) * HOP_LENGTH].contiguous()
        self._samples = noise.pin_memory() if self._device.type == "cuda" else noise

    def new_id(self) -> int:
        """Return an id for a job of this runtime's that is made elsewhere."""
        return next(self._ids)

    @torch.inference_mode()
    def features(self, count: int) -> torch.Tensor:
        """Compute log-mels of up to `batch` windows, float32 (count, n_mels, frames) on the device.

        The host does not wait for them.
        """
        assert count <= self.batch
        return self._log_mel(self._samples[:count])

    @torch.inference_mode()
    def beginning(self, row: int, frames: int) -> torch.Tensor:
        """Compute the log-mel of the first frames of one of `batch` windows, (n_mels, frames)."""
        return self._log_mel(self._samples[row : row + 1, : frames * HOP_LENGTH])[0]

    def jobs(self, lengths: Sequence[int]) -> list[Job]:
        """Make a job for each length in tokens, at most `batch`."""
        options = [
            DecodingOptions(timestamps=False, max_tokens=length, beam_size=self._beam_size)
            for length in lengths
        ]
        windows = self.features(len(lengths))
        return [
            Job(next(self._ids), features, self.prompt, option, align_frames=self._align_frames)
            for features, option in zip(windows, options, strict=True)
        ]


class Load:
    """Windows in a runtime: handed over, and each seen to come back, once, with its forced length.

    Args:
        runtime: idle; nobody else uses it meanwhile.
        windows: what is handed over.
    """

    def __init__(self, runtime: Runtime, windows: NoiseWindows) -> None:
        self.runtime = runtime
        self.batch = windows.batch
        self._windows = windows
        self._left: dict[int, int] = {}  # job id -> tokens that it still owes
        self._moved = time.perf_counter()
        self._timers = concurrent.futures.ThreadPoolExecutor(2)  # as many as a transcriber has
        self.timing: collections.deque[concurrent.futures.Future[Any]] = collections.deque()

    @property
    def in_flight(self) -> int:
        """Count the windows in the runtime."""
        return len(self._left)

    def submit(self, lengths: Sequence[int]) -> list[int]:
        """Hand over a window for each length, at most a batch; returns their ids."""
        if not self._left:
            self._moved = time.perf_counter()
        jobs = self._windows.jobs(lengths)
        for job in jobs:
            self._left[job.id] = job.options.max_tokens
            self.runtime.submit(job)
        return [job.id for job in jobs]

    def fill(self, lengths: Iterator[int], in_flight: int) -> None:
        """Hand over windows until `in_flight` are in the runtime, or there are no more lengths."""
        while (room := in_flight - self.in_flight) > 0:
            taken = list(itertools.islice(lengths, min(room, self.batch)))
            if not taken:
                return
            self.submit(taken)

    def poll(self, timeout_s: float = 1.0) -> list[int]:
        """Let the runtime work; returns the ids that ended.

        Raises:
            EarshotError: a window failed.
            DeadlineError: none has ended for too long.
        """
        ended = [event.job_id for event in self.runtime.poll(timeout_s) if self._note(event)]
        now = time.perf_counter()
        if ended:
            self._moved = now
        elif self._left and now - self._moved > STALL_S:
            raise DeadlineError(
                f"no window ended for {STALL_S:.0f} s, with {self.in_flight} in the runtime; "
                "expected one every few seconds"
            )
        return ended

    def _note(self, event: Event) -> bool:
        """Count an event's tokens; whether its window has ended."""
        if event.error is not None:
            raise event.error
        self._left[event.job_id] -= len(event.tokens)
        if event.finished is None:
            return False
        if event.alignment is not None and event.alignment.matrix is not None:
            self.timing.append(self._timers.submit(handovers, event.alignment.matrix))
        left = self._left.pop(event.job_id)
        assert left == 0 or event.finished == "cancelled", f"{left} tokens short: {event.finished}"
        return True

    def drain(self) -> None:
        """Wait until the runtime is empty."""
        while self._left:
            self.poll()
        self.wait_for_words(0)

    def wait_for_words(self, most: int) -> None:
        """Wait until no more than so many windows' words are still to be timed."""
        while len(self.timing) > most:
            self.timing.popleft().result()

    def cancel(self) -> None:
        """Take every window back."""
        for job_id in self._left:
            self.runtime.cancel(job_id)
        self.drain()


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """A stretch in which the runtime was full from the first moment to the last."""

    windows: int  # that ended
    wall_s: float
    gauges: Gauges  # what its counters moved by
    joules: float | None  # None: nobody counted them

    @property
    def rate(self) -> float:
        """Return the windows per second."""
        return self.windows / self.wall_s

    @property
    def detail(self) -> str:
        """Say where the time went."""
        gauges, text = self.gauges, f"{self.windows} windows in {self.wall_s:.1f} s"
        if gauges.steps and gauges.windows:
            text += (
                f"; step {1e3 * gauges.decode_s / gauges.steps:.2f} ms, encode "
                f"{1e3 * gauges.encode_s / gauges.windows:.2f} ms a window, "
                f"{gauges.step_slots / gauges.steps:.0f} slots busy"
            )
        if self.joules is not None:
            text += f"; {self.joules / self.wall_s:.0f} W"
        return text

    @property
    def energy(self) -> dict[str, float]:
        """Return the J for an hour of the windows' audio, all of 30 s; empty where none counted."""
        hours = self.windows * WINDOW_S / 3600
        return {} if self.joules is None else {"joules_per_audio_hour": self.joules / hours}


def closed_loop(
    load: Load,
    lengths: Iterator[int],
    slots: int,
    in_flight: int,
    seconds: float,
    joules: Callable[[], float | None] = lambda: None,
) -> ClosedLoop:
    """Keep `in_flight` windows in the runtime at any time: a new one for each that ends.

    Counted for at least `seconds`, once twice as many windows as there are slots have ended: their
    ages are mixed by then as they will stay. Where all are of one length they may stay alike and
    end together, so that as many are counted as make every slot's rounds whole. The runtime is
    empty afterwards.

    Args:
        load: empty.
        lengths: tokens of the windows to come, without end.
        slots: of the runtime.
        in_flight: at least `slots`, or some stay free.
        seconds: to count.
        joules: how many the device has used so far.
    """
    done = 0
    while done < 2 * slots:
        load.fill(lengths, in_flight)
        done += len(load.poll())
    before, used, began, done = load.runtime.gauges(), joules(), time.perf_counter(), 0
    rounds = 1
    while (wall_s := time.perf_counter() - began) < seconds or done < rounds * slots:
        if wall_s < seconds:
            rounds = done // slots + 1
        load.fill(lengths, in_flight)
        done += len(load.poll())
        load.wait_for_words(MOST_UNTIMED)
    moved, now = _difference(load.runtime.gauges(), before), joules()
    load.drain()
    return ClosedLoop(done, wall_s, moved, None if now is None or used is None else now - used)


def _difference(after: Gauges, before: Gauges) -> Gauges:
    moved = {name: getattr(after, name) - getattr(before, name) for name in _COUNTED}
    return dataclasses.replace(after, **moved)


def offline(load: Load, lengths: Sequence[int], in_flight: int) -> float:
    """Run windows that are all at hand at the start: MLPerf's offline scenario; returns seconds.

    Filling and draining the runtime count. Log-mels are computed as the runtime makes room, so that
    any number fits in memory.
    """
    began, coming = time.perf_counter(), iter(lengths)
    load.fill(coming, in_flight)
    while load.in_flight:
        load.poll()
        load.fill(coming, in_flight)
    return time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """Figures of arrivals that did not wait for one another."""

    latency_s: list[float]  # from due to last token; where unfinished, as long as it was waited
    late: int  # handed over more than LATE_S after they were due
    latest_s: float  # the most that one was handed over after it was due
    unfinished: int

    @property
    def figures(self) -> dict[str, float]:
        """Return the same as numbers by name."""
        percentiles = percentiles_ms(self.latency_s)
        return {
            "arrivals": len(self.latency_s),
            **percentiles,
            "jitter_ms": percentiles["p99_ms"] - percentiles["p50_ms"],
            "stdev_ms": 1e3 * float(np.std(self.latency_s)),
            "late": self.late,
            "latest_ms": 1e3 * self.latest_s,
            "unfinished": self.unfinished,
        }


def open_loop(
    load: Load, arrivals: Sequence[float], length: int, warm_s: float, drain_s: float
) -> OpenLoop:
    """Hand windows over when they are due, whatever became of the earlier ones.

    Whatever is due is handed over before each poll, and its latency counts from when it was due: a
    runtime that keeps the host busy cannot hide the wait. What has not ended `drain_s` after the
    last arrival is taken back and counts as unfinished.

    Args:
        load: empty, and empty again afterwards.
        arrivals: when each window is due (s), ascending.
        length: tokens of each.
        warm_s: arrivals before this are not counted.
        drain_s: how long to wait after the last.
    """
    coming = collections.deque(arrivals)
    due_at: dict[int, float] = {}
    handed_at: dict[int, float] = {}
    ended_at: dict[int, float] = {}
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    while (coming or load.in_flight) and now() < arrivals[-1] + drain_s:
        for group in _due(coming, now(), load.batch):
            ids = load.submit([length] * len(group))
            due_at.update(zip(ids, group, strict=True))
            handed_at.update(dict.fromkeys(ids, now()))
        until = max(0.0, coming[0] - now()) if coming else 1.0
        if load.in_flight:
            ended = load.poll(min(until, 1.0))
            ended_at.update(dict.fromkeys(ended, now()))
        else:
            time.sleep(until)
    gave_up = now()
    load.cancel()
    counted = [i for i, due in due_at.items() if due >= warm_s]
    delays = [handed_at[i] - due_at[i] for i in counted]
    return OpenLoop(
        [ended_at.get(i, gave_up) - due_at[i] for i in counted] + [gave_up - due for due in coming],
        sum(delay > LATE_S for delay in delays),
        max(delays, default=0.0),
        sum(i not in ended_at for i in counted) + len(coming),
    )


def _due(coming: collections.deque[float], now: float, most: int) -> Iterator[list[float]]:
    """Take what is due, in groups of at most `most`."""
    while coming and coming[0] <= now:
        group: list[float] = []
        while coming and coming[0] <= now and len(group) < most:
            group.append(coming.popleft())
        yield group
