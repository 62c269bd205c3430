"""Decode requests' audio to windows on worker threads, slightly ahead of the device.

A worker decodes one window of a request, then takes the next request in the queue. An hour of audio
therefore neither blocks short requests nor occupies memory. A request has at most `LOOK_AHEAD`
decoded windows that are not submitted yet. All requests together have at most `_AHEAD_PER_SLOT` per
slot; a request's first window does not count.

For diarization the audio is decoded a second time, block by block, so that hours of audio never
occupy memory.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator

from serve.contract.config import TranscriberConfig
from serve.contract.errors import AudioError, ChannelError, EarshotError, RequestError
from serve.contract.messages import AudioFile, Request, Samples
from serve.speakers.diarize import REFERENCE_S, Diarizer, KnownSpeaker, SpeakerTurn
from serve.speech import audio, cutting, vad
from serve.speech.meter import AudioLimits
from serve.speech.sandbox import client as sandbox
from serve.speech.windows import AudioWindow
from serve.transcriber.active import ActiveRequest
from serve.transcriber.decoding_plan import audio_bytes
from serve.transcriber.dispatch import NOT_SERVED, FairQueue, rank_of
from serve.transcriber.guard import guarded

LOOK_AHEAD = 4  # maximum number of a request's windows decoded but not submitted
# Maximum decoded samples of a request's audio, all channels. An hour of 192 kHz stereo has 1,382
# million.
MAX_SAMPLES = 1.5e9
MAX_DECODE_S = 60.0  # maximum CPU time of decoding a request's audio, without VAD
_AHEAD_PER_SLOT = 2  # maximum windows ahead per slot, all requests, without first windows


@dataclasses.dataclass(eq=False)
class _AudioTask:
    """A request in decoding; the pool's lock guards all fields but `windows`."""

    active: ActiveRequest
    size: int  # bytes of the audio as the client sent it
    # Holds the request's audio until it is closed; owned by a worker while `working`.
    windows: Generator[AudioWindow | None, None, None] = dataclasses.field(init=False)
    n_started: int = 0  # windows that are decoded or in decoding
    working: bool = False  # a worker decodes or frees the audio
    all_decoded: bool = False
    request_ended: bool = False

    @property
    def n_buffered(self) -> int:
        """The number of windows in memory, which are not submitted yet."""
        return self.n_started - self.active.submitted

    @property
    def n_buffered_ahead(self) -> int:
        """The number of buffered windows that count towards the limit of all requests."""
        return self.n_buffered - (self.n_started > 0 and self.active.submitted == 0)


class AudioDecoderPool:
    """A pool of workers that decode requests' audio. Thread-safe.

    Args:
        config: the number of workers and the limits of a request's audio.
        slots: the number of windows that the device decodes at the same time.
        on_window: called on a worker with each window of a request, in order; must not block. A
            window with `voice_pending` comes again with its speech.
        on_error: called on a worker if the audio is invalid, possibly after some windows;
            must not block.
        prepare: called on a worker before a request's audio is decoded; may raise an EarshotError.
        device: the device of the diarization networks, such as "cpu" or "cuda:0".
    """

    def __init__(
        self,
        config: TranscriberConfig,
        slots: int,
        on_window: Callable[[ActiveRequest, AudioWindow], None],
        on_error: Callable[[ActiveRequest, EarshotError], None],
        prepare: Callable[[ActiveRequest], None],
        device: str = "cpu",
    ) -> None:
        self._device = device
        self._limits = AudioLimits(config.max_audio_s, MAX_SAMPLES, MAX_DECODE_S)
        self._on_window = on_window
        self._on_error = on_error
        self._prepare = prepare
        self._max_ahead = _AHEAD_PER_SLOT * slots
        self._n_workers = config.decode_workers
        sandbox.start()  # before the first request, which would wait for it
        self._workers = concurrent.futures.ThreadPoolExecutor(
            config.decode_workers, thread_name_prefix="earshot-decode"
        )
        # Guarded by the lock.
        self._lock = threading.Lock()
        self.working = 0  # active workers
        self._tasks: dict[int, _AudioTask] = {}  # pending requests by id
        self._waiting: FairQueue[_AudioTask] = FairQueue()  # requests that may be decoded further
        self._closed = False

    def add(self, active: ActiveRequest, request: Request) -> None:
        """Queue a request's audio for decoding; returns at once.

        After `close` the request gets no callbacks.
        """
        task = _AudioTask(active, audio_bytes(request))
        task.windows = self._windows(active, request, lambda: task.request_ended)
        with self._lock:
            if self._closed or active.ended:
                return
            self._tasks[active.id] = task
            self._queue_if_allowed(task)

    def mark_submitted(self, active: ActiveRequest) -> None:
        """Decode the next window of a request, if allowed, since one was submitted."""
        with self._lock:
            if (task := self._tasks.get(active.id)) is not None:
                self._queue_if_allowed(task)

    def release(self, active: ActiveRequest) -> None:
        """Stop decoding a request that has ended, and drop its audio."""
        with self._lock:
            if (task := self._tasks.pop(active.id, None)) is None:
                return
            self._waiting.remove(active.id)
            must_free = self._give_up(task)
            self._wake()
        if must_free:
            task.windows.close()

    def close(self) -> None:
        """Stop the workers at their next block, and start no more work."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            to_free = list(filter(self._give_up, self._tasks.values()))
        for task in to_free:
            task.windows.close()
        self._workers.shutdown(wait=False)

    def diarize(self, active: ActiveRequest, request: Request) -> tuple[SpeakerTurn, ...]:
        """Return the speaker turns of a request; only one thread at a time may call this.

        Raises:
            EarshotError: the audio or a reference is invalid, or the request was cancelled.
        """
        speakers = active.plan.speakers
        assert speakers is not None
        known = [KnownSpeaker(name, _reference(name, file)) for name, file in speakers.known]
        with contextlib.closing(self._blocks(active, request, lambda: active.ended)) as samples:
            return self._diarizer.diarize(
                samples,
                min_speakers=speakers.min_count,
                max_speakers=speakers.max_count,
                known=known,
            )

    @functools.cached_property
    def _diarizer(self) -> Diarizer:
        """The networks, which are loaded for the first request that needs them."""
        return Diarizer(self._device)

    @staticmethod
    def _give_up(task: _AudioTask) -> bool:
        """Mark a request as ended; return whether the caller must free its audio.

        The lock is held. If a worker is decoding the request, that worker frees the audio when its
        step ends.
        """
        must_free = not (task.working or task.request_ended)
        task.request_ended = True
        return must_free

    def _windows(
        self, active: ActiveRequest, request: Request, stopped: Callable[[], bool]
    ) -> Generator[AudioWindow | None, None, None]:
        """Decode and cut a request's audio, one window at a time.

        Yields None if a block of audio completed no window, so that workers can switch requests.
        """
        self._prepare(active)
        if not active.plan.channels:
            with contextlib.closing(self._blocks(active, request, stopped)) as blocks:
                yield from self._cut(active, blocks)
            return
        # Each window is yielded after the next one, because only the last one may have `last` set.
        previous: AudioWindow | None = None
        for channel in itertools.count():
            with contextlib.closing(self._blocks(active, request, stopped, channel)) as blocks:
                try:
                    first = next(blocks)
                except ChannelError:
                    break
                for window in self._cut(active, itertools.chain([first], blocks)):
                    if window is None:
                        yield None
                        continue
                    if previous is not None:
                        yield dataclasses.replace(previous, last=False)
                    previous = dataclasses.replace(window, channel=channel)
        yield previous

    def _blocks(
        self,
        active: ActiveRequest,
        request: Request,
        stopped: Callable[[], bool],
        channel: int = -1,
    ) -> Generator[Samples, None, None]:
        """Decode a request's audio, one channel or the mix of all; see `serve.speech.audio`."""
        if isinstance(request.audio, bytes | AudioFile):
            limits = dataclasses.replace(
                self._limits,
                partial=active.plan.request.partial,
                channel=channel,
                track=active.plan.request.audio_track or "",
            )
            return audio.decode(request.audio, limits, stopped, active.warn)
        assert request.sample_rate is not None  # `plan_request` has refused it
        return audio.from_samples(request.audio, request.sample_rate, self._limits, stopped)

    def _cut(
        self, active: ActiveRequest, blocks: Iterator[Samples]
    ) -> Iterator[AudioWindow | None]:
        """Yield the windows of a request's audio or of one channel."""
        bandwidth, cut = cutting.Bandwidth(), self._cut_function(active)
        monitored = bandwidth.watch(blocks)
        intervals = active.plan.intervals
        windows = cutting.cut_intervals(monitored, intervals, cut) if intervals else cut(monitored)
        for window in windows:
            if window is not None and window.last and (text := bandwidth.warning()):
                active.warn(text)
            narrow = window is not None and bandwidth.narrow
            yield dataclasses.replace(window, narrow=True) if window and narrow else window

    def _cut_function(self, active: ActiveRequest) -> cutting.CutFunction:
        """Return the function that cuts a request's audio into windows."""
        plan = active.plan

        def new_filter() -> vad.SpeechFilter:
            return vad.SpeechFilter(plan.speech, vad.VadModel())

        if plan.vad == "on":
            return lambda blocks: cutting.pack(blocks, new_filter())
        if plan.vad == "off" and plan.voice:
            return functools.partial(cutting.cut_with_voice, voice=plan.voice)
        # On a CPU, the search and the decoding would compete for the cores.
        early = self._device != "cpu" and not (plan.intervals or plan.channels)
        return lambda blocks: cutting.cut_long(
            blocks, new_filter(), keep_silence=plan.vad == "off", early=early
        )

    def _queue_if_allowed(self, task: _AudioTask) -> None:
        """Queue a request if it may be decoded further; the lock is held."""
        waits = task.working or task.active.id in self._waiting
        if not (waits or task.all_decoded or task.n_buffered >= LOOK_AHEAD):
            # In MiB, so that files of like sizes go in order of arrival, as windows do.
            rank = rank_of(task.active.priority, task.n_started, task.size >> 20)
            self._waiting.add(task.active.id, rank, task)
        self._wake()

    def _wake(self) -> None:
        """Start a worker if there is work and a free one; the lock is held."""
        if len(self._waiting) and self.working < self._n_workers and not self._closed:
            self.working += 1
            self._workers.submit(self._work)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            active = task.active
            description = f"decoding the audio of request {active.id}"
            began_s = time.monotonic()
            window = guarded(description, functools.partial(next, task.windows))
            active.phases.record("decode", began_s, int(isinstance(window, AudioWindow)))
            # Report before queueing again: else another worker might report the next window first.
            self._report(task, window)
            pending = isinstance(window, AudioWindow) and window.voice_pending
            if pending and not task.request_ended:
                began_s = time.monotonic()
                heard = guarded(description, functools.partial(next, task.windows))
                active.phases.record("decode", began_s, 0)
                self._report(task, heard)
            self._requeue(task, window)

    def _report(self, task: _AudioTask, window: AudioWindow | EarshotError | None) -> None:
        if task.request_ended or window is None:
            return
        if isinstance(window, EarshotError):
            self._on_error(task.active, window)
        else:
            self._on_window(task.active, window)

    def _next(self) -> _AudioTask | None:
        with self._lock:
            n_buffered = sum(task.n_buffered_ahead for task in self._tasks.values())
            full = n_buffered >= self._max_ahead
            task = self._waiting.pop(below=NOT_SERVED if full else None)
            if task is None:
                self.working -= 1
                return None
            task.working = True
            task.n_started += 1
            return task

    def _requeue(self, task: _AudioTask, window: AudioWindow | EarshotError | None) -> None:
        """Queue a request again after a worker's step, or free its audio at the end."""
        with self._lock:
            # A window without samples, as of a silent channel, is never submitted.
            if window is None or (isinstance(window, AudioWindow) and not len(window.samples)):
                task.n_started -= 1
            if window is not None:
                task.all_decoded = isinstance(window, EarshotError) or window.last
            # True: this worker frees the audio below, and no other takes the request.
            task.working = task.request_ended or task.all_decoded
            if not task.request_ended:
                self._queue_if_allowed(task)
        if task.working:
            task.windows.close()


def _reference(name: str, file: bytes) -> Samples:
    """Decode a known speaker's reference audio.

    Raises:
        RequestError: the file is not audio, or is too long.
    """
    try:
        return audio.join_blocks(audio.decode(file, AudioLimits(REFERENCE_S[1])))
    except AudioError as error:
        raise RequestError(f"the reference of {name}: {error}") from error
