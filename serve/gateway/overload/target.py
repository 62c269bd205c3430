"""The latency target: who is let in so that it is kept, and when the others may come back.

Work under way is kept below what the forecast says can be done in time. Live text goes first, then
files, and jobs have what these leave, but always one. Of several keys whose requests together are
too many each has what it asks for, up to an equal share of what the others leave (max-min). A
refusal forecasts when there is room; nothing is reserved for who comes back then.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from serve.contract.messages import Priority
from serve.gateway import errors
from serve.gateway.overload.forecast import WINDOW_S, Clock, Forecast, Running, work_of
from serve.gateway.overload.sound import AudioLength, DurationEstimator

_MODEST = 0.9  # of its share: a key that asks for less may fill the limit
_GREEDY = 0.8  # of the limit, up to which the files of other keys are let in
_JOBS = 0.5  # of the limit, for all together, up to which jobs are let in
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, lie evenly between 0 and 1
_DEMAND_S = 10.0  # over which what a key asks for is averaged
_LIVE_SHARE = 0.9  # of the rate, that live text may take
_RETRY_LIVE_S = 10  # nobody knows when a stream ends
_LONGEST_S = 60  # of a forecast; OpenAI's clients wait no longer


class _Flow:
    """Work a second, over the last `_DEMAND_S`."""

    def __init__(self) -> None:
        self._sum, self._at_s = 0.0, 0.0

    def add(self, work: float, now: float) -> None:
        self._sum, self._at_s = self.rate(now) * _DEMAND_S + work, now

    def rate(self, now: float) -> float:
        return self._sum * math.exp((self._at_s - now) / _DEMAND_S) / _DEMAND_S


@dataclasses.dataclass(frozen=True)
class State:
    """What metrics tell of a model."""

    forecast_s: float  # within which a whole window would be answered, 99 times of 100
    rate: float  # seconds of audio in whole windows that are decoded in a second


class ModelTarget:
    """The target of one model.

    Args:
        target_s: see `Forecast`.
        slots: see `Forecast`.
        clock: in seconds.
    """

    def __init__(self, target_s: float, slots: int, clock: Clock = time.monotonic) -> None:
        self._target_s = target_s
        self._clock = clock
        self._forecast = Forecast(target_s, slots, clock)
        self._asked: dict[str, _Flow] = {}  # by key
        self._live = _Flow()
        self._spread = 0.0

    def admit(self, audio_s: float, priority: Priority, key: str) -> Running:
        """Let a request in, which `end` ends; live text always.

        Args:
            audio_s: its seconds of audio.
            priority: of it.
            key: its caller's name.

        Raises:
            ApiError: it, or others, would not be answered in time; forecasts when it would.
        """
        now, work = self._clock(), work_of(audio_s)
        if priority == "live":
            self._live.add(work, now)
            return self._forecast.begin(work, priority, key)
        if priority == "file":
            self._asked.setdefault(key, _Flow()).add(work, now)
        wait_s = self._wait_s(work, priority, key, now)
        if wait_s > 0:
            whole_s = min(max(1, math.ceil(wait_s)), _LONGEST_S)
            raise errors.beyond_target(
                "as much is under way as is answered in time "
                f"(gateway.target_p99_s = {self._target_s:g}); there may be room in {whole_s} s",
                whole_s,
            )
        return self._forecast.begin(work, priority, key)

    def end(self, running: Running, answered: bool) -> None:
        """Note that a request has ended."""
        self._forecast.end(running, answered)

    def require_live(self, streams: int) -> None:
        """Refuse one more live stream beside so many where they would take too much.

        Raises:
            ApiError: they would.
        """
        rate, now = self._forecast.rate, self._clock()
        if rate and streams and self._live.rate(now) * (1 + 1 / streams) > _LIVE_SHARE * rate:
            raise errors.beyond_target(
                f"{streams} live streams are open, as many as are decoded in time "
                f"(gateway.target_p99_s = {self._target_s:g}); try again later",
                _RETRY_LIVE_S,
            )

    def state(self) -> State:
        """Tell of this moment."""
        ahead = self._forecast.ahead(WINDOW_S, "file")
        return State(
            forecast_s=self._forecast.seconds(ahead + WINDOW_S) or 0.0,
            rate=self._forecast.rate or 0.0,
        )

    def _wait_s(self, work: float, priority: Priority, key: str, now: float) -> float:
        """Forecast in how many seconds there is room for a request; 0: there is room now."""
        forecast, jobs = self._forecast, priority == "job"
        if not forecast.under_way(jobs=jobs):  # an idle server takes whatever comes
            return 0.0
        rate, limit = forecast.rate or forecast.limit / self._target_s, forecast.limit
        # What takes longer than half the target by itself cannot keep it, and is let in for less.
        least = min(work, limit / 2)
        over = forecast.ahead(work, priority) + least
        if jobs:
            return max((over - _JOBS * limit) / rate, 0.0)
        left = max(rate - self._live.rate(now), (1 - _LIVE_SHARE) * rate)
        others = (flow.rate(now) for other, flow in self._asked.items() if other != key)
        fair, asked = fair_share(left, others), self._asked[key].rate(now)
        if asked <= _MODEST * fair:
            return max((over - limit) / rate, 0.0)
        limit *= _GREEDY
        wait_s = (over - limit) / rate
        if has := forecast.under_way(key=key):
            wait_s = max(wait_s, (has + least - limit * fair / left) / fair)
        if wait_s <= 0:
            return 0.0
        # All that the key asked for of late does not come back at once, but over the time it takes.
        drain_s = (asked / fair - 1) * _DEMAND_S
        self._spread = (self._spread + _GOLDEN) % 1
        return wait_s + self._spread * max(drain_s - wait_s, 0.0)


def fair_share(capacity: float, others: Iterable[float]) -> float:
    """Return the most that one may have beside others who want so much each, max-min fair."""
    wanted = sorted(others)
    while wanted and wanted[0] < capacity / (len(wanted) + 1):
        capacity -= wanted.pop(0)
    return capacity / (len(wanted) + 1)


class Admitted:
    """A request that was let in, by a model's target or without one."""

    def __init__(self, target: ModelTarget | None = None, running: Running | None = None) -> None:
        self._target, self._running = target, running

    def end(self, answered: bool) -> None:
        """Note that it has ended."""
        if self._target is not None and self._running is not None:
            self._target.end(self._running, answered)


class Targets:
    """The targets of all models; none where the config has none.

    Args:
        target_s: 0: there is none.
        models: their names.
        slots: see `Forecast`.
    """

    def __init__(self, target_s: float, models: Collection[str], slots: int) -> None:
        self.target_s = target_s
        self.lengths = DurationEstimator()
        self.models = {name: ModelTarget(target_s, slots) for name in models if target_s}

    def look(self, look: Callable[[], AudioLength | None]) -> AudioLength | None:
        """Look at a request's audio, where there is a target."""
        return look() if self.models else None

    @contextlib.contextmanager
    def admitted(
        self, model: str, sound: AudioLength | None, priority: Priority, key: str
    ) -> Iterator[Admitted]:
        """Let a request in; where the `with` block fails it has ended.

        Raises:
            ApiError: see `ModelTarget.admit`.
        """
        target = self.models.get(model)
        if target is None or sound is None:
            yield Admitted()
            return
        seconds = self.lengths.seconds(sound)
        admitted = Admitted(target, target.admit(seconds, priority, key))
        try:
            yield admitted
        except BaseException:
            admitted.end(answered=False)
            raise

    def require_live(self, model: str, streams: int) -> None:
        """Refuse one more live stream; see `ModelTarget.require_live`."""
        if (target := self.models.get(model)) is not None:
            target.require_live(streams)
