"""From a request's audio to windows, on worker threads, as far ahead as memory allows."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable

from serve.config import TranscriberConfig
from serve.errors import EarshotError
from serve.messages import Request, Samples
from serve.speech import audio
from serve.speech.windows import Window, cut
from serve.transcriber.active import ActiveRequest
from serve.transcriber.guard import guarded

# Decoding pauses when the decoded audio in memory lasts this many times the longest allowed.
_MAX_HELD_AUDIOS = 4


class Intake:
    """Decodes requests in order of arrival. Thread-safe.

    Undecoded audio is small and decoded audio is not (an hour is 230 MB), so decoding pauses while
    the decoded audio of pending requests exceeds a bound.

    Args:
        config: number of workers and the longest audio.
        on_windows: called on a worker with a request's windows; must not block.
        on_error: called on a worker if there are none; must not block.
        prepare: called on a worker before a request's audio is decoded; may raise an EarshotError.
    """

    def __init__(
        self,
        config: TranscriberConfig,
        on_windows: Callable[[ActiveRequest, list[Window]], None],
        on_error: Callable[[ActiveRequest, EarshotError], None],
        prepare: Callable[[ActiveRequest, Request], None],
    ) -> None:
        self._max_audio_s = config.max_audio_s
        self._prepare = prepare
        self._on_windows = on_windows
        self._on_error = on_error
        self._workers = concurrent.futures.ThreadPoolExecutor(
            config.decode_workers, thread_name_prefix="earshot-decode"
        )
        # Guarded by the lock.
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[ActiveRequest, Request]] = {}
        # Seconds of decoded audio by request id; 0 from when a worker takes the request.
        self._held_s: dict[int, float] = {}
        self._closed = False

    def add(self, active: ActiveRequest, request: Request) -> None:
        """Decode a request's audio when its turn comes; returns at once.

        After `close` the request gets no call back.
        """
        with self._lock:
            self._waiting[active.id] = (active, request)
            self._wake()

    def release(self, active: ActiveRequest) -> None:
        """A request has ended: drop its audio, and let others use the memory."""
        with self._lock:
            self._waiting.pop(active.id, None)
            self._held_s.pop(active.id, None)
            self._wake()

    def close(self) -> None:
        """Let the workers finish the requests that they have begun, and begin no others."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._workers.shutdown(wait=False)

    def held_ids(self) -> set[int]:
        """Ids of the requests whose audio is kept here, decoded or not."""
        with self._lock:
            return self._waiting.keys() | self._held_s.keys()

    def _wake(self) -> None:
        """Get a worker to look; the lock is held."""
        if self._waiting and not self._closed:
            self._workers.submit(self._work)

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            active, request = entry
            what = f"decoding the audio of request {active.id}"
            windows = guarded(what, functools.partial(self._windows, active, request))
            if isinstance(windows, EarshotError):
                self._on_error(active, windows)
            else:
                self._on_windows(active, windows)

    def _next(self) -> tuple[ActiveRequest, Request] | None:
        with self._lock:
            full = sum(self._held_s.values()) >= _MAX_HELD_AUDIOS * self._max_audio_s
            if full or not self._waiting:
                return None
            id, entry = next(iter(self._waiting.items()))
            del self._waiting[id]
            self._held_s[id] = 0.0
            return entry

    def _windows(self, active: ActiveRequest, request: Request) -> list[Window]:
        self._prepare(active, request)
        windows = cut(self._samples(request))
        duration_s = sum(window.duration_s for window in windows)
        with self._lock:
            if active.id in self._held_s:  # else it ended meanwhile
                self._held_s[active.id] = duration_s
        return windows

    def _samples(self, request: Request) -> Samples:
        """Float32 (n,), 16 kHz mono."""
        if isinstance(request.audio, bytes):
            return audio.decode(request.audio, self._max_audio_s)
        assert request.sample_rate is not None  # `plan_request` has refused it
        return audio.from_samples(request.audio, request.sample_rate, self._max_audio_s)
