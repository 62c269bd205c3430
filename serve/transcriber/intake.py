"""From a request's audio to windows, in worker threads, as far ahead as memory allows."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable

from serve.config import TranscriberConfig
from serve.errors import EarshotError
from serve.messages import Request, Samples
from serve.speech import audio
from serve.speech.windows import Window, cut
from serve.transcriber.guard import guarded
from serve.transcriber.inflight import InFlight

_HELD_AUDIOS = 4  # decoded audio in memory is at most about this many of the longest allowed


class Intake:
    """Decodes requests in order of arrival. Thread-safe.

    Undecoded audio is small and decoded audio is not (an hour is 230 MB), so decoding pauses while
    the decoded audio of pending requests exceeds a bound.

    Args:
        config: number of workers and the longest audio.
        on_windows: called on a worker with a request's windows; must not block.
        on_error: called on a worker if there are none; must not block.
    """

    def __init__(
        self,
        config: TranscriberConfig,
        on_windows: Callable[[InFlight, list[Window]], None],
        on_error: Callable[[InFlight, EarshotError], None],
    ) -> None:
        self._max_audio_s = config.max_audio_s
        self._on_windows = on_windows
        self._on_error = on_error
        self._workers = concurrent.futures.ThreadPoolExecutor(
            config.decode_workers, thread_name_prefix="earshot-decode"
        )
        # Guarded by the lock.
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[InFlight, Request]] = {}
        self._held_s: dict[int, float] = {}  # request -> decoded seconds; 0 while it is decoded
        self._closed = False

    def add(self, flight: InFlight, request: Request) -> None:
        """Decode a request's audio when its turn comes; returns at once.

        After `close` the request gets no call back.
        """
        with self._lock:
            self._waiting[flight.id] = (flight, request)
            self._wake()

    def forget(self, flight: InFlight) -> None:
        """A request has ended: drop its audio, and let others use the memory."""
        with self._lock:
            self._waiting.pop(flight.id, None)
            self._held_s.pop(flight.id, None)
            self._wake()

    def close(self) -> None:
        """Stop the workers after what they are at; nothing more is called back for the rest."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._workers.shutdown(wait=False)

    def known(self) -> set[int]:
        """Ids of the requests whose audio is kept here, decoded or not."""
        with self._lock:
            return self._waiting.keys() | self._held_s.keys()

    def _wake(self) -> None:
        """Get a worker to look; the lock is held."""
        if self._waiting and not self._closed:
            self._workers.submit(self._work)

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            flight, request = entry
            what = f"decoding the audio of request {flight.id}"
            windows = guarded(what, functools.partial(self._windows, flight, request))
            if isinstance(windows, EarshotError):
                self._on_error(flight, windows)
            else:
                self._on_windows(flight, windows)

    def _next(self) -> tuple[InFlight, Request] | None:
        with self._lock:
            full = sum(self._held_s.values()) >= _HELD_AUDIOS * self._max_audio_s
            if full or not self._waiting:
                return None
            id, entry = next(iter(self._waiting.items()))
            del self._waiting[id]
            self._held_s[id] = 0.0
            return entry

    def _windows(self, flight: InFlight, request: Request) -> list[Window]:
        windows = cut(self._samples(request))
        duration_s = sum(window.duration_s for window in windows)
        with self._lock:
            if flight.id in self._held_s:  # else it ended meanwhile
                self._held_s[flight.id] = duration_s
        return windows

    def _samples(self, request: Request) -> Samples:
        """Float32 (n,), 16 kHz mono."""
        if isinstance(request.audio, bytes):
            return audio.decode(request.audio, self._max_audio_s)
        assert request.sample_rate is not None  # `plan_request` has refused it
        return audio.from_samples(request.audio, request.sample_rate, self._max_audio_s)
