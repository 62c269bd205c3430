"""Schedule the encoder: give queued windows a slot, encode them and prefill their prompts.

The encoder and the decoder steps take turns, with one exception. On a GPU with CUDA graphs, windows
with a draft, such as live text, are encoded on a second stream while decoder steps run. To verify
drafts the host launches many small kernels, and the device would otherwise wait for the host. Other
windows gain nothing from a second stream: the work takes as long, and each step has fewer windows.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence

import torch

from serve.native.encoders import WindowEncoder
from serve.native.prefill import Prefill, SlotJob, rows_of
from serve.native.scheduler import UrgentStepPolicy, WaitingQueue
from serve.native.slots import SlotAllocation, SlotPool
from serve.native.stopwatch import Stopwatch
from serve.runtime.protocol import Job

_MAX_CONCURRENT_BATCHES = 2  # on the encoder's stream, so that it does not wait for the host
# Between two launches of steps, a GPU encodes at most one batch per this number of slots, but may
# always encode two. With one batch, free slots would stay empty. With all queued batches, the
# windows of a backlog would start and end together. Steps with drafts end more windows at a time.
_SLOTS_PER_BATCH = 128
_DECODE_TARGET_S = 0.005
_BACKLOG = 3  # queued batches at which the encoder goes first, even if more windows decode


@dataclasses.dataclass
class _EncoderBatch:
    """A batch of windows in the encoder."""

    started: list[SlotJob]  # without cancelled windows
    features: list[torch.Tensor]  # tensors that the device still reads
    stopwatch: Stopwatch


class CudaStreams:
    """The streams of a CUDA device; `steps` has the higher priority."""

    def __init__(self, device: torch.device) -> None:
        self.steps = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.encoder = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class EncoderScheduler:
    """A scheduler of the windows that do not decode yet.

    Args:
        encoder: encodes windows into slots.
        prefill: prefills prompts.
        slots: the slots in which windows decode.
        batch: the maximum number of windows of an encoder batch; a GPU is fastest with that many.
        device: the device of encoder and steps.
        streams: the streams of a GPU; None: the current stream.
        concurrent: whether windows with a draft may be encoded while decoder steps run.
        decode_target_s: if a window has decoded for longer, the encoder waits for it, unless the
            queue is long.
    """

    def __init__(
        self,
        encoder: WindowEncoder,
        prefill: Prefill,
        slots: SlotPool,
        batch: int,
        device: torch.device,
        streams: CudaStreams | None,
        *,
        concurrent: bool,
        decode_target_s: float = _DECODE_TARGET_S,
    ) -> None:
        self._encoder = encoder
        self._prefill = prefill
        self._slots = slots
        self._batch = batch
        self._decode_target_s = decode_target_s
        self._device = device
        self._streams = streams
        self._concurrent = concurrent
        self._waiting = WaitingQueue(slots.slots)
        self._batches: collections.deque[_EncoderBatch] = collections.deque()
        self.urgent_policy = (
            UrgentStepPolicy(self._waiting, slots) if device.type == "cpu" else None
        )
        """The policy for urgent windows on a CPU; None on a GPU."""
        self.windows = 0
        """The number of windows that got a slot so far."""
        self.encode_timers: collections.deque[Stopwatch] = collections.deque()
        """The time of each encoder batch."""
        self.decode_timers: collections.deque[Stopwatch] = collections.deque()
        """The times of prefills and, added by the runtime, of steps."""

    def __len__(self) -> int:
        """Return the number of windows that wait for a slot."""
        return len(self._waiting)

    def add(self, job: Job) -> None:
        self._waiting.add(job)

    def remove(self, job_id: int) -> bool:
        """Drop a window, which gets no further event; return whether it was waiting or encoding."""
        for batch in self._batches:
            for window in batch.started:
                if window.job.id == job_id:
                    batch.started.remove(window)
                    self._slots.release(job_id)
                    return True
        return self._waiting.remove(job_id)

    def clear(self) -> None:
        self._waiting.clear()
        for batch in self._batches:
            for window in batch.started:
                self._slots.release(window.job.id)
            batch.stopwatch.seconds()  # wait: until then the device reads the features
        self._batches.clear()

    def begin(self, running: Sequence[SlotJob]) -> list[SlotJob]:
        """Encode queued windows as far as the rules allow; return the windows that start to decode.

        Args:
            running: the windows that decode already, the oldest first.
        """
        if not self._waiting and not self._batches:
            return []
        decoding = [window.job for window in running]
        started = self._encoded(busy=bool(running))
        for _ in range(1 if self.urgent_policy else max(2, self._slots.slots // _SLOTS_PER_BATCH)):
            if not self._waiting or not self._enough_slots(decoding):
                break
            all_running = [*running, *started]
            concurrent = self._concurrent and bool(all_running) and self._has_drafts()
            if concurrent and len(self._batches) >= _MAX_CONCURRENT_BATCHES:
                break
            if not concurrent and not self._may_delay_steps(all_running, decoding):
                break
            self._encode(decoding)
            if not concurrent:
                started += self._start(self._batches.pop())
            if len(self._waiting) < self._slots.free:
                break
        if self._concurrent:
            self._slots.pause(
                {window.job.id for batch in self._batches for window in batch.started}
            )
        return started

    def _encoded(self, busy: bool) -> list[SlotJob]:
        """Start the windows that are encoded; wait for a batch if the device is idle."""
        started: list[SlotJob] = []
        while self._batches and (not (busy or started) or self._batches[0].stopwatch.is_finished):
            started += self._start(self._batches.popleft())
        return started

    def _enough_slots(self, decoding: Sequence[Job]) -> bool:
        """Return whether enough slots are free for the queue, or for one batch of it."""
        return self._count_fitting(decoding) >= min(
            1 if self.urgent_policy else self._batch, len(self._waiting)
        )

    def _may_delay_steps(self, running: Sequence[SlotJob], decoding: Sequence[Job]) -> bool:
        """Return whether the encoder may delay the windows that decode.

        On a GPU it may do so in three cases. As many windows wait as decode: one more window in a
        step costs little. The queue does not fit into the slots: the encoder fills them. No window
        has decoded for longer than the target.
        """
        waiting = len(self._waiting)
        if self.urgent_policy or waiting >= min(len(running), _BACKLOG * self._batch):
            return True
        if self._count_fitting(decoding) < waiting:
            return True
        return time.perf_counter() - running[0].decode_began <= self._decode_target_s

    def _has_drafts(self) -> bool:
        """Return whether the next batch has windows with a draft."""
        return any(job.draft for job in itertools.islice(self._waiting, self._batch))

    def _count_fitting(self, decoding: Sequence[Job]) -> int:
        """Count the queued windows that could start now."""
        if self.urgent_policy:
            return self.urgent_policy.fit(decoding)
        return self._slots.fit(map(rows_of, self._waiting))

    def _encode(self, decoding: Sequence[Job]) -> None:
        """Encode one batch of queued windows and allocate a slot for each."""
        jobs = self._next_batch(self._count_fitting(decoding))
        self._waiting.remove(*(job.id for job in jobs))
        allocations = [self._slots.acquire(job.id, rows_of(job)) for job in jobs]
        features = [job.features for job in jobs]
        if self._streams is None:
            stopwatch = self._launch(features, allocations)
        else:
            # The default stream computes the log-mels, and steps may still read the slots.
            for stream in (torch.cuda.default_stream(self._device), self._streams.steps):
                self._streams.encoder.wait_stream(stream)
            with torch.cuda.stream(self._streams.encoder):
                stopwatch = self._launch(features, allocations)
        started = [
            SlotJob(job, job, allocation, stopwatch)
            for job, allocation in zip(jobs, allocations, strict=True)
        ]
        self._batches.append(_EncoderBatch(started, features, stopwatch))
        self.encode_timers.append(stopwatch)
        self.windows += len(jobs)

    def _next_batch(self, fitting: int) -> list[Job]:
        """Choose the next windows to encode: the first one, and fitting ones of the same length."""
        jobs = list(itertools.islice(self._waiting, fitting))
        frames = [self._encoder.frames_of(job.features.shape[-1]) for job in jobs]
        same_length = [job for job, length in zip(jobs, frames, strict=True) if length == frames[0]]
        return same_length[: self._encoder.batch_of(len(same_length))]

    def _launch(self, features: list[torch.Tensor], allocations: list[SlotAllocation]) -> Stopwatch:
        stopwatch = Stopwatch(self._device, "encode")
        self._encoder.encode(features, [allocation.slot for allocation in allocations])
        stopwatch.stop()
        return stopwatch

    def _start(self, batch: _EncoderBatch) -> list[SlotJob]:
        """Prefill a batch's prompts; on the device, this and later steps wait for the encoder."""
        if not batch.started:
            return []
        began = time.perf_counter()
        for window in batch.started:
            window.decode_began = began
        self.prefill(batch.started, batch.stopwatch)
        return batch.started

    def prefill(self, started: Sequence[SlotJob], encoding: Stopwatch | None = None) -> None:
        """Prefill the prompts of jobs, on the device once their audio is encoded.

        Args:
            started: the jobs.
            encoding: measures the encoding of their audio; None: it has ended.
        """
        writing = Stopwatch(self._device, "prompts")
        self._prefill.write(started)
        writing.stop()
        if encoding is not None and self._streams is not None:
            encoding.delay(self._streams.steps)
        prefilling = Stopwatch(self._device, "prompts")
        self._prefill.start(started)
        prefilling.stop()
        self.decode_timers += (writing, prefilling)
