"""The scenario of more requests than a server can do, with a latency target.

The capacity is the throughput for clients that always send, without a target, before and after.
Then requests arrive at random, as many as a share of the capacity, of two keys of unequal greed.
Some rejected clients obey Retry-After. Live streams, which have priority, play all the time.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from eval.clients import Ask, by_form, wav
from eval.config import EvaluationProduct, changed
from eval.load import closed_loop, open_loop, poisson
from eval.record import Check
from eval.server import RunningServer, running, samples
from eval.soak.stage import Found, SoakSettings
from serve.cli.live_client import transcribe_live
from serve.contract.errors import EarshotError
from serve.contract.messages import Samples
from serve.speech.audio import decode, whole
from serve.speech.meter import AudioLimits
from serve.speech.rate import SAMPLE_RATE

MIN_SHARE = 0.95  # of the capacity, answered in time; of obedient clients, admitted
GREEDY, MODEST, STREAMS = range(3)  # keys
_TARGET_S = 2.0  # if gateway.target_p99_s is not set
_LOADS = (1.3, 3.0)  # shares of the capacity
_GREED = 0.8  # the greedy key's share of the requests
_OBEDIENT = 0.5  # share of the clients
_STREAMS = 2
_SECONDS = 40.0  # longest time for which requests of a load arrive
_WARM = 0.2  # share of a load's time before goodput is counted
_PATIENCE = 2.0  # times as long as requests arrive, for obedient clients
_MIN_S, _MAX_S = 2.0, 28.0  # of clips; others are not one window
_TIMEOUT_S = 600.0  # of a client: as long as the server gives a request
_REST_S = 1.0  # of a rejected live stream
_MAX_TRIES = 6  # of a client that does not obey
_APART_S = (0.05, 0.5)  # between its tries
_WORDS = "earshot_live_word_seconds_bucket"


@dataclasses.dataclass(eq=False)
class OverloadClient:
    """A client, and the outcome of its request; times count from the load's start."""

    key: int
    samples: Samples
    obeys: bool  # Retry-After
    tries: int = 0
    rejected: bool = False
    latency_s: float = math.inf  # of the try that was answered; infinite without an answer
    end_s: float = math.inf  # of that try
    failure: str = ""

    @property
    def audio_s(self) -> float:
        """Return the seconds of its audio."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def answered(self) -> bool:
        """Return whether it has a transcript."""
        return self.latency_s < math.inf


def overload(settings: SoakSettings) -> Found:
    """Start servers, measure their capacity, and load them beyond it.

    Raises:
        EarshotError: a server did not start, or a request failed without a target.
    """
    config, seed = settings.config, settings.seed
    limits = AudioLimits(config.transcriber.max_audio_s)
    fitting = [clip for clip in settings.clips if _MIN_S < clip.duration_s < _MAX_S]
    sounds = [whole(decode(clip.path.read_bytes(), limits)) for clip in fitting]
    seconds = min(_SECONDS, 20 * settings.minutes)
    target_s = config.gateway.target_p99_s or _TARGET_S
    before = _capacity(config, sounds, seconds / 2, seed)
    settings.say(f"overload: capacity without a target {before:.1f} RTFx")
    ended = {}
    with running(changed(config, "gateway", target_p99_s=target_s), keys=3) as server:
        for load in _LOADS:
            ended[load] = _loaded(server, sounds, load * before, seconds, load, seed)
            settings.say(f"overload: {load:.0%} of capacity done")
        server.require_unbroken()
    capacity = (before + _capacity(config, sounds, seconds / 2, seed)) / 2
    yield "capacity, RTFx", capacity
    for load, (clients, late_s) in ended.items():
        name = f"at {load:.0%} of capacity"
        yield f"{name}: live words, p95 at most, s", late_s
        yield from figures(name, clients, capacity, target_s, seconds)


def figures(
    name: str, clients: Sequence[OverloadClient], capacity: float, target_s: float, seconds: float
) -> Found:
    """Yield figures and checks of clients that arrived within `seconds`."""
    from_s = _WARM * seconds
    times = [one.latency_s for one in clients if one.answered]
    p99_s = float(np.percentile(times or [math.inf], 99))
    obeying = [one for one in clients if one.obeys]
    rejected = [one for one in obeying if one.rejected]
    counted = [
        one for one in clients if one.latency_s <= target_s and from_s <= one.end_s < seconds
    ]
    rtfx = [
        sum(one.audio_s for one in counted if one.key == key) / (seconds - from_s)
        for key in (GREEDY, MODEST)
    ]
    goodput = sum(rtfx)
    admitted = sum(one.answered for one in obeying) / max(1, len(obeying))
    at_once = sum(one.answered and one.tries == 2 for one in rejected)
    failures = [one.failure for one in clients if one.failure]
    yield f"{name}: goodput, RTFx", goodput
    yield f"{name}: p99 of admitted requests, s", p99_s
    yield f"{name}: requests", len(clients)
    yield f"{name}: rejected", sum(one.rejected for one in clients)
    for key, value in zip(("greedy", "modest"), rtfx, strict=True):
        yield f"{name}: {key} key, RTFx", value
    yield Check(
        f"{name}, goodput is at least {MIN_SHARE:.0%} of it",
        goodput >= MIN_SHARE * capacity,
        f"{goodput:.1f} of {capacity:.1f} RTFx, {goodput / capacity:.1%}",
    )
    yield Check(
        f"{name}, p99 of admitted requests is at most {target_s:g} s",
        p99_s <= target_s,
        f"{p99_s:.2f} s",
    )
    yield Check(
        f"{name}, {MIN_SHARE:.0%} of the clients that obey Retry-After are admitted",
        admitted >= MIN_SHARE,
        f"{admitted:.1%}; {at_once} of {len(rejected)} rejected ones at their second try",
    )
    yield Check(f"{name}, nothing fails", not failures, f"{len(failures)}: {failures[:1]}")


def try_once(
    server: RunningServer, began_s: float, seed: int
) -> Callable[[OverloadClient], float | None]:
    """Return a function that tries once for a client, and returns when the client tries again."""
    rng = random.Random(seed)

    def attempt(client: OverloadClient) -> float | None:
        at = dataclasses.replace(server.at, key=server.keys[client.key])
        client.tries += 1
        came_s = time.monotonic() - began_s
        answer = by_form(at, Ask(wav(client.samples), {"language": "en"}, _TIMEOUT_S))
        if answer.kind == "refused" and answer.retry_after_s is not None:
            client.rejected = True
            if client.obeys:
                return float(answer.retry_after_s)
            return rng.uniform(*_APART_S) if client.tries < _MAX_TRIES else None
        if answer.kind == "answered":
            client.latency_s, client.end_s = answer.seconds, came_s + answer.seconds
        else:
            client.failure = str(answer)
        return None

    return attempt


def _capacity(
    config: EvaluationProduct, sounds: Sequence[Samples], seconds: float, seed: int
) -> float:
    """Measure the throughput, seconds of audio a second, of a server without a target.

    Counting starts once as many requests are answered as are in flight. It ends after `seconds`,
    but not before twice as many are answered.
    """
    at_once, ended = 2 * config.runtime.slots, list[OverloadClient]()
    with running(changed(config, "gateway", target_p99_s=0.0), keys=3) as server:
        rng, began_s, stop = random.Random(seed), time.monotonic(), threading.Event()
        attempt = try_once(server, began_s, seed)

        def work(sound: Samples) -> None:
            client = OverloadClient(GREEDY, sound, obeys=False)
            attempt(client)
            if not client.answered:
                raise EarshotError(f"without a target a request failed: {client.failure}")
            if not stop.is_set():
                ended.append(client)
            if client.end_s > seconds and len(ended) >= 2 * at_once:
                stop.set()

        coming = (rng.choice(sounds) for _ in itertools.count())
        with _streams(server, sounds):
            closed_loop(work, coming, at_once=at_once, stop=stop)
    ended.sort(key=lambda one: one.end_s)
    counted = ended[at_once:]
    return sum(one.audio_s for one in counted) / (counted[-1].end_s - ended[at_once - 1].end_s)


def _loaded(
    server: RunningServer,
    sounds: Sequence[Samples],
    rtfx: float,
    seconds: float,
    load: float,
    seed: int,
) -> tuple[list[OverloadClient], float]:
    """Send requests of so much audio a second; return the clients, and the delay of live words."""
    rng = random.Random(seed)
    rate = rtfx / float(np.mean([len(sound) / SAMPLE_RATE for sound in sounds]))
    arrivals = []
    for due_s in poisson(rate, seconds, seed)[:-1]:
        key = GREEDY if rng.random() < _GREED else MODEST
        client = OverloadClient(key, rng.choice(sounds), rng.random() < _OBEDIENT)
        arrivals.append((due_s, client))
    with _streams(server, sounds):
        words = _words(server)
        attempt = try_once(server, time.monotonic(), seed)
        open_loop(attempt, arrivals, seconds=_PATIENCE * max(1.0, load) * seconds)
        late_s = p95_bound(words, _words(server))
    return [client for _, client in arrivals], late_s


def _words(server: RunningServer) -> dict[float, float]:
    """Read the histogram of live words' delays: counts by upper bound."""
    return {float(one.labels["le"]): one.value for one in samples(server.page(), _WORDS)}


def p95_bound(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return a bound of the 95th percentile between two readings; infinite without any values."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    return next((b for b, count in counts.items() if total and count >= 0.95 * total), math.inf)


@contextlib.contextmanager
def _streams(server: RunningServer, sounds: Sequence[Samples]) -> Iterator[None]:
    """Play clips to live streams in a loop during a `with` block."""
    stop, key = threading.Event(), server.keys[STREAMS]

    async def play(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            events = transcribe_live(f"ws://{server.http}", [rng.choice(sounds)], {}, key=key)
            try:
                async with contextlib.aclosing(events):
                    async for _ in events:
                        if stop.is_set():
                            return
            except EarshotError:  # rejected
                await asyncio.sleep(_REST_S)

    async def play_all() -> None:
        await asyncio.gather(*(play(number) for number in range(_STREAMS)))

    thread = threading.Thread(target=asyncio.run, args=(play_all(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
