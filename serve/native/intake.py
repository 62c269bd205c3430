"""The way of windows in: they wait, are encoded and given a slot, and their prompts are fed.

Encoder and steps take turns. On a GPU whose steps are CUDA graphs, windows that bring guesses, as
live text does, are encoded beside the steps instead, on another stream: to verify guesses the host
launches many small kernels, and the device would wait for it. For other windows that is no gain:
what shares the device takes as long as what takes turns, and feeds fewer windows a step.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence

import torch

from serve.native.encoders import Encoder
from serve.native.order import Line, Turns
from serve.native.slots import Place, Slots
from serve.native.start import Begun, Starter, rows_of
from serve.native.stopwatch import Stopwatch
from serve.native.tries import Try
from serve.runtime.protocol import Job

_AHEAD = 2  # batches in the encoder's hands, so that it need not wait for the host
# On a GPU, batches between two launches of steps: with one, slots would stay empty that windows
# leave; with all that wait, the windows of a backlog would begin and end together. Two, or of many
# slots, of which a drafted turn ends more, one for so many.
_SLOTS_A_BATCH = 128
_DECODE_TARGET_S = 0.005
_BACKLOG = 3  # batches that wait are encoded first, however many windows decode


@dataclasses.dataclass
class SlotJob:
    """A job that owns a slot."""

    submitted: Job
    job: Job  # that job, or one that tries another language in its place
    place: Place
    stopwatch: Stopwatch  # over the encoding of its batch
    decode_began: float
    tries: tuple[Try, ...] = ()  # those before this one


@dataclasses.dataclass
class _Batch:
    """Windows that are being encoded."""

    begun: list[Begun]  # without those that were cancelled
    held: list[torch.Tensor]  # what the device reads meanwhile
    stopwatch: Stopwatch


@dataclasses.dataclass(frozen=True)
class Streams:
    """The streams of a CUDA device; where work waits on both, that of `steps` goes first."""

    steps: torch.cuda.Stream
    encoder: torch.cuda.Stream

    @staticmethod
    def of(device: torch.device) -> "Streams":
        """Make new ones."""
        first = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return Streams(first, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Intake:
    """The windows that do not decode yet.

    Args:
        encoder: fills slots.
        starter: feeds prompts.
        slots: where windows decode.
        batch: most windows that are encoded in one go; a GPU is fastest with so many.
        device: of all of it.
        streams: of a GPU; None: it uses the current one.
        beside: whether windows may be encoded beside the steps.
        decode_target_s: windows that have decoded for longer go first, while fewer wait than
            decode.
    """

    def __init__(
        self,
        encoder: Encoder,
        starter: Starter,
        slots: Slots,
        batch: int,
        device: torch.device,
        streams: Streams | None,
        *,
        beside: bool,
        decode_target_s: float = _DECODE_TARGET_S,
    ) -> None:
        self._encoder = encoder
        self._starter = starter
        self._slots = slots
        self._batch = batch
        self._decode_target_s = decode_target_s
        self._device = device
        self._streams = streams
        self._beside = beside
        self._line = Line(slots.slots)
        self._batches: collections.deque[_Batch] = collections.deque()
        self.turns = Turns(self._line, slots) if device.type == "cpu" else None
        """Who may decode, on a device that cannot be interrupted."""
        self.windows = 0
        """That were given a slot."""
        self.encoding: collections.deque[Stopwatch] = collections.deque()
        """Over what was encoded."""
        self.prompting: collections.deque[Stopwatch] = collections.deque()
        """Over prompts that were fed."""

    def __len__(self) -> int:
        """Count the windows that wait for a slot."""
        return len(self._line)

    def add(self, job: Job) -> None:
        """Let a window wait."""
        self._line.add(job)

    def remove(self, job_id: int) -> bool:
        """Drop a window, of which nothing more comes; return whether it was here."""
        for batch in self._batches:
            for window in batch.begun:
                if window.job.id == job_id:
                    batch.begun.remove(window)
                    self._slots.release(job_id)
                    return True
        return self._line.remove(job_id)

    def clear(self) -> None:
        """Drop all windows."""
        self._line.clear()
        for batch in self._batches:
            for window in batch.begun:
                self._slots.release(window.job.id)
            batch.stopwatch.seconds()  # the device reads what is held until then
        self._batches.clear()

    def begin(self, running: Sequence[SlotJob]) -> list[SlotJob]:
        """Encode what may be; returns the windows that decode from now on.

        Args:
            running: the windows that do so already, the oldest first.
        """
        if not self._line and not self._batches:
            return []
        decoding = [window.job for window in running]
        begun = self._encoded(busy=bool(running))
        for _ in range(1 if self.turns else max(2, self._slots.slots // _SLOTS_A_BATCH)):
            if not self._line or not self._fits(decoding):
                break
            others = [*running, *begun]
            beside = self._beside and bool(others) and self._guessing()
            if not (len(self._batches) < _AHEAD if beside else self._is_turn(others, decoding)):
                break
            self._encode(decoding)
            if not beside:
                begun += self._start(self._batches.pop())
            if len(self._line) < self._slots.free:
                break
        if self._beside:
            self._slots.rest({window.job.id for batch in self._batches for window in batch.begun})
        return begun

    def _encoded(self, busy: bool) -> list[SlotJob]:
        """Start the windows that are encoded; a device that has nothing else is waited for."""
        begun: list[SlotJob] = []
        while self._batches and (not (busy or begun) or self._batches[0].stopwatch.known):
            begun += self._start(self._batches.popleft())
        return begun

    def _fits(self, decoding: Sequence[Job]) -> bool:
        """Tell whether enough slots are free for what waits, or for a batch of it."""
        return self._fitting(decoding) >= min(1 if self.turns else self._batch, len(self._line))

    def _is_turn(self, running: Sequence[SlotJob], decoding: Sequence[Job]) -> bool:
        """Tell whether the encoder may hold up the windows that decode.

        On a GPU, if as many wait: it holds up `running` to bring on what waits, and to decode one
        more window beside others costs little. Where not all that wait would find places, the slots
        can be filled, and are.
        """
        waiting = len(self._line)
        if self.turns or waiting >= min(len(running), _BACKLOG * self._batch):
            return True
        if self._fitting(decoding) < waiting:
            return True
        return time.perf_counter() - running[0].decode_began <= self._decode_target_s

    def _guessing(self) -> bool:
        """Tell whether some of the next batch bring guesses."""
        return any(job.draft for job in itertools.islice(self._line, self._batch))

    def _fitting(self, decoding: Sequence[Job]) -> int:
        """Count the waiting windows that could have their slot and rows now."""
        if self.turns:
            return self.turns.fit(decoding)
        return self._slots.fit(map(rows_of, self._line))

    def _encode(self, decoding: Sequence[Job]) -> None:
        """Encode one batch of waiting windows and give each a slot."""
        jobs = self._alike(self._fitting(decoding))
        self._line.remove(*(job.id for job in jobs))
        places = [self._slots.acquire(job.id, rows_of(job)) for job in jobs]
        features = [job.features for job in jobs]
        if self._streams is None:
            stopwatch = self._launch(features, places)
        else:
            # The windows' log-mels are made on the default stream; steps may still read the slots.
            for stream in (torch.cuda.default_stream(self._device), self._streams.steps):
                self._streams.encoder.wait_stream(stream)
            with torch.cuda.stream(self._streams.encoder):
                stopwatch = self._launch(features, places)
        begun = [Begun(*pair) for pair in zip(jobs, places, strict=True)]
        self._batches.append(_Batch(begun, features, stopwatch))
        self.encoding.append(stopwatch)
        self.windows += len(jobs)

    def _alike(self, fitting: int) -> list[Job]:
        """Choose the next windows to encode: the first, and others as long of those that fit."""
        jobs = list(itertools.islice(self._line, fitting))
        frames = [self._encoder.frames_of(job.features.shape[-1]) for job in jobs]
        alike = [job for job, length in zip(jobs, frames, strict=True) if length == frames[0]]
        return alike[: self._encoder.batch_of(len(alike))]

    def _launch(self, features: list[torch.Tensor], places: list[Place]) -> Stopwatch:
        stopwatch = Stopwatch(self._device, "encode")
        self._encoder.encode(features, [place.slot for place in places])
        stopwatch.stop()
        return stopwatch

    def _start(self, batch: _Batch) -> list[SlotJob]:
        """Feed a batch's prompts; on the device they and later steps wait for its encoding."""
        if not batch.begun:
            return []
        if self._streams is not None:
            batch.stopwatch.hold(self._streams.steps)
        began = time.perf_counter()
        self.feed(batch.begun)
        return [
            SlotJob(window.job, window.job, window.place, batch.stopwatch, began)
            for window in batch.begun
        ]

    def feed(self, begun: Sequence[Begun]) -> None:
        """Feed the prompts of jobs whose audio is in their slots."""
        stopwatch = Stopwatch(self._device, "prompts")
        self._starter.start(begun)
        stopwatch.stop()
        self.prompting.append(stopwatch)
