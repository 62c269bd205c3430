"""A day replayed, five seconds at a time, against GPUs that take time to come.

A GPU serves what was measured: as many requests a second at most as when it was full, and each in
a time that is spread as at that load (log-normal, by the measured p50 and p99). What comes beyond
that waits in line, and what there is no room for in the servers' queues is refused. Requests are
spread evenly, as by a gateway that asks whom it has given the fewest.
"""

import dataclasses
import statistics
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from eval.plan.measured import REQUEST_S, Measured
from eval.plan.policy import SYNC_S, Autoscaler, Policy

_WINDOW_S = 60  # over which the metrics are means
_SCRAPE_S = 15  # how old the newest of them is
_DRAIN_S = 15  # a replica that is taken away is paid for so much longer
_P99 = statistics.NormalDist().inv_cdf(0.99)
_TICK_S = 5
_TICKS = 60 // _TICK_S  # of a minute

Array = npt.NDArray[np.float64]
_Tick = tuple[float, float, float, float, int]
"""Requests that wait, were answered and were refused; seconds that the next one waits; GPUs."""


@dataclasses.dataclass(frozen=True)
class Day:
    """The outcome of a day's requests."""

    policy: Policy
    p99_s: float  # of all
    worst_minute_s: float  # p99 of the minute where it is longest
    minutes_over: int  # in which p99 was longer than wanted, or a request was refused
    refused: float  # share of all
    gpu_hours: float  # from the call for a GPU to its end
    most: int  # GPUs at a time
    arrivals_per_s: Array  # by minute
    gpus: Array  # ready ones, by minute
    minute_p99_s: Array

    @property
    def audio_hours(self) -> float:
        """Return the hours of audio that were answered."""
        return float(self.arrivals_per_s.sum()) * 60 * (1 - self.refused) * REQUEST_S / 3600


@dataclasses.dataclass
class _Fleet:
    """GPUs that are there and that are on their way."""

    ready: int
    coming: deque[float]  # the second in which each will be ready

    @property
    def size(self) -> int:
        return self.ready + len(self.coming)

    def resize(self, size: int, now: int, start_s: float) -> None:
        """Call for more, or let go: those first that are not there yet."""
        while self.size < size:
            self.coming.append(now + start_s)
        while self.size > size and self.coming:
            self.coming.pop()
        self.ready = min(self.ready, size)

    def tick(self, now: int) -> None:
        """Take in those that are ready now."""
        while self.coming and self.coming[0] <= now:
            self.coming.popleft()
            self.ready += 1


def replay(
    measured: Measured,
    policy: Policy,
    arrivals_per_s: Array,
    start_s: float,
    most_pending: int,
    p99_s: float,
) -> Day:
    """Replay a day.

    Args:
        measured: one GPU.
        policy: how many there are.
        arrivals_per_s: of requests, by minute.
        start_s: from the call for a replica to its first request.
        most_pending: requests that a replica takes in before it refuses more.
        p99_s: what is wanted.
    """
    offered = np.repeat(arrivals_per_s * _TICK_S, _TICKS)
    rows: list[_Tick] = []
    scaler, fleet, paid_s = Autoscaler(policy), _Fleet(policy.least, deque()), 0.0
    backlog = 0.0
    for tick, came in enumerate(offered.tolist()):
        now = tick * _TICK_S
        fleet.tick(now)
        if now % SYNC_S == 0:
            size = scaler.look(fleet.size, fleet.ready, *_metrics(rows))
            paid_s += max(0, fleet.size - size) * _DRAIN_S
            fleet.resize(size, now, start_s)
        full = fleet.ready * measured.saturated_per_s
        wait_s = backlog / full
        served = min(backlog + came, full * _TICK_S)
        lost = max(0.0, backlog + came - served - fleet.ready * most_pending)
        backlog += came - served - lost
        rows.append((backlog, served, lost, wait_s, fleet.ready))
        paid_s += fleet.size * _TICK_S
    _, _, lost_each, waits_s, gpus = np.array(rows, dtype=np.float64).T
    return _judge(measured, policy, p99_s, paid_s, offered, lost_each, waits_s, gpus)


def _metrics(rows: list[_Tick]) -> tuple[float, float]:
    """Return the mean wait and the windows a second, as the rules record them."""
    end = max(1, len(rows) - _SCRAPE_S // _TICK_S)
    seen = rows[max(0, end - _WINDOW_S // _TICK_S) : end]
    if not seen:
        return 0.0, 0.0
    per_s = sum(row[1] for row in seen) / (len(seen) * _TICK_S)
    return sum(row[0] for row in seen) / len(seen) / max(per_s, 0.1), per_s


def _judge(
    measured: Measured,
    policy: Policy,
    p99_s: float,
    paid_s: float,
    offered: Array,
    lost: Array,
    wait_s: Array,
    gpus: Array,
) -> Day:
    each = np.minimum(offered / _TICK_S / gpus, measured.saturated_per_s)
    middle = np.log(measured.latency_s(each, "p50"))
    spread = (np.log(measured.latency_s(each, "p99")) - middle) / _P99
    taken = offered - lost
    minutes = [part.reshape(-1, _TICKS) for part in (taken, wait_s, middle, spread)]
    by_minute = _quantile(0.99, *minutes)
    lost_by_minute = lost.reshape(-1, _TICKS).sum(1)
    return Day(
        policy,
        float(_quantile(0.99, *(part[np.newaxis] for part in (taken, wait_s, middle, spread)))[0]),
        float(by_minute.max()),
        int(((by_minute > p99_s) | (lost_by_minute > 0)).sum()),
        float(lost.sum() / offered.sum()),
        paid_s / 3600,
        int(gpus.max()),
        offered[::_TICKS] / _TICK_S,
        gpus.reshape(-1, _TICKS).mean(1),
        by_minute,
    )


def _quantile(share: float, weight: Array, wait_s: Array, middle: Array, spread: Array) -> Array:
    """Find each row's time within which so much of its requests was answered, by bisection.

    Each of a row's entries is a log-normal time behind a wait, with a weight.
    """
    low, high = np.zeros(len(weight)), np.full(len(weight), 1e4)
    total = weight.sum(1)
    for _ in range(40):  # to a hundred-millionth of a second
        tried = (low + high) / 2
        left = np.maximum(tried[:, np.newaxis] - wait_s, 1e-9)
        score = torch.from_numpy((np.log(left) - middle) / spread)
        done = (weight * torch.special.ndtr(score).numpy()).sum(1) / total
        low, high = np.where(done < share, tried, low), np.where(done < share, high, tried)
    return np.asarray(high)
