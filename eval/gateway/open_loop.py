"""Requests that come when they come, whatever became of the others; who is refused tries again."""

import dataclasses
import heapq
import http.client
import io
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import soundfile

from eval.gateway.ways import form
from eval.server import post
from serve.contract.messages import Samples
from serve.speech.rate import SAMPLE_RATE

REFUSED = 429
"""The status of what is refused for now."""

_PATH = "/v1/audio/transcriptions"
_MOST_TRIES = 6  # of whom no refusal keeps from trying at once
_APART_S = (0.05, 0.5)  # these
_CONNECTIONS = 512


@dataclasses.dataclass(eq=False)
class Caller:
    """One request, and what became of it; times count from the loop's start."""

    key: str  # its name
    token: str
    samples: Samples
    came_s: float
    obeys: bool  # it comes back when it is told to
    tries: int = 0
    promised_s: float | None = None  # the first time that it was told to come back at
    let_in_s: float | None = None  # when the try came that was answered
    latency_s: float | None = None  # of that
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of its audio."""
        return len(self.samples) / SAMPLE_RATE

    def in_time(self, target_s: float) -> bool:
        """Tell whether it was answered within the target."""
        return self.latency_s is not None and self.latency_s <= target_s

    @property
    def kept(self) -> bool:
        """Tell whether it was let in at the first time that it was told."""
        return self.let_in_s is not None and self.tries <= 2


def wav(samples: Samples) -> bytes:
    """Make a file of samples at 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def ask(address: str, caller: Caller, timeout_s: float) -> int | None:
    """Try once; return how many seconds it is told to wait, where it is.

    A failure, which is neither an answer nor a refusal, is noted.
    """
    body, headers = form(wav(caller.samples), language="en")
    headers["Authorization"] = f"Bearer {caller.token}"
    caller.tries += 1
    began_s = time.monotonic()
    try:
        answer, text = post(address, _PATH, body, headers, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        caller.failure = repr(error)
        return None
    if answer.status == REFUSED:
        return int(answer.headers["Retry-After"])
    caller.latency_s = time.monotonic() - began_s
    if answer.status != http.client.OK:
        caller.latency_s = None
        caller.failure = f"{answer.status} {text[:200]!r}"
    return None


class OpenLoop:
    """Sends requests at their times.

    Args:
        callers: who come.
        try_once: asks the server; see `ask`.
        seed: of what those do who do not obey.
    """

    def __init__(
        self, callers: Sequence[Caller], try_once: Callable[[Caller], int | None], seed: int = 0
    ) -> None:
        self._try_once = try_once
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._coming = [(caller.came_s, next(self._numbers), caller) for caller in callers]
        heapq.heapify(self._coming)
        self._left = len(callers)

    def run(self, most_s: float) -> None:
        """Go on until everybody is done, or so many seconds are over."""
        self._began_s = time.monotonic()
        with ThreadPoolExecutor(_CONNECTIONS) as pool, self._changed:
            while self._left and (now_s := self._now()) < most_s:
                if self._coming and self._coming[0][0] <= now_s:
                    pool.submit(self._visit, heapq.heappop(self._coming)[2])
                    continue
                next_s = self._coming[0][0] if self._coming else most_s
                self._changed.wait(min(next_s, most_s) - now_s)

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _visit(self, caller: Caller) -> None:
        began_s = self._now()
        wait_s = self._try_once(caller)
        with self._changed:
            if wait_s is None:
                caller.let_in_s = None if caller.failure else began_s
                self._left -= 1
            else:
                self._come_back(caller, wait_s)
            self._changed.notify()

    def _come_back(self, caller: Caller, wait_s: int) -> None:
        if caller.promised_s is None:
            caller.promised_s = self._now() + wait_s
        if not caller.obeys:
            if caller.tries >= _MOST_TRIES:
                self._left -= 1
                return
            wait = self._random.uniform(*_APART_S)
        else:
            wait = wait_s
        heapq.heappush(self._coming, (self._now() + wait, next(self._numbers), caller))
