"""A server of a fixed rate behind a latency target, by its own clock: events, no waiting."""

import collections
import dataclasses
import heapq
import itertools
import random

from serve.gateway.errors import ApiError
from serve.gateway.target import AudioLength, LatencyTarget, work_of

MOST_TRIES = 6
HARD = 10


@dataclasses.dataclass(eq=False)
class Client:
    """One request, and what became of it."""

    number: int
    key: str
    seconds: float
    came_s: float
    obeys: bool
    priority: str = "file"
    tries: int = 0
    let_in_s: float | None = None
    ended_s: float | None = None

    @property
    def latency_s(self):
        return self.ended_s - self.let_in_s


class Simulation:
    """Slots that each do a share of the rate; who waits goes in order, jobs every 16th turn."""

    def __init__(self, target_s, rate=300.0, slots=8, seed=0, noise=0.2, hard=0.0):
        self.now, self._events, self._numbers = 0.0, [], itertools.count()
        self.target = LatencyTarget(target_s, slots, lambda: self.now)
        self._rate, self._free, self._noise = rate / slots, slots, noise
        self._hard = hard  # share of requests that take ten times as long as others
        self._waiting = {priority: collections.deque() for priority in ("live", "file", "job")}
        self.clients, self._random, self._turns = [], random.Random(seed), 0

    def at(self, when, what, *arguments):
        heapq.heappush(self._events, (when, next(self._numbers), what, arguments))

    def arrivals(self, key, per_s, until_s, obeys=True, from_s=0.0, priority="file"):
        """Poisson arrivals of 3 to 25 s of audio."""
        when = from_s
        while (when := when + self._random.expovariate(per_s)) < until_s:
            seconds = self._random.uniform(3, 25)
            client = Client(len(self.clients) + 1, key, seconds, when, obeys, priority)
            self.clients.append(client)
            self.at(when, self._try, client)

    def run(self, until_s=float("inf")):
        while self._events and self._events[0][0] <= until_s:
            self.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)

    def slow_down(self, times):
        """Do less from now on."""
        self._rate /= times

    def _try(self, client):
        client.tries += 1
        try:
            running = self.target.admit(AudioLength(client.seconds), client.priority, client.key)
        except ApiError as refusal:
            wait_s = refusal.retry_after_s
            if client.obeys:
                self.at(self.now + wait_s + self._random.uniform(0, 0.05), self._try, client)
            elif client.tries < MOST_TRIES:
                self.at(self.now + self._random.uniform(0.05, 0.5), self._try, client)
            return
        client.let_in_s = self.now
        self._waiting[client.priority].append((client, running))
        self._go_on()

    def _go_on(self):
        while self._free and any(self._waiting.values()):
            self._turns += 1
            order = ("live", "file", "job") if self._turns % 16 else ("job", "live", "file")
            line = next(self._waiting[priority] for priority in order if self._waiting[priority])
            client, running = line.popleft()
            self._free -= 1
            noise = self._random.uniform(1 - self._noise, 1 + self._noise)
            noise *= HARD if self._random.random() < self._hard else 1
            self.at(self.now + noise * running.work / self._rate, self._end, client, running)

    def _end(self, client, running):
        self._free += 1
        client.ended_s = self.now
        self.target.end(running, answered=True)
        self._go_on()


def mean_work():
    """The mean of a client's."""
    return sum(work_of(seconds / 10) for seconds in range(30, 250)) / 220


def goodput(clients, target_s, from_s, until_s):
    """Work a second of those that were answered in time."""
    done = sum(
        work_of(c.seconds)
        for c in clients
        if c.ended_s is not None and from_s <= c.ended_s < until_s and c.latency_s <= target_s
    )
    return done / (until_s - from_s)


def p99(clients):
    times = sorted(c.latency_s for c in clients if c.ended_s is not None)
    return times[int(0.99 * len(times))]
