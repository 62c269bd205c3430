"""Compute word timestamps on worker threads, so that the device does not wait for them."""

import concurrent.futures
import time
from collections.abc import Callable

from serve.contract.errors import EarshotError
from serve.speech.words import WindowWords
from serve.transcriber.active import ActiveRequest
from serve.transcriber.guard import guarded

_WORKERS = 2  # a window takes milliseconds, most of them outside the interpreter's lock

Work = Callable[[], WindowWords]


class WordTimer:
    """A thread pool that times the words of windows. Thread-safe.

    Args:
        on_words: called on a worker with a window's index and words; must not block.
        on_error: called on a worker if a window's words cannot be timed; must not block.
    """

    def __init__(
        self,
        on_words: Callable[[ActiveRequest, int, WindowWords], None],
        on_error: Callable[[ActiveRequest, EarshotError], None],
    ) -> None:
        self._on_words = on_words
        self._on_error = on_error
        self._workers = concurrent.futures.ThreadPoolExecutor(
            _WORKERS, thread_name_prefix="earshot-words"
        )

    def add(self, active: ActiveRequest, index: int, work: Work) -> None:
        """Queue a window's words for timing; returns at once."""
        self._workers.submit(self._time, active, index, work)

    def close(self) -> None:
        """Start no more work; work in progress may still call back."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _time(self, active: ActiveRequest, index: int, work: Work) -> None:
        if active.ended:
            return
        began_s = time.monotonic()
        words = guarded(f"timing words of window {index} of request {active.id}", work)
        active.phases.note("words", began_s)
        if isinstance(words, EarshotError):
            self._on_error(active, words)
        else:
            self._on_words(active, index, words)
