"""When a request would be answered: by the work before it, and by how fast work is done.

The engine hands out windows to whoever has had the fewest, so a request of c waits for at most c of
each other. How fast work is done is measured while there is some. How wrong forecasts are is
measured too, by the answers: of 100, 99 come at most `margin_s` later than forecast. So what is
known of the engine is its rate, and all that is not known is in the margin: how long a request
takes by itself, in which order the engine serves, how well audio's length was guessed.

Admission by measured latencies is from SEDA (Welsh and Culler, "Adaptive Overload Control for Busy
Internet Servers", USITS 2003); a bound on what is under way, in place of one on arrivals, from TCP
Vegas and what was made of it for servers (Breakwater, Cho et al., OSDI 2020); the highest rate of
late as the capacity from BBR (Cardwell et al., ACM Queue 14(5), 2016).
"""

import collections
import dataclasses
import math
from collections.abc import Callable

from serve.contract.messages import Priority

WINDOW_S = 30.0
"""The work of a whole window; other windows have half of that and half of their audio."""

_MEMORY_S = 20.0  # of busy time, in which a rate is forgotten
_STRETCH_S, _STRETCH_ANSWERS = 3.0, 12  # at least, of which each has a rate
_STRETCHES = 12  # of which the fastest counts
_FEW = 4  # answers, before which no rate is known
_ERRORS = 200  # answers by which forecasts are judged
_QUANTILE = 0.99
_LATEST = 50  # answers by whose slowest the limit is corrected, where it kept the engine from work
_FAST, _SLOW = 0.6, 0.8  # of the target
_STEP_UP, _STEP_DOWN, _MOST_MORE = 1.02, 0.97, 4.0
_MOST_FULL = 1.5  # of all slots: more at a time do not help an engine
_FIRST_MARGIN = 0.3  # of the target
_LEAST_MARGIN = 0.05
# What is later than forecast by more takes long whatever is before it, as where windows are decoded
# again at higher temperatures: an engine that idles makes it no sooner.
_MOST_MARGIN = 0.5

Clock = Callable[[], float]


def work_of(audio_s: float) -> float:
    """Return the work of so much audio, in seconds of audio in whole windows."""
    return WINDOW_S / 2 * math.ceil(max(audio_s, 0.001) / WINDOW_S) + audio_s / 2


@dataclasses.dataclass(eq=False)
class Running:
    """A request under way."""

    work: float
    priority: Priority
    key: str  # its caller's
    began_s: float
    forecast_s: float | None  # None: none was possible


class Forecast:
    """The requests of one model that are under way. For one event loop.

    Args:
        target_s: within which 99 of 100 answers are to come.
        slots: windows that decode at the same time; as many may be under way at first.
        clock: in seconds.
    """

    def __init__(self, target_s: float, slots: int, clock: Clock) -> None:
        self.margin_s = _FIRST_MARGIN * target_s
        """So much later than forecast answers come, at the 99th percentile."""
        self.rate: float | None = None
        """Work that is done in a second; None: it is not known yet."""
        self._target_s = target_s
        self._first_limit = slots * WINDOW_S
        self._clock = clock
        self._running: dict[Running, None] = {}
        self._at_s = clock()
        self._done = self._busy_s = 0.0  # of late
        self._answers = 0
        self._stretch_done = self._stretch_s = 0.0
        self._stretch_answers = 0
        self._rates: collections.deque[float] = collections.deque(maxlen=_STRETCHES)
        self._more = 1.0  # times the limit, where answers come far too early
        self._took_s: collections.deque[float] = collections.deque(maxlen=_LATEST)
        self._errors_s: collections.deque[float] = collections.deque(maxlen=_ERRORS)

    @property
    def capacity(self) -> float | None:
        """The highest rate of late, that of a busy engine; None: it is not known yet.

        Where little is let in the rate is low because of that; a limit by it would stay low.
        """
        return None if self.rate is None else max(self.rate, *self._rates, 0.0)

    @property
    def limit(self) -> float:
        """Return the most work that may be under way for a request to keep the target."""
        if (capacity := self.capacity) is None:
            return self._first_limit
        limit = (self._target_s - self.margin_s) * capacity
        return max(limit, min(self._more * limit, _MOST_FULL * self._first_limit))

    def ahead(self, work: float, priority: Priority) -> float:
        """Return what a request of so much work finds before it."""
        most = max(work, WINDOW_S)
        return sum(
            min(running.work, most)
            for running in self._running
            if priority == "job" or running.priority != "job"
        )

    def seconds(self, work: float) -> float | None:
        """Return how long so much work may take; None: that is not known."""
        capacity = self.capacity
        return None if capacity is None else work / capacity + self.margin_s

    def under_way(self, *, key: str | None = None, jobs: bool = False) -> float:
        """Return the work under way: of all or of one key, of jobs or of what is none."""
        return sum(
            running.work
            for running in self._running
            if key in (None, running.key) and jobs == (running.priority == "job")
        )

    def begin(self, work: float, priority: Priority, key: str) -> Running:
        """Note that a request is under way from now on."""
        now = self._advance()
        capacity = self.capacity
        all_s = None if not capacity else (self.ahead(work, priority) + work) / capacity
        running = Running(work, priority, key, now, all_s)
        self._running[running] = None
        return running

    def end(self, running: Running, answered: bool) -> None:
        """Note that it has ended, once."""
        now = self._advance()
        del self._running[running]
        if not answered:
            return
        self._done += running.work
        self._answers += 1
        if self._answers >= _FEW and self._busy_s > 0:
            self.rate = self._done / self._busy_s
            self._stretch(running.work)
        if running.forecast_s is not None and running.priority == "file":
            took_s = now - running.began_s
            self._errors_s.append(took_s - running.forecast_s)
            self._took_s.append(took_s)
            self._judge()

    def _stretch(self, work: float) -> None:
        """Keep the rate of each of the last stretches of time."""
        self._stretch_done += work
        self._stretch_answers += 1
        if self._stretch_answers >= _STRETCH_ANSWERS and self._stretch_s >= _STRETCH_S:
            self._rates.append(self._stretch_done / self._stretch_s)
            self._stretch_done = self._stretch_s = 0.0
            self._stretch_answers = 0

    def _judge(self) -> None:
        errors = sorted(self._errors_s)
        worst_s = errors[min(len(errors) - 1, int(_QUANTILE * len(errors)))]
        # A few answers tell little.
        least = _FIRST_MARGIN if len(errors) < _ERRORS / 4 else _LEAST_MARGIN
        self.margin_s = min(max(worst_s, least * self._target_s), _MOST_MARGIN * self._target_s)
        slowest = max(self._took_s) / self._target_s
        if slowest < _FAST and len(self._took_s) == _LATEST:
            self._more = min(self._more * _STEP_UP, _MOST_MORE)
        elif slowest > _SLOW:
            self._more = max(self._more * _STEP_DOWN, 1.0)

    def _advance(self) -> float:
        now = self._clock()
        if self._running:
            self._stretch_s += now - self._at_s
            kept = math.exp((self._at_s - now) / _MEMORY_S)
            self._done *= kept
            self._busy_s = self._busy_s * kept + _MEMORY_S * (1 - kept)
        self._at_s = now
        return now
