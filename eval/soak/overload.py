"""The scenario of more requests than a server can do, with a latency target.

The capacity is the throughput for clients that always send, without a target, before and after.
Then requests arrive at random, as many as a share of the capacity. Rejected clients obey
Retry-After.
"""

import dataclasses
import functools
import itertools
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from eval.clients import Ask
from eval.config import changed
from eval.load import closed_loop, open_loop, poisson
from eval.server import RunningServer, running
from eval.soak.stage import Stage
from serve.contract.errors import EarshotError

MIN_SHARE = 0.95  # answered in time, of the capacity; admitted, of the clients
_TARGET_S = 2.0  # if gateway.target_p99_s is not set
_LOADS = (1.3, 3.0)  # shares of the capacity
_SECONDS = 40.0  # longest time for which requests of a load arrive
_WARM = 0.2  # share of a load's time before goodput is counted
_PATIENCE = 2.0  # times as long as the work of all requests takes
_MIN_S, _MAX_S = 2.0, 28.0  # length of clips; others are not one window
_TIMEOUT_S = 600.0  # a client's patience: as long as the server gives a request


@dataclasses.dataclass(eq=False)
class OverloadClient:
    """A client, and its request's outcome; times count from the load's start."""

    file: str
    audio_s: float
    latency_s: float = math.inf  # the answered try's; infinite without an answer
    end_s: float = math.inf  # the end of that try


def overload(stage: Stage) -> None:
    """Measure a server's capacity, and load one that has a target beyond it.

    Raises:
        EarshotError: a server did not start, or has no capacity.
    """
    files, stage.may_refuse = list[tuple[str, float]](), True
    for clip in stage.clips:
        if _MIN_S < clip.duration_s < _MAX_S:
            stage.files[clip.path.name] = Ask(clip.path.read_bytes(), {"language": "en"})
            files.append((clip.path.name, clip.duration_s))
    mean_s = statistics.mean(audio_s for _, audio_s in files)
    seconds = min(_SECONDS, 20 * stage.minutes)
    target_s = stage.config.gateway.target_p99_s or _TARGET_S
    before = _capacity(stage, files, seconds / 2)
    stage.say(f"capacity without a target: {before:.1f} RTFx")
    loads = {}
    with stage.server(changed(stage.config, "gateway", target_p99_s=target_s)) as server:
        for load in _LOADS:
            rng = random.Random(stage.seed)
            times_s = poisson(load * before / mean_s, seconds, stage.seed)[:-1]
            loads[load] = [OverloadClient(*rng.choice(files)) for _ in times_s]
            send = functools.partial(_try_once, stage, server, time.monotonic())
            arrivals = zip(times_s, loads[load], strict=True)
            open_loop(send, arrivals, seconds=_PATIENCE * load * seconds)
            stage.say(f"{load:.0%} of capacity done")
        server.require_unbroken()
    capacity = (before + _capacity(stage, files, seconds / 2)) / 2
    stage.add("capacity, RTFx", capacity)
    for load, clients in loads.items():
        judge(stage, f"at {load:.0%} of capacity", clients, capacity, target_s, seconds)


def judge(
    stage: Stage,
    name: str,
    clients: Sequence[OverloadClient],
    capacity: float,
    target_s: float,
    seconds: float,
) -> None:
    """Add the figures of clients that arrived within `seconds`."""
    answered = [client for client in clients if client.latency_s < math.inf]
    from_s = _WARM * seconds
    counted = [client for client in answered if from_s <= client.end_s < seconds]
    in_time_s = sum(client.audio_s for client in counted if client.latency_s <= target_s)
    goodput = in_time_s / (seconds - from_s)
    p99_s = float(np.percentile([client.latency_s for client in answered] or [_TIMEOUT_S], 99))
    stage.add(f"{name}: clients", len(clients))
    stage.at_least(f"{name}: goodput in time, RTFx", goodput, MIN_SHARE * capacity)
    stage.at_most(f"{name}: p99 of admitted requests, s", p99_s, target_s)
    stage.at_least(f"{name}: clients admitted", len(answered), MIN_SHARE * len(clients))


def _try_once(
    stage: Stage, server: RunningServer, began_s: float, client: OverloadClient
) -> float | None:
    """Send a client's file; return the seconds after which the client tries again, or None."""
    answer = stage.send(server, "OpenAI", client.file, patience_s=_TIMEOUT_S)
    if answer.kind == "answered":
        client.latency_s, client.end_s = answer.seconds, time.monotonic() - began_s
    elif answer.kind == "refused" and answer.retry_after_s is not None:
        return float(answer.retry_after_s)
    return None


def _capacity(stage: Stage, files: Sequence[tuple[str, float]], seconds: float) -> float:
    """Return the seconds of audio a second that a server without a target does.

    Counting starts when as many requests are answered as are in flight. It lasts `seconds`, and
    until twice as many are answered.
    """
    answered, stop, rng = list[OverloadClient](), threading.Event(), random.Random(stage.seed)
    at_once = 2 * stage.config.runtime.slots
    with running(changed(stage.config, "gateway", target_p99_s=0.0)) as server:
        began_s = time.monotonic()

        def work(client: OverloadClient) -> None:
            _try_once(stage, server, began_s, client)
            if client.end_s == math.inf:
                raise EarshotError("the server without a target did not answer a request")
            if not stop.is_set():
                answered.append(client)
            if client.end_s > seconds and len(answered) >= 2 * at_once:
                stop.set()

        clients = (OverloadClient(*rng.choice(files)) for _ in itertools.count())
        closed_loop(work, clients, at_once=at_once, stop=stop)
    answered.sort(key=lambda client: client.end_s)
    counted = answered[at_once:]
    audio_s = sum(client.audio_s for client in counted)
    return audio_s / (counted[-1].end_s - answered[at_once - 1].end_s)
