"""The latency target: which requests are admitted so that 99 of 100 are answered in time.

Work in flight stays below the amount that the forecast says is done in time. Live text goes first,
then files. Jobs get the rest, but at least one job may run. If several keys ask for too much, they
share the limit by max-min fairness: a key gets its demand up to an equal share of the work that the
others leave. A rejection forecasts when there is room; nothing is reserved for the retry.

The forecast divides the work ahead of a request by the rate of work. The engine hands out windows
to the request that has had the fewest, so a request of c windows waits for at most c of each other.
The rate is measured while there is work. The error of forecasts is measured too, by the answers: of
100, 99 come at most `_margin_s` later than forecast. Everything unknown about the engine is in that
margin: how long a request takes by itself, in which order the engine serves, and how well the
length of audio was estimated.

Sources: SEDA admits by measured latencies (Welsh and Culler, "Adaptive Overload Control for Busy
Internet Servers", USITS 2003). TCP Vegas, and Breakwater for servers (Cho et al., OSDI 2020), bound
the work in flight and not the arrivals. BBR takes the highest recent rate as the capacity (Cardwell
et al., ACM Queue 14(5), 2016).
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable

from serve.contract.errors import AudioError
from serve.contract.messages import Priority
from serve.gateway import errors
from serve.speech.containers import pcm16_header
from serve.speech.file_types import kind_of

WINDOW_S = 30.0
"""The work of a whole window; a shorter one has half of that plus half its audio's length."""
HEAD_BYTES = 2**16
"""The bytes at a file's beginning from which its length is estimated."""

_MODEST_SHARE = 0.9  # part of a fair share below which a key may fill the limit
_GREEDY_SHARE = 0.8  # share of the limit up to which files of other keys are admitted
_JOB_SHARE = 0.5  # share of the limit, of all work, up to which jobs are admitted
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # multiples of it, modulo 1, lie evenly between 0 and 1
_DEMAND_S = 10.0  # time over which the demand of a key is averaged
_LIVE_SHARE = 0.9  # share of the rate that live text may take
_RETRY_LIVE_S = 10  # the end of a stream is unknown
_MAX_RETRY_S = 60  # OpenAI's clients wait no longer
_BYTES_PER_S = 8_000.0  # of a file's kind before the first answer
_ANSWER_WEIGHT = 0.1  # weight of each answer
_INTERVAL_S, _INTERVAL_ANSWERS = 3.0, 12  # minimum length of an interval of the rate
_INTERVALS = 12  # intervals kept; the fastest one gives the capacity
_FIRST_ANSWERS = 4  # answers before a rate is known
_ERRORS = 200  # answers by which forecasts are judged
_QUANTILE = 0.99
_LATEST = 50  # answers; the slowest of them corrects a limit that keeps the engine idle
_FAST, _SLOW = 0.6, 0.8  # share of the target
_STEP_UP, _STEP_DOWN, _MAX_FACTOR = 1.02, 0.97, 4.0
_MAX_FULL = 1.5  # times all slots: more at a time do not help an engine
_FIRST_MARGIN = 0.3  # share of the target
_MIN_MARGIN = 0.05
# Answers with a larger error are slow by themselves, for example if windows are decoded again at
# higher temperatures. An idle engine would not make them faster.
_MAX_MARGIN = 0.5

Clock = Callable[[], float]


def work_of(audio_s: float) -> float:
    """Return the work of audio, in seconds of whole windows."""
    return WINDOW_S / 2 * math.ceil(max(audio_s, 0.001) / WINDOW_S) + audio_s / 2


@dataclasses.dataclass(eq=False)
class InflightRequest:
    """A request that was admitted and has not ended."""

    work: float
    priority: Priority
    key: str  # the API key's name
    began_s: float
    forecast_s: float | None  # None: no rate was known


class _DemandRate:
    """Work a second, as an exponential average over `_DEMAND_S`."""

    def __init__(self) -> None:
        self._sum, self._updated_s = 0.0, 0.0

    def add(self, work: float, now: float) -> None:
        self._sum, self._updated_s = self.rate(now) * _DEMAND_S + work, now

    def rate(self, now: float) -> float:
        return self._sum * math.exp((self._updated_s - now) / _DEMAND_S) / _DEMAND_S


@dataclasses.dataclass(frozen=True)
class AudioLength:
    """The length of a request's audio, as known before decoding."""

    seconds: float | None  # None: it is estimated by kind and size
    kind: str = ""
    size: int = 0  # bytes


def audio_of_file(head: bytes, size: int) -> AudioLength:
    """Return the length of a file's audio.

    Args:
        head: the first `HEAD_BYTES` of the file.
        size: the bytes of the whole file.
    """
    try:
        header = pcm16_header(head)
    except AudioError:  # the engine rejects the file, and says why
        header = None
    if header is None:
        return AudioLength(None, kind_of(head), size)
    # Use the size of the file, because the header may declare only the first part's size.
    samples = (size - header.begin) / 2 / header.channels
    return AudioLength(samples / max(1, header.rate))


class LatencyTarget:
    """Admits requests by a forecast of their answers. For one event loop.

    Args:
        target_s: the time within which 99 of 100 answers are to come.
        slots: windows that decode at the same time; the first limit of windows in flight.
        clock: monotonic seconds.
    """

    def __init__(self, target_s: float, slots: int, clock: Clock = time.monotonic) -> None:
        self._margin_s = _FIRST_MARGIN * target_s
        """Seconds by which answers are later than forecast, at the 99th percentile."""
        self.rate = 0.0
        """Work that was done in a second of the last interval; 0: unknown yet."""
        self.target_s = target_s
        self._first_limit = slots * WINDOW_S
        self._clock = clock
        self._inflight: dict[InflightRequest, None] = {}
        self._updated_s = clock()
        self._work = self._busy_s = 0.0  # of this interval
        self._answers = 0  # in this interval
        self._rates: collections.deque[float] = collections.deque(maxlen=_INTERVALS)
        self._limit_factor = 1.0  # factor of the limit, above 1 if answers come far too early
        self._took_s: collections.deque[float] = collections.deque(maxlen=_LATEST)
        self._errors_s: collections.deque[float] = collections.deque(maxlen=_ERRORS)
        self._demand: dict[str, _DemandRate] = {}  # by key
        self._live = _DemandRate()
        self._retry_phase = 0.0
        self._bytes_per_s: dict[str, float] = {}  # by kind of file

    def admit(self, audio: AudioLength, priority: Priority, key: str) -> InflightRequest:
        """Admit a request, which `end` ends; live text always.

        Args:
            audio: the audio's length.
            priority: live text, a file, or a job.
            key: the API key's name.

        Raises:
            ApiError: 429, it, or others, would not be answered in time; forecasts when it would.
        """
        now, work = self._clock(), work_of(self.seconds(audio))
        if priority == "live":
            self._live.add(work, now)
            return self._begin(work, priority, key)
        if priority == "file":
            self._demand.setdefault(key, _DemandRate()).add(work, now)
        wait_s = self._wait_s(work, priority, key, now)
        if wait_s > 0:
            whole_s = min(max(1, math.ceil(wait_s)), _MAX_RETRY_S)
            limit = f"gateway.target_p99_s = {self.target_s:g}"
            message = f"{limit} allows no further request; there may be room in {whole_s} s"
            raise errors.overloaded(message, "latency_target", whole_s)
        return self._begin(work, priority, key)

    def require_live(self, streams: int) -> None:
        """Reject a new live stream if all streams together would take too much.

        Args:
            streams: the other streams that are open.

        Raises:
            ApiError: 429, they would.
        """
        rate, now = self.rate, self._clock()
        if rate and streams and self._live.rate(now) * (1 + 1 / streams) > _LIVE_SHARE * rate:
            limit = f"gateway.target_p99_s = {self.target_s:g}"
            message = f"{limit} allows no live stream beside {streams}; try again later"
            raise errors.overloaded(message, "latency_target", _RETRY_LIVE_S)

    def end(self, request: InflightRequest, answered: bool) -> None:
        """Count a request as ended; once for each."""
        now = self._advance()
        del self._inflight[request]
        if not answered:
            return
        self._work += request.work
        self._answers += 1
        if self._answers >= _INTERVAL_ANSWERS and self._busy_s >= _INTERVAL_S:
            self.rate = self._work / self._busy_s
            self._rates.append(self.rate)
            self._work = self._busy_s = 0.0
            self._answers = 0
        elif self._answers >= _FIRST_ANSWERS and self._busy_s and not self._rates:
            self.rate = self._work / self._busy_s
        if request.forecast_s is not None and request.priority == "file":
            took_s = now - request.began_s
            self._errors_s.append(took_s - request.forecast_s)
            self._took_s.append(took_s)
            self._update_margin()

    def learn(self, audio: AudioLength, seconds: float) -> None:
        """Correct the estimate by an answer, which tells the length."""
        if audio.seconds is None and audio.size and seconds > 0:
            measured = audio.size / seconds
            estimate = self._bytes_per_s.get(audio.kind, measured)
            self._bytes_per_s[audio.kind] = estimate + _ANSWER_WEIGHT * (measured - estimate)

    def seconds(self, audio: AudioLength) -> float:
        """Return the seconds of audio, estimated where they are unknown."""
        if audio.seconds is not None:
            return audio.seconds
        return audio.size / self._bytes_per_s.get(audio.kind, _BYTES_PER_S)

    @property
    def _capacity(self) -> float:
        """The highest recent rate, which is a busy engine's; 0: unknown yet.

        The present rate is low if few requests are admitted, and a limit by it would stay low.
        """
        return max(self._rates, default=self.rate)

    @property
    def _limit(self) -> float:
        """The maximum work in flight with which a request keeps the target."""
        if not self._capacity:
            return self._first_limit
        limit = (self.target_s - self._margin_s) * self._capacity
        return max(limit, min(self._limit_factor * limit, _MAX_FULL * self._first_limit))

    @property
    def forecast_s(self) -> float:
        """The time within which a whole window would be answered, 99 times of 100; 0: unknown."""
        work = self._queued_work(WINDOW_S, "file") + WINDOW_S
        return work / self._capacity + self._margin_s if self._capacity else 0.0

    def _wait_s(self, work: float, priority: Priority, key: str, now: float) -> float:
        """Forecast the seconds until a request can be admitted; 0 means now."""
        jobs = priority == "job"
        if not self._inflight_work(jobs=jobs):  # an idle server admits every request
            return 0.0
        rate, limit = self.rate or self._limit / self.target_s, self._limit
        queued = self._queued_work(work, priority)
        # A request that alone takes more than half the target cannot meet it. It counts as half the
        # limit, so that it is still admitted.
        work = min(work, limit / 2)
        queued += work
        if jobs:
            return max((queued - _JOB_SHARE * limit) / rate, 0.0)
        file_rate = max(rate - self._live.rate(now), (1 - _LIVE_SHARE) * rate)
        others = (demand.rate(now) for other, demand in self._demand.items() if other != key)
        key_rate, demand = fair_share(file_rate, others), self._demand[key].rate(now)
        if demand <= _MODEST_SHARE * key_rate:
            return max((queued - limit) / rate, 0.0)
        limit *= _GREEDY_SHARE
        wait_s = (queued - limit) / rate
        if inflight := self._inflight_work(key=key):
            wait_s = max(wait_s, (inflight + work - limit * key_rate / file_rate) / key_rate)
        if wait_s <= 0:
            return 0.0
        # Spread a key's retries over the time that its demand above the fair share takes.
        drain_s = (demand / key_rate - 1) * _DEMAND_S
        self._retry_phase = (self._retry_phase + _GOLDEN_RATIO) % 1
        return wait_s + self._retry_phase * max(drain_s - wait_s, 0.0)

    def _begin(self, work: float, priority: Priority, key: str) -> InflightRequest:
        """Count a request as in flight."""
        now, forecast_s = self._advance(), None
        if self._capacity:
            forecast_s = (self._queued_work(work, priority) + work) / self._capacity
        request = InflightRequest(work, priority, key, now, forecast_s)
        self._inflight[request] = None
        return request

    def _queued_work(self, work: float, priority: Priority) -> float:
        """Return the work ahead of a request with this work."""
        max_work = max(work, WINDOW_S)
        ahead = (one.work for one in self._inflight if priority == "job" or one.priority != "job")
        return sum(min(each, max_work) for each in ahead)

    def _inflight_work(self, *, key: str | None = None, jobs: bool = False) -> float:
        """Return the work in flight of one key or all keys; `jobs`: of jobs, else of the rest."""
        requests = (one for one in self._inflight if jobs == (one.priority == "job"))
        return sum(request.work for request in requests if key in (None, request.key))

    def _update_margin(self) -> None:
        late_s = sorted(self._errors_s)
        worst_s = late_s[min(len(late_s) - 1, int(_QUANTILE * len(late_s)))]
        # A few answers tell little.
        min_margin = _FIRST_MARGIN if len(late_s) < _ERRORS / 4 else _MIN_MARGIN
        self._margin_s = min(max(worst_s, min_margin * self.target_s), _MAX_MARGIN * self.target_s)
        slowest = max(self._took_s) / self.target_s
        if slowest < _FAST and len(self._took_s) == _LATEST:
            self._limit_factor = min(self._limit_factor * _STEP_UP, _MAX_FACTOR)
        elif slowest > _SLOW:
            self._limit_factor = max(self._limit_factor * _STEP_DOWN, 1.0)

    def _advance(self) -> float:
        now = self._clock()
        if self._inflight:
            self._busy_s += now - self._updated_s
        self._updated_s = now
        return now


def fair_share(capacity: float, others: Iterable[float]) -> float:
    """Return the max-min fair share of one key.

    Args:
        capacity: the amount to share.
        others: the amounts that the other keys ask for.
    """
    demands = sorted(others)
    while demands and demands[0] < capacity / (len(demands) + 1):
        capacity -= demands.pop(0)
    return capacity / (len(demands) + 1)
