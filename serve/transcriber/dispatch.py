"""From windows to the runtime's jobs and back, fairly between requests.

Used by the device thread alone. The runtime holds at most twice the windows that it can decode at
the same time, so that it never waits for work and yet an hour of audio does not stand before a
short request: whenever a job ends, each request in turn hands out one window.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch

from serve.engine import Dims
from serve.errors import DeviceError, EarshotError
from serve.runtime.protocol import Event, Job, Runtime
from serve.speech.features import WINDOW_SAMPLES, log_mel, upload
from serve.speech.windows import Window
from serve.transcriber.guard import guarded, runtime_calls
from serve.transcriber.inflight import InFlight

_FEATURES_BATCH = 8  # most windows whose log-mel is computed in one turn


@dataclasses.dataclass
class Running:
    """A job in the runtime."""

    flight: InFlight
    index: int  # of its window
    job: Job
    tokens: list[int] = dataclasses.field(default_factory=list)


class Dispatcher:
    """Hands windows to a runtime and knows which job is whose.

    Args:
        runtime: called by the thread that calls this.
        dims: for the number of mel bins.
    """

    def __init__(self, runtime: Runtime, dims: Dims) -> None:
        self.windows = 0  # handed out for the first time
        self.retries = 0
        self._runtime = runtime
        self._capabilities = runtime.capabilities
        self._device = torch.device(self._capabilities.device)
        self._n_mels = dims.n_mels
        self._most_jobs = 2 * self._capabilities.max_windows
        self._ids = itertools.count()
        self._ready: collections.deque[InFlight] = collections.deque()  # have windows to hand out
        self._jobs: dict[int, Running] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is in the runtime and nothing could be."""
        return not self._jobs and not self._ready

    def enqueue(self, flight: InFlight) -> None:
        """A request has windows to hand out."""
        if flight not in self._ready:
            self._ready.append(flight)

    def hand_out(self) -> list[tuple[InFlight, EarshotError]]:
        """Turn windows into jobs, as many as fit; returns the requests for which that failed.

        Raises:
            DeviceError: the device failed.
        """
        failed: list[tuple[InFlight, EarshotError]] = []
        picked: list[tuple[InFlight, int, Window]] = []
        room = min(self._most_jobs - len(self._jobs), _FEATURES_BATCH)
        while self._ready and len(picked) < room:
            flight = self._ready.popleft()
            taken = guarded(f"taking a window of request {flight.id}", flight.take_window)
            if isinstance(taken, EarshotError):
                failed.append((flight, taken))
                continue
            picked.append((flight, *taken))
            if flight.ready:
                self._ready.append(flight)
        features = self._features([window for _, _, window in picked]) if picked else []
        for (flight, index, _), found in zip(picked, features, strict=True):
            error = self._first_job(flight, index, found)
            if error is not None:
                failed.append((flight, error))
        return failed

    def _first_job(
        self, flight: InFlight, index: int, features: torch.Tensor | EarshotError
    ) -> EarshotError | None:
        """Submit a window for the first time; returns what its request must end with, if so."""
        if isinstance(features, EarshotError):
            return features
        temperature = flight.plan.options.temperature
        work = functools.partial(self._submit, flight, index, features, temperature)
        error = guarded(f"submitting window {index} of request {flight.id}", work)
        if error is None:
            self.windows += 1
        return error

    def retry(self, running: Running, temperature: float) -> None:
        """Decode a window once more, in the place of its job that has just ended.

        Raises:
            OptionError: the runtime refuses it.
            DeviceError: the device failed.
        """
        self._submit(running.flight, running.index, running.job.features, temperature)
        self.retries += 1

    def take(self, event: Event) -> Running | None:
        """Note an event; returns the job if it has ended and its request has not."""
        running = self._jobs[event.job_id]
        running.tokens.extend(event.tokens)
        if event.finished is None:
            return None
        del self._jobs[event.job_id]
        return None if running.flight.ended else running

    def withdraw(self, flight: InFlight) -> None:
        """A request has ended: hand out nothing more, and free the slots that it has.

        Its jobs count until the runtime has confirmed their end.
        """
        if flight in self._ready:
            self._ready.remove(flight)
        if self._capabilities.cancel:
            for job_id, running in self._jobs.items():
                if running.flight is flight:
                    with runtime_calls():
                        self._runtime.cancel(job_id)

    def clear(self) -> None:
        """Forget every job: the runtime is broken or about to be closed."""
        self._jobs.clear()
        self._ready.clear()

    def check(self, pending: set[int]) -> None:
        """Assert what must always hold, given the ids of the pending requests."""
        assert len(self._jobs) <= self._most_jobs
        assert len(set(self._ready)) == len(self._ready)
        assert all(flight.ready and flight.id in pending for flight in self._ready)
        for running in self._jobs.values():
            assert running.flight.ended != (running.flight.id in pending)

    def _features(self, windows: list[Window]) -> list[torch.Tensor | EarshotError]:
        """What the runtime takes of each window, or the error that the window ended with."""
        what = f"computing the features of {len(windows)} windows"
        features = guarded(what, functools.partial(self._compute_features, windows))
        if not isinstance(features, EarshotError):
            return list(features)
        if len(windows) == 1:
            return [features]
        # Which window is to blame shows when each is alone.
        return [alone for window in windows for alone in self._features([window])]

    def _compute_features(self, windows: list[Window]) -> Sequence[torch.Tensor]:
        """Log-mel where the runtime wants it, or the samples."""
        if self._capabilities.takes == "samples":
            return [torch.tensor(window.samples) for window in windows]
        # On a GPU the copy need not be waited for: torch reuses pinned memory only after it.
        padded = torch.empty((len(windows), WINDOW_SAMPLES), pin_memory=self._device.type == "cuda")
        for row, window in zip(padded.numpy(), windows, strict=True):
            row[: len(window.samples)] = window.samples
            row[len(window.samples) :] = 0.0
        try:
            return log_mel(upload(padded, self._device), self._n_mels).unbind()
        except torch.AcceleratorError as error:
            raise DeviceError(f"{self._device}: {error}") from error

    def _submit(
        self, flight: InFlight, index: int, features: torch.Tensor, temperature: float
    ) -> None:
        options = flight.options(index, temperature)
        job = Job(next(self._ids), features, flight.prompt, options)
        with runtime_calls():
            self._runtime.submit(job)
        self._jobs[job.id] = Running(flight, index, job)
        flight.started()
