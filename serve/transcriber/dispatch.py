"""Schedule windows onto the runtime, and match its events to requests.

Only the device thread uses `Dispatcher`. Requests are ranked by least attained service (see
`FairQueue`). Single-window requests are urgent and go first. To keep slots free for them, the
number of other windows in the runtime is limited, to a few less than the slots. If the runtime
itself runs urgent windows first, the limit is 1.5 times the slots, so that the encoder still gets
full batches. With fewer than `_MIN_SLOTS` slots there is no such limit. All windows in the runtime
together are at most twice the slots. For `_STREAMING_S` after the last live request only live text
is urgent.
"""

import dataclasses
import functools
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from serve.contract.errors import DeviceError, EarshotError, OptionError, shown
from serve.contract.messages import Priority
from serve.runtime.protocol import Capabilities, Job, JobEvent, Runtime
from serve.speech.features import HOP_LENGTH, SAMPLE_RATE, LogMel, with_silence
from serve.speech.windows import AudioWindow
from serve.transcriber.active import WINDOW_LENGTHS, ActiveRequest
from serve.transcriber.guard import guarded

logger = logging.getLogger(__name__)

T = TypeVar("T")
Rank = tuple[int, ...]

NOT_SERVED: Rank = (1,)  # upper bound of the ranks of items without service so far
LIVE_NOT_SERVED: Rank = (0, True)  # upper bound of the ranks of live text without service so far
_JOBS: Rank = (1_000_000,)  # jobs have this rank or a higher one
_LONGEST_WAIT_EVERY = 4
_JOBS_EVERY = 16
_MAX_STALE = 64  # minimum number of stale entries at which a queue's heap is rebuilt
_MAX_SUBMITTED = 8  # maximum windows submitted between two polls, so that events do not wait long
_STREAMING_S = 5.0  # after a live request, more are expected for this time
_SLOTS_PER_FREE_ONE = 32  # one of this many slots stays free for urgent windows, and at least one
# Windows whose lengths lie in the same step go in order of arrival. If the shortest always went
# first, windows of 30 s would wait several times as long as the others on a busy device.
_SIZE_STEP = 15 * SAMPLE_RATE
_MIN_SLOTS = 4  # with fewer slots, an empty one costs too much


def rank_of(priority: Priority, n_windows: int, size: int) -> Rank:
    """Return the rank of a request.

    Args:
        priority: the request's priority.
        n_windows: the number of the request's windows that were served.
        size: the size of the request's next piece of work, in any unit.
    """
    if priority == "job":
        return (_JOBS[0] + n_windows, size)
    return (n_windows, priority != "live", size)


class FairQueue(Generic[T]):
    """A queue of items by id, ordered by least attained service. Not thread-safe.

    The item with the lowest rank goes next. A rank starts with the service that the item has had so
    far. Among equals live text goes first, then the smallest item. Short requests are thus answered
    as if there were no long ones. A stream of short requests would starve long ones, so every
    fourth pop takes the item that has waited longest: a request among n others waits at most 4 n
    pops. Batch jobs rank behind all other requests and get every sixteenth pop.
    """

    def __init__(self) -> None:
        self._pops = 0
        self._waiting: dict[int, tuple[Rank, T]] = {}  # in order of arrival
        # A heap of ranks and ids, because a full queue is popped hundreds of times a second. Items
        # that were taken or removed leave stale entries. `pop` drops them when they come first.
        self._by_rank: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def add(self, id: int, rank: Rank, item: T) -> None:
        """Queue an item that is not queued yet.

        Args:
            id: the item's id; ids grow with arrival, and the lower one wins between equal ranks.
            rank: the lowest rank goes first.
            item: the value that `pop` returns.
        """
        assert id not in self._waiting, f"{id} is queued already"
        self._waiting[id] = (rank, item)
        heapq.heappush(self._by_rank, (rank, id))
        if len(self._by_rank) > 2 * len(self._waiting) + _MAX_STALE:
            self._by_rank = [(rank, id) for id, (rank, _) in self._waiting.items()]
            heapq.heapify(self._by_rank)

    def remove(self, id: int) -> None:
        """Remove an item; unknown ids are ignored."""
        self._waiting.pop(id, None)

    def clear(self) -> None:
        self._waiting.clear()
        self._by_rank.clear()

    def pop(self, *, below: Rank | None = None) -> T | None:
        """Remove and return the next item; None if no item is eligible.

        Args:
            below: only items of a lower rank are eligible, and the longest wait does not count.
        """
        while self._by_rank and self._is_stale(*self._by_rank[0]):
            heapq.heappop(self._by_rank)
        if not self._by_rank:
            return None
        rank, id = self._by_rank[0]
        if below is not None and rank >= below:
            return None
        self._pops += 1
        if below is None and self._pops % _LONGEST_WAIT_EVERY == 0:
            # Every sixteenth pop prefers jobs, the others prefer requests that are not jobs.
            prefers_jobs = self._pops % _JOBS_EVERY == 0
            id = max(self._waiting, key=lambda id: (self._waiting[id][0] >= _JOBS) == prefers_jobs)
        return self._waiting.pop(id)[1]

    def _is_stale(self, rank: Rank, id: int) -> bool:
        """Return whether an entry's item was taken, removed, or queued again at another rank."""
        return id not in self._waiting or self._waiting[id][0] != rank


@dataclasses.dataclass
class DecodingWindow:
    """A window that was submitted to the runtime as a job."""

    active: ActiveRequest
    index: int  # the window's index in its request
    job: Job
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled so far


class Dispatcher:
    """A scheduler that submits windows to a runtime and maps its jobs to requests.

    Args:
        runtime: the runtime; it is called on the caller's thread.
        mel_filters: float32 (n_mels, 201), from the engine that the runtime executes.
        on_dequeued: called with a request when a window of it has left the queue.
    """

    def __init__(
        self,
        runtime: Runtime,
        mel_filters: torch.Tensor,
        on_dequeued: Callable[[ActiveRequest], None] = lambda _: None,
    ) -> None:
        self.windows = 0  # windows submitted for the first time
        self.retries = 0  # windows submitted again
        self.loops = 0  # jobs ended because their text repeated itself
        self._runtime = runtime
        self._capabilities = runtime.capabilities
        self._device = torch.device(self._capabilities.device)
        self._takes_samples = self._capabilities.input_kind == "samples"
        if not self._takes_samples:
            self._log_mel = LogMel(mel_filters, self._device, WINDOW_LENGTHS)
        self._on_dequeued = on_dequeued
        slots = self._capabilities.max_windows
        self._max_jobs = 2 * slots
        self._max_long_jobs = _max_long_jobs(self._capabilities)
        self._ids = itertools.count()
        self._ready: FairQueue[ActiveRequest] = FairQueue()  # requests with a window to submit
        self._jobs: dict[int, DecodingWindow] = {}
        self._long_jobs = 0  # jobs that are not urgent
        self._live_s = -math.inf  # monotonic time of the last live request

    @property
    def idle(self) -> bool:
        """Whether no job is running and no request is queued."""
        return not self._jobs and not len(self._ready)

    def enqueue(self, active: ActiveRequest) -> None:
        """Queue a request if it has a window to submit now."""
        if active.priority == "live":
            self._live_s = time.monotonic()
        if active.ready and active.id not in self._ready:
            # A request of several windows ranks as if one window were served already.
            n_windows = 0 if active.is_short else 1 + active.submitted
            rank = rank_of(active.priority, n_windows, active.next_samples // _SIZE_STEP)
            self._ready.add(active.id, rank, active)

    def submit_windows(self) -> list[tuple[ActiveRequest, EarshotError]]:
        """Submit as many windows as fit; return the requests that could not be submitted.

        Raises:
            DeviceError: the device failed.
        """
        failed: list[tuple[ActiveRequest, EarshotError]] = []
        streaming = time.monotonic() - self._live_s < _STREAMING_S
        urgent_only = LIVE_NOT_SERVED if streaming else NOT_SERVED
        for _ in range(min(self._max_jobs - len(self._jobs), _MAX_SUBMITTED)):
            full = self._long_jobs >= self._max_long_jobs
            active = self._ready.pop(below=urgent_only if full else None)
            if active is None:
                break
            description = f"submitting a window of request {active.id}"
            error = guarded(description, functools.partial(self._submit_next, active, streaming))
            if error is None:
                self.windows += 1
            else:
                failed.append((active, error))
        return failed

    def retry(self, decoding: DecodingWindow, temperature: float) -> None:
        """Submit a window again after its job has ended.

        A retry at the same temperature has one of two reasons. If the encoder saw a shortened
        window, it now sees a whole one. If the job was ended as a loop, the retry continues it: its
        tokens are the draft.

        Raises:
            OptionError: the runtime rejects the job.
            DeviceError: the device failed.
        """
        job = decoding.job
        active, index = decoding.active, decoding.index
        frames = active.encoder_frames(index)
        features = job.features if self._takes_samples else with_silence(job.features, frames)
        restarts = temperature != job.options.temperature or frames != job.frames
        draft = () if restarts else tuple(decoding.tokens)
        self._submit(active, index, features, temperature, job.urgent, draft, stop_loops=restarts)
        self.retries += 1

    def record(self, event: JobEvent) -> DecodingWindow | None:
        """Record an event; return its window if the window has ended and the request has not."""
        decoding = self._jobs[event.job_id]
        decoding.tokens.extend(event.tokens)
        decoding.active.mark_started(event.began_s)
        self.loops += event.finished == "loop"
        if event.finished is None:
            return None
        del self._jobs[event.job_id]
        self._long_jobs -= not decoding.job.urgent
        return None if decoding.active.ended else decoding

    def cancel(self, active: ActiveRequest) -> None:
        """Remove a request that has ended from the queue, and cancel its jobs.

        The jobs count until the runtime has confirmed their end.
        """
        self._ready.remove(active.id)
        for job_id, decoding in self._jobs.items():
            if decoding.active is active:
                self._runtime.cancel(job_id)

    def clear(self) -> None:
        """Drop all jobs and queued requests; the runtime has failed or is about to be closed."""
        self._jobs.clear()
        self._long_jobs = 0
        self._ready.clear()

    def _submit_next(self, active: ActiveRequest, streaming: bool) -> None:
        """Submit the next window of a request.

        Args:
            active: a request that is ready.
            streaming: see `_is_urgent`.

        Raises:
            EarshotError: the runtime rejects the window.
            DeviceError: the device failed.
        """
        index, window = active.next_window()
        self._on_dequeued(active)
        self.enqueue(active)
        features = self._features(window, active.encoder_frames(index))
        urgent = _is_urgent(active, index, window, streaming)
        draft = tuple(active.plan.request.draft) if index == 0 else ()
        self._submit(active, index, features, active.plan.options.temperature, urgent, draft)

    def _features(self, window: AudioWindow, frames: int) -> torch.Tensor:
        """Compute the log-mel (n_mels, frames), or return samples (n,) if the runtime takes those.

        Raises:
            DeviceError: the device failed.
        """
        samples = torch.from_numpy(window.samples)
        if self._takes_samples:
            return samples
        try:
            return self._log_mel(samples, frames * HOP_LENGTH)
        except torch.AcceleratorError as error:
            raise DeviceError(f"{self._device} failed: {error}") from error

    def _submit(
        self,
        active: ActiveRequest,
        index: int,
        features: torch.Tensor,
        temperature: float,
        urgent: bool,
        draft: tuple[int, ...],
        stop_loops: bool = True,
    ) -> None:
        job = active.job(next(self._ids), index, features, temperature, urgent, draft, stop_loops)
        try:
            self._runtime.submit(job)
        except (OptionError, DeviceError):  # the runtime rejects one job, or has failed
            raise
        except Exception as error:
            logger.exception("the runtime failed")
            raise DeviceError(f"internal error: {shown(error)}") from error
        self._jobs[job.id] = DecodingWindow(active, index, job)
        self._long_jobs += not urgent
        if not (self._capabilities.reports_begin or self._capabilities.streaming):
            active.mark_started()  # this runtime sends no event before the window's end


def _max_long_jobs(capabilities: Capabilities) -> int:
    """Return the maximum number of non-urgent windows in the runtime."""
    slots = capabilities.max_windows
    if slots < _MIN_SLOTS:
        return 2 * slots
    if capabilities.urgent_first:
        return slots + slots // 2
    return slots - max(1, slots // _SLOTS_PER_FREE_ONE)


def _is_urgent(active: ActiveRequest, index: int, window: AudioWindow, streaming: bool) -> bool:
    """Return whether a window is urgent: the only window of a live request or a file.

    While clients stream, only live text is urgent, because short files would occupy the slots
    that live text needs.
    Jobs are never urgent.
    """
    is_only = index == 0 and window.last
    return is_only and (active.priority == "live" or (active.priority == "file" and not streaming))
