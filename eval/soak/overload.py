"""The scenario of more requests than a server can do, with a latency target.

Its capacity is the throughput for clients that are always there, without a target, before and
after. Then requests arrive at random, as many as a share of that, of two keys of unequal greed.
Some refused clients obey Retry-After. Live streams, which have priority, speak all the time.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from build.clips import Clip
from eval.clients import Ask, by_form, wav
from eval.config import Config, changed
from eval.load import closed_loop, open_loop, poisson
from eval.record import Check, Say
from eval.server import RunningServer, running, samples
from eval.soak.stage import Found
from serve.cli.live_client import transcribe_live
from serve.contract.errors import EarshotError
from serve.contract.messages import Samples
from serve.speech.audio import decode, whole
from serve.speech.meter import Limits
from serve.speech.rate import SAMPLE_RATE

MIN_SHARE = 0.95  # of the capacity that is done in time; of obedient clients that are admitted
TARGET_S = 2.0  # where gateway.target_p99_s names none
LOADS = (1.3, 3.0)  # shares of the capacity
GREEDY, MODEST, STREAMS = range(3)  # keys
_GREED = 0.8  # of all requests, that are the greedy key's
_OBEDIENT = 0.5  # of the clients
_LIVE = 2  # streams
_SECONDS = 40.0  # for which requests arrive, of each load, at most
_WARM = 0.2  # of a load's time, before goodput is counted
_PATIENCE = 2.0  # times as long as requests arrive is waited for obedient clients
_SHORTEST_S, _LONGEST_S = 2.0, 28.0  # other clips are not one window
_TIMEOUT_S = 120.0
_REST_S = 1.0  # of a live stream that was refused
_MAX_TRIES = 6  # of a client that does not obey
_APART_S = (0.05, 0.5)  # between its tries
_WORDS = "earshot_live_word_seconds_bucket"


@dataclasses.dataclass(eq=False)
class Caller:
    """One client, and what became of its request; times count from the load's start."""

    key: int
    samples: Samples
    obeys: bool  # it comes back when it is told to
    tries: int = 0
    refused: bool = False
    let_in_s: float | None = None  # when the try came that was answered
    latency_s: float | None = None  # of that try
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of its audio."""
        return len(self.samples) / SAMPLE_RATE


@dataclasses.dataclass(frozen=True)
class Overload:
    """Figures of one load."""

    load: float  # of the capacity
    goodput: float  # seconds of audio a second, answered within the target
    shares: Mapping[int, float]  # of that, by key
    p99_s: float  # of admitted requests
    came: int
    refused: int
    kept: float  # of obedient refused clients, admitted at the first time they were told
    let_in: float  # of obedient clients, admitted at last
    failures: int
    live_p95_s: float  # bound of the delay of live words


def overload(
    config: Config, clips: tuple[Clip, ...], say: Say, *, minutes: float, seed: int
) -> Found:
    """Start servers, measure their capacity, and load them beyond it.

    Raises:
        EarshotError: a server did not start, or a request failed where none was refused.
    """
    sounds, seconds = _sounds(config, clips), min(_SECONDS, 20 * minutes)
    target_s = config.gateway.target_p99_s or TARGET_S
    before = _capacity(config, sounds, seconds / 2, seed)
    say(f"overload: capacity without a target {before:.1f} RTFx")
    found = []
    with running(changed(config, "gateway", target_p99_s=target_s), keys=3) as server:
        for load in LOADS:
            found.append(_loaded(server, sounds, load, before, target_s, seconds, seed))
            say(f"overload: {found[-1]}")
        server.require_unbroken()
    capacity = (before + _capacity(config, sounds, seconds / 2, seed)) / 2
    yield "capacity, RTFx", capacity
    for one in found:
        yield from _told(one, capacity, target_s)


def _told(one: Overload, capacity: float, target_s: float) -> Found:
    name, share = f"at {one.load:.0%} of capacity", one.goodput / capacity
    yield f"{name}: goodput, RTFx", one.goodput
    yield f"{name}: p99 of admitted requests, s", one.p99_s
    yield f"{name}: requests", one.came
    yield f"{name}: refused", one.refused
    yield f"{name}: greedy key, RTFx", one.shares[GREEDY]
    yield f"{name}: modest key, RTFx", one.shares[MODEST]
    yield f"{name}: live words, p95 at most, s", one.live_p95_s
    yield Check(
        f"{name}, goodput is at least {MIN_SHARE:.0%} of it",
        share >= MIN_SHARE,
        f"{one.goodput:.1f} of {capacity:.1f} RTFx, {share:.1%}",
    )
    yield Check(
        f"{name}, p99 of admitted requests is at most {target_s:g} s",
        one.p99_s <= target_s,
        f"{one.p99_s:.2f} s",
    )
    yield Check(
        f"{name}, {MIN_SHARE:.0%} of the clients that obey Retry-After are admitted",
        one.let_in >= MIN_SHARE,
        f"{one.let_in:.1%}; {one.kept:.1%} of the refused at the first time told",
    )
    yield Check(f"{name}, nothing fails", not one.failures, f"{one.failures} failures")


def _sounds(config: Config, clips: tuple[Clip, ...]) -> list[Samples]:
    limits = Limits(config.transcriber.max_audio_s)
    fitting = [clip for clip in clips if _SHORTEST_S < clip.duration_s < _LONGEST_S]
    return [whole(decode(clip.path.read_bytes(), limits)) for clip in fitting]


def visitor(server: RunningServer, began_s: float, seed: int) -> Callable[[Caller], float | None]:
    """Return a function that tries once for a caller; it returns when the caller comes again."""
    rng = random.Random(seed)

    def visit(caller: Caller) -> float | None:
        at = dataclasses.replace(server.at, key=server.keys[caller.key])
        caller.tries += 1
        came_s = time.monotonic() - began_s
        answer = by_form(at, Ask(wav(caller.samples), {"language": "en"}, _TIMEOUT_S))
        if answer.kind == "refused" and answer.retry_after_s is not None:
            caller.refused = True
            if caller.obeys:
                return float(answer.retry_after_s)
            return rng.uniform(*_APART_S) if caller.tries < _MAX_TRIES else None
        if answer.kind == "answered":
            caller.let_in_s, caller.latency_s = came_s, answer.seconds
        else:
            caller.failure = str(answer)
        return None

    return visit


def _capacity(config: Config, sounds: Sequence[Samples], seconds: float, seed: int) -> float:
    """Return the seconds of audio a second that a server without a target does, beside streams."""
    with running(changed(config, "gateway", target_p99_s=0.0), keys=3) as server:
        rng, began_s = random.Random(seed), time.monotonic()
        visit, stop, ended = visitor(server, began_s, seed), threading.Event(), list[Caller]()

        def work(sound: Samples) -> None:
            caller = Caller(GREEDY, sound, obeys=False)
            visit(caller)
            if caller.latency_s is None:
                raise EarshotError(f"without a target a request failed: {caller.failure}")
            ended.append(caller)
            if time.monotonic() - began_s > seconds:
                stop.set()

        coming = (rng.choice(sounds) for _ in itertools.count())
        with _streams(server, sounds):
            closed_loop(work, coming, at_once=2 * config.runtime.slots, stop=stop)
    from_s = _WARM * seconds
    ends = [(one.let_in_s or 0.0) + (one.latency_s or 0.0) for one in ended]
    counted = [one for one, end in zip(ended, ends, strict=True) if from_s <= end < seconds]
    return sum(one.seconds for one in counted) / (seconds - from_s)


def _loaded(
    server: RunningServer,
    sounds: Sequence[Samples],
    load: float,
    capacity: float,
    target_s: float,
    seconds: float,
    seed: int,
) -> Overload:
    """Let requests arrive for so long, as many as a share of the capacity."""
    rng = random.Random(seed)
    rate = load * capacity / float(np.mean([len(sound) / SAMPLE_RATE for sound in sounds]))
    arrivals = []
    for due_s in poisson(rate, seconds, seed)[:-1]:
        key = GREEDY if rng.random() < _GREED else MODEST
        arrivals.append((due_s, Caller(key, rng.choice(sounds), rng.random() < _OBEDIENT)))
    with _streams(server, sounds):
        words = _words(server)
        visit = visitor(server, time.monotonic(), seed)
        open_loop(visit, arrivals, seconds=_PATIENCE * max(1.0, load) * seconds)
        late_s = late(words, _words(server))
    return figures([caller for _, caller in arrivals], load, target_s, seconds, late_s)


def figures(
    callers: Sequence[Caller], load: float, target_s: float, seconds: float, late_s: float
) -> Overload:
    """Count what became of callers that came within so many seconds."""
    from_s = _WARM * seconds
    times = [one.latency_s for one in callers if one.latency_s is not None]
    obeying = [one for one in callers if one.obeys]
    refused = [one for one in obeying if one.refused]
    shares = {GREEDY: 0.0, MODEST: 0.0}
    for one in callers:
        end_s = (one.let_in_s or 0.0) + (one.latency_s or 0.0)
        if one.latency_s is not None and one.latency_s <= target_s and from_s <= end_s < seconds:
            shares[one.key] += one.seconds / (seconds - from_s)
    return Overload(
        load=load,
        goodput=sum(shares.values()),
        shares=shares,
        p99_s=float(np.percentile(times or [np.inf], 99)),
        came=len(callers),
        refused=sum(one.refused for one in callers),
        kept=sum(one.latency_s is not None and one.tries == 2 for one in refused)
        / max(1, len(refused)),
        let_in=sum(one.latency_s is not None for one in obeying) / max(1, len(obeying)),
        failures=sum(bool(one.failure) for one in callers),
        live_p95_s=late_s,
    )


def _words(server: RunningServer) -> dict[float, float]:
    """Read the histogram of live words' delays: counts by upper bound."""
    return {float(one.labels["le"]): one.value for one in samples(server.page(), _WORDS)}


def late(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return a bound below which 95 of 100 words between two readings lie; infinite without any."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    return next((b for b, count in counts.items() if total and count >= 0.95 * total), np.inf)


@contextlib.contextmanager
def _streams(server: RunningServer, sounds: Sequence[Samples]) -> Iterator[None]:
    """Play clips to live streams, again and again, for the length of a `with` block."""
    loop = asyncio.new_event_loop()

    async def play(number: int) -> None:
        rng = random.Random(number)
        while True:
            blocks, key = [rng.choice(sounds)], server.keys[STREAMS]
            events = transcribe_live(f"ws://{server.http}", blocks, {}, key=key)
            try:
                async with contextlib.aclosing(events):
                    async for _ in events:
                        pass
            except EarshotError:  # refused, say
                await asyncio.sleep(_REST_S)

    async def play_all() -> None:
        async with asyncio.TaskGroup() as group:  # which waits for all of them to be cancelled
            for number in range(_LIVE):
                group.create_task(play(number))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(playing)

    playing = loop.create_task(play_all())
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(playing.cancel)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
