"""The latency target: who is let in so that it is kept, and when the others may come back.

Work under way is kept below what the forecast says can be done in time. Live text goes first, then
files, and jobs have what these leave, but always one. Of several keys whose requests together are
too many each has what it asks for, up to an equal share of what the others leave (max-min). Who is
refused is given a place in time; see `places`.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from serve.contract.messages import Priority
from serve.gateway import refusals
from serve.gateway.overload.forecast import WINDOW_S, Clock, Forecast, Running, work_of
from serve.gateway.overload.places import EARLY_S, Place, Places
from serve.gateway.overload.sound import Lengths, Sound
from serve.gateway.refusals import Refusal

_UNPROMISED = 0.7  # of the limit, for who has no place; so that who has one finds it
_JOBS = 0.5  # of the limit, for all together, up to which jobs are let in
_PROMISED = 0.85  # of the rate, that is given away as places
_MODEST = 0.9  # of its share: a key that asks for less is let in as if it had places
_DEMAND_S = 10.0  # over which what a key asks for is averaged
_LIVE_SHARE = 0.9  # of the rate, that live text may take
_RETRY_LIVE_S = 10  # nobody knows when a stream ends


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
    places: int
    taken_up: int
    lapsed: int
    moved: int


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
        self._places = Places()
        self._asked: dict[str, _Flow] = {}  # by key, of requests that come for the first time
        self._live = _Flow()

    def admit(self, audio_s: float, mark: int, priority: Priority, key: str) -> Running:
        """Let a request in, which `end` ends; live text always.

        Args:
            audio_s: its seconds of audio.
            mark: see `Sound`.
            priority: of it.
            key: its caller's name.

        Raises:
            Refusal: it would not be answered in time, or others would not; says when to come back.
        """
        now, work = self._clock(), work_of(audio_s)
        self._places.advance(now)
        if priority == "live":
            self._live.add(work, now)
            return self._forecast.begin(work, priority, key)
        place = self._places.find(key, mark) if priority == "file" else None
        if priority == "file" and place is None:
            self._asked.setdefault(key, _Flow()).add(work, now)
        if not self._has_room(work, priority, key, place, now):
            raise self._refusal(work, priority, place or Place(key, mark, work), now)
        if place is not None:
            self._places.take(place)
        return self._forecast.begin(work, priority, key)

    def end(self, running: Running, answered: bool) -> None:
        """Note that a request has ended."""
        self._forecast.end(running, answered)

    def require_live(self, streams: int) -> None:
        """Refuse one more live stream beside so many where they would take too much.

        Raises:
            Refusal: they would.
        """
        rate, now = self._forecast.rate, self._clock()
        if rate and streams and self._live.rate(now) * (1 + 1 / streams) > _LIVE_SHARE * rate:
            raise refusals.beyond_target(
                f"{streams} live streams are open, as many as are decoded in time "
                f"(gateway.target_p99_s = {self._target_s:g}); try again later",
                _RETRY_LIVE_S,
            )

    def state(self) -> State:
        """Tell of this moment."""
        self._places.advance(self._clock())
        ahead = self._forecast.ahead(WINDOW_S, "file") + self._places.held
        places = self._places
        return State(
            forecast_s=self._forecast.seconds(ahead + WINDOW_S) or 0.0,
            rate=self._forecast.rate or 0.0,
            places=len(places),
            taken_up=places.kept,
            lapsed=places.lapsed,
            moved=places.moved,
        )

    def _has_room(
        self, work: float, priority: Priority, key: str, place: Place | None, now: float
    ) -> bool:
        forecast, jobs = self._forecast, priority == "job"
        if not forecast.under_way(jobs=jobs):  # an idle server takes whatever comes
            return True
        limit = forecast.limit
        # What takes longer than half the target by itself cannot keep it, and is let in for less.
        wanted = forecast.ahead(work, priority) + min(work, limit / 2)
        if jobs:
            return wanted + self._places.held <= _JOBS * limit
        left, fair = self._rates(key, now)
        modest = self._asked[key].rate(now) <= _MODEST * fair
        if modest or (place is not None and place.due_s <= now + EARLY_S):
            return wanted <= limit
        limit *= _UNPROMISED
        if wanted + min(self._places.held, limit / 2) > limit:
            return False
        has = forecast.under_way(key=key)
        return not has or has + min(work, limit / 2) <= limit * fair / left

    @property
    def _rate(self) -> float:
        """Return how fast work is done; a guess, as long as that is not known."""
        return self._forecast.rate or self._forecast.limit / self._target_s

    def _rates(self, key: str, now: float) -> tuple[float, float]:
        """Return the work a second that files may have, and that which a key may have of it."""
        rate = self._rate
        left = max(rate - self._live.rate(now), (1 - _LIVE_SHARE) * rate)
        others = (flow.rate(now) for other, flow in self._asked.items() if other != key)
        return left, fair_share(left, others)

    def _refusal(self, work: float, priority: Priority, place: Place, now: float) -> Refusal:
        forecast, places = self._forecast, self._places
        ahead = forecast.ahead(work, priority) + places.held
        free = (_JOBS if priority == "job" else _UNPROMISED) * forecast.limit
        over = ahead + min(work, forecast.limit / 2) - free
        from_s, is_due = now + max(over, 0.0) / self._rate, place.due_s <= now + EARLY_S
        if priority == "job":
            wait_s = max(1, math.ceil(from_s - now))
        elif place.due_s and not is_due:
            wait_s = math.ceil(place.due_s - now)
        else:
            _, fair = self._rates(place.key, now)
            wait_s = places.give(place, from_s, _PROMISED * fair, now)
        return refusals.beyond_target(
            "as much is under way, or promised to others, as is answered in time "
            f"(gateway.target_p99_s = {self._target_s:g}); send it again in {wait_s} s",
            wait_s,
        )


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
        self.lengths = Lengths()
        self.models = {name: ModelTarget(target_s, slots) for name in models if target_s}

    def look(self, look: Callable[[], Sound | None]) -> Sound | None:
        """Look at a request's audio, where there is a target."""
        return look() if self.models else None

    @contextlib.contextmanager
    def admitted(
        self, model: str, sound: Sound | None, priority: Priority, key: str
    ) -> Iterator[Admitted]:
        """Let a request in; where the `with` block fails it has ended.

        Raises:
            Refusal: see `ModelTarget.admit`.
        """
        target = self.models.get(model)
        if target is None or sound is None:
            yield Admitted()
            return
        seconds = self.lengths.seconds(sound)
        admitted = Admitted(target, target.admit(seconds, sound.mark, priority, key))
        try:
            yield admitted
        except BaseException:
            admitted.end(answered=False)
            raise

    def require_live(self, model: str, streams: int) -> None:
        """Refuse one more live stream; see `ModelTarget.require_live`."""
        if (target := self.models.get(model)) is not None:
            target.require_live(streams)
