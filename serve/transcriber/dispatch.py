"""From windows to the runtime's jobs and back, fairly between requests.

Used by the device thread alone. Whoever has had the fewest windows goes first (see `turns`). A
request's first window always finds a slot soon: all other windows together leave a few slots free,
so beside them it never waits for a window of somebody else to end. First windows alone may take
every slot and wait in the runtime for as many again, so that it never waits for work.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from serve.errors import DeviceError, EarshotError
from serve.runtime.protocol import Event, Job, Runtime
from serve.speech.features import WINDOW_SAMPLES, log_mel, upload
from serve.speech.windows import Window
from serve.transcriber.active import ActiveRequest
from serve.transcriber.guard import guarded, runtime_calls
from serve.transcriber.turns import Turns

_MAX_FEATURES_BATCH = 8  # windows whose log-mel is computed in one go
_SLOTS_PER_FREE_ONE = 32  # of so many slots, one is free for first windows; of two or more, one


@dataclasses.dataclass
class DecodingWindow:
    """A window that the runtime has as a job."""

    active: ActiveRequest  # whose window it is
    index: int  # of the window in its request
    job: Job
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled so far


class Dispatcher:
    """Submits windows to a runtime and knows which job is whose.

    Args:
        runtime: called by the thread that calls this.
        mel_filters: float32 (n_mels, 201), of the engine that the runtime executes.
        on_taken: called with a request when a window of it is not waiting any more.
    """

    def __init__(
        self,
        runtime: Runtime,
        mel_filters: torch.Tensor,
        on_taken: Callable[[ActiveRequest], None] = lambda _: None,
    ) -> None:
        self.windows = 0  # submitted for the first time
        self.retries = 0  # submitted again
        self._runtime = runtime
        self._capabilities = runtime.capabilities
        self._device = torch.device(self._capabilities.device)
        self._mel_filters = mel_filters.to(self._device)
        self._on_taken = on_taken
        slots = self._capabilities.max_windows
        self._max_jobs = 2 * slots
        free = max(1, slots // _SLOTS_PER_FREE_ONE)
        self._max_later_jobs = slots - free if slots > 1 else self._max_jobs
        self._ids = itertools.count()
        self._ready: Turns[ActiveRequest] = Turns()  # requests with a window to submit
        self._jobs: dict[int, DecodingWindow] = {}
        self._later_jobs = 0  # of these, not of a request's first window

    @property
    def idle(self) -> bool:
        """Whether the runtime has nothing to do and nothing waits to be submitted."""
        return not self._jobs and not len(self._ready)

    def enqueue(self, active: ActiveRequest) -> None:
        """Give a request its turn if it has a window to submit now."""
        if active.ready and active.id not in self._ready:
            self._ready.add(active.id, active.submitted, active)

    def submit_windows(self) -> list[tuple[ActiveRequest, EarshotError]]:
        """Turn windows into jobs, as many as fit; returns the requests for which that failed.

        Raises:
            DeviceError: the device failed.
        """
        failed: list[tuple[ActiveRequest, EarshotError]] = []
        picked: list[tuple[ActiveRequest, int, Window]] = []
        room = min(self._max_jobs - len(self._jobs), _MAX_FEATURES_BATCH)
        later = self._max_later_jobs - self._later_jobs
        while len(picked) < room:
            active = self._ready.pop(new_only=later <= 0)
            if active is None:
                break
            taken = guarded(f"taking a window of request {active.id}", active.next_window)
            if isinstance(taken, EarshotError):
                failed.append((active, taken))
                continue
            picked.append((active, *taken))
            later -= taken[0] > 0
            self._on_taken(active)
            self.enqueue(active)
        features = self._features([window for _, _, window in picked]) if picked else []
        for (active, index, _), found in zip(picked, features, strict=True):
            error = self._submit_first(active, index, found)
            if error is not None:
                failed.append((active, error))
        return failed

    def retry(self, decoding: DecodingWindow, temperature: float) -> None:
        """Decode a window once more, in the place of its job that has just ended.

        At the same temperature the same tokens are likely, so they are the draft.

        Raises:
            OptionError: the runtime refuses it.
            DeviceError: the device failed.
        """
        job = decoding.job
        draft = tuple(decoding.tokens) if temperature == job.options.temperature else ()
        self._submit(decoding.active, decoding.index, job.features, temperature, draft)
        self.retries += 1

    def record(self, event: Event) -> DecodingWindow | None:
        """Take note of an event; returns the window if it has ended and its request has not."""
        decoding = self._jobs[event.job_id]
        decoding.tokens.extend(event.tokens)
        if event.finished is None:
            return None
        del self._jobs[event.job_id]
        self._later_jobs -= decoding.index > 0
        return None if decoding.active.ended else decoding

    def cancel(self, active: ActiveRequest) -> None:
        """Submit no more windows of a request that has ended, and free the slots that it has.

        Its jobs count until the runtime has confirmed their end.

        Raises:
            DeviceError: the device failed.
        """
        self._ready.remove(active.id)
        if self._capabilities.cancel:
            for job_id, decoding in self._jobs.items():
                if decoding.active is active:
                    with runtime_calls():
                        self._runtime.cancel(job_id)

    def clear(self) -> None:
        """Drop every job: the runtime is broken or about to be closed."""
        self._jobs.clear()
        self._later_jobs = 0
        self._ready.clear()

    def check_invariants(self, pending: set[int]) -> None:
        """Assert what must always hold, given the ids of the pending requests."""
        assert len(self._jobs) <= self._max_jobs
        later = sum(decoding.index > 0 for decoding in self._jobs.values())
        assert later == self._later_jobs <= self._max_later_jobs
        assert all(active.ready and active.id in pending for active in self._ready)
        for decoding in self._jobs.values():
            assert decoding.active.ended != (decoding.active.id in pending)

    def _features(self, windows: list[Window]) -> list[torch.Tensor | EarshotError]:
        """What the runtime takes of each window, or the error that the window's request ends with.

        All windows are computed as one batch; where that fails, each alone shows whose fault it is.
        """
        what = f"computing the features of {len(windows)} windows"
        features = guarded(what, functools.partial(self._compute_features, windows))
        if not isinstance(features, EarshotError):
            return list(features)
        if len(windows) == 1:
            return [features]
        return [alone for window in windows for alone in self._features([window])]

    def _compute_features(self, windows: list[Window]) -> Sequence[torch.Tensor]:
        """Log-mel (n_mels, 3000) of each window, or its samples (n,) if the runtime takes those."""
        if self._capabilities.takes == "samples":
            return [torch.tensor(window.samples) for window in windows]
        # On a GPU the copy need not be waited for: torch reuses pinned memory only after it.
        padded = torch.empty((len(windows), WINDOW_SAMPLES), pin_memory=self._device.type == "cuda")
        for row, window in zip(padded.numpy(), windows, strict=True):
            row[: len(window.samples)] = window.samples
            row[len(window.samples) :] = 0.0
        try:
            return log_mel(upload(padded, self._device), self._mel_filters).unbind()
        except torch.AcceleratorError as error:
            raise DeviceError(f"{self._device} failed: {error}") from error

    def _submit_first(
        self, active: ActiveRequest, index: int, features: torch.Tensor | EarshotError
    ) -> EarshotError | None:
        """Submit a window for the first time; returns the error that its request ends with."""
        if isinstance(features, EarshotError):
            return features
        temperature = active.plan.options.temperature
        work = functools.partial(self._submit, active, index, features, temperature)
        error = guarded(f"submitting window {index} of request {active.id}", work)
        if error is None:
            self.windows += 1
        return error

    def _submit(
        self,
        active: ActiveRequest,
        index: int,
        features: torch.Tensor,
        temperature: float,
        draft: tuple[int, ...] = (),
    ) -> None:
        options = active.options(index, temperature)
        id, urgent = next(self._ids), index == 0
        job = Job(id, features, active.prompt, options, draft, urgent)
        with runtime_calls():
            self._runtime.submit(job)
        self._jobs[job.id] = DecodingWindow(active, index, job)
        self._later_jobs += index > 0
        active.mark_started()
