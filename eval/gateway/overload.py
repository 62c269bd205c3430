"""More than a server can do: is what it lets in answered in time, and is it still busy?

Its capacity is what it does for a crowd that is always there, without a target, before and after.
Then requests come at random, as many as a share of that, some of whom come back when they are told
to, of two keys of unequal greed. Live streams, which go first, speak all the time.
"""

import asyncio
import contextlib
import dataclasses
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from eval.config import Config, changed
from eval.corpora.find import find_clips
from eval.gateway.open_loop import Caller, OpenLoop, ask
from eval.record import Check, Result, Run, Say, Section, Table
from eval.server import metrics_page, samples
from serve.cli.live_client import transcribe_live
from serve.contract.errors import EarshotError
from serve.contract.keys import add_key, hash_of, new_key
from serve.contract.messages import Samples
from serve.speech.audio import decode
from serve.speech.meter import Limits
from serve.speech.rate import SAMPLE_RATE
from serve.supervisor.run import Server, for_this_machine, running_server

LEAST = 0.95
"""Of the capacity that is done in time; of who obeys, that get in."""
GREEDY, MODEST, LIVE = "greedy", "modest", "live"

_GREED = 0.8  # of all requests, that are the greedy key's
_WARM = 0.2  # of a load's time, before goodput is counted
_PATIENCE = 2.0  # times as long as requests come is waited for who was told to come back
_SHORTEST_S, _LONGEST_S = 2.0, 28.0  # clips beyond are not one window
_TIMEOUT_S = 120.0
_REST_S = 1.0  # of a live stream that was refused
_WORDS = "earshot_live_word_seconds_bucket"


@dataclasses.dataclass(frozen=True)
class Overload:
    """Figures of one load."""

    load: float  # of the capacity
    goodput: float  # seconds of audio a second, answered within the target
    capacity: float  # likewise, of both keys and without a target
    p50_s: float
    p99_s: float  # of what was let in
    came: int
    refused: int  # at least once
    obedient: int  # of the refused, that came back when they were told to
    kept: float  # of these, let in the first time that they came back
    let_in: float  # of all who obey, let in at last
    shares: Mapping[str, float]  # of the capacity, by key, while requests came
    live_p95_s: float | None  # at most so long after a word it was final; None: no stream
    failures: int
    target_s: float

    @property
    def share(self) -> float:
        """Return the goodput as a share of the capacity."""
        return self.goodput / self.capacity

    @property
    def checks(self) -> tuple[Check, ...]:
        """Check what a target promises."""
        name = f"at {self.load:.0%} of capacity"
        return (
            Check(
                f"{name}, goodput is at least {LEAST:.0%} of it",
                self.share >= LEAST,
                f"{self.goodput:.1f} of {self.capacity:.1f} RTFx, {self.share:.1%}",
            ),
            Check(
                f"{name}, p99 of what is let in is at most {self.target_s:g} s",
                self.p99_s <= self.target_s,
                f"{self.p99_s:.2f} s",
            ),
            Check(
                f"{name}, {LEAST:.0%} of who obeys Retry-After get in",
                self.let_in >= LEAST,
                f"{self.let_in:.1%}; {self.kept:.1%} of the refused at the first time told",
            ),
            Check(f"{name}, nothing fails", not self.failures, f"{self.failures} failures"),
        )


def overload(
    run: Run, *, target: float, loads: tuple[float, ...], seconds: float, obey: float, live: int
) -> Result:
    """Start servers, measure their capacity, and load them beyond it.

    Args:
        run: of the product whose server it is.
        target: gateway.target_p99_s; 0: the config's.
        loads: as shares of the capacity.
        seconds: for which requests come, of each.
        obey: share of the requests that come back when they are told to.
        live: streams beside them.

    Raises:
        EarshotError: a server did not start, or a request failed where nothing was refused.
    """
    clips, say = _clips(run.config), run.say
    target = target or run.config.gateway.target_p99_s
    if not target:
        raise EarshotError("there is no target; say --target, or gateway.target_p99_s in TOML")
    found: list[Overload] = []
    with _keys() as (path, tokens):
        config = changed(run.config, "server", keys_file=str(path))
        config = dataclasses.replace(config, server=for_this_machine(config.server))
        before = _capacity_of(config, clips, tokens, seconds / 2, live, say)
        with running_server(changed(config, "gateway", target_p99_s=target)) as server:
            for load in loads:
                rate = load * before / float(np.mean([len(c) / SAMPLE_RATE for c in clips]))
                callers = _callers(clips, tokens, rate, seconds, obey)
                with _streams(server, clips, tokens[LIVE], live):
                    words = _words(server)
                    loop = OpenLoop(callers, lambda one: ask(server.http, one, _TIMEOUT_S))
                    loop.run(_PATIENCE * max(1.0, load) * seconds)
                    late = _late(words, _words(server)) if live else None
                found.append(_figures(callers, load, before, target, seconds, late))
                say(_line(found[-1]))
            server.require_unbroken()
        after = _capacity_of(config, clips, tokens, seconds / 2, live, say)
    capacity = (before + after) / 2
    found = [dataclasses.replace(one, capacity=capacity) for one in found]
    checks = tuple(check for one in found for check in one.checks)
    figures = {"capacity_before": before, "capacity_after": after, "loads": found}
    return Result(figures, checks, (Section("Overload", [_report(found)]),))


def _clips(config: Config) -> list[Samples]:
    limits = Limits(config.transcriber.max_audio_s, 1e9, 60.0)
    clips = find_clips(config.eval.manifest).clips
    clips = [clip for clip in clips if _SHORTEST_S < clip.duration_s < _LONGEST_S]
    return [np.concatenate(list(decode(clip.path.read_bytes(), limits))) for clip in clips]


@contextlib.contextmanager
def _keys() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a file of keys; yield it, and them by their names."""
    with tempfile.TemporaryDirectory() as folder:
        path, tokens = Path(folder) / "keys.toml", {}
        for name in (GREEDY, MODEST, LIVE):
            tokens[name] = new_key()
            add_key(path, name, {"sha256": hash_of(tokens[name])})
        yield path, tokens


def _capacity_of(
    config: Config,
    clips: Sequence[Samples],
    tokens: Mapping[str, str],
    seconds: float,
    live: int,
    say: Say,
) -> float:
    """Return the seconds of audio a second that a server without a target does, beside streams.

    Raises:
        EarshotError: it did not start, or a request failed.
    """
    with running_server(changed(config, "gateway", target_p99_s=0.0)) as server:
        crowd = 2 * config.runtime.slots
        ended: list[tuple[float, Caller]] = []
        began_s = time.monotonic()
        end_s = began_s + seconds

        def go_on(number: int) -> None:
            choose = random.Random(number)
            while time.monotonic() < end_s:
                one = Caller(GREEDY, tokens[GREEDY], choose.choice(clips), 0.0, obeys=False)
                ask(server.http, one, _TIMEOUT_S)
                if one.latency_s is None:
                    raise EarshotError(f"without a target a request failed: {one.failure}")
                ended.append((time.monotonic(), one))

        with _streams(server, clips, tokens[LIVE], live), ThreadPoolExecutor(crowd) as pool:
            list(pool.map(go_on, range(crowd)))
    from_s = began_s + _WARM * seconds
    done = sum(one.seconds for at_s, one in ended if from_s <= at_s < end_s)
    if not done:
        raise EarshotError(f"nothing was answered within {seconds:g} s; try more --seconds")
    capacity = done / (end_s - from_s)
    say(f"capacity without a target, {crowd} at a time: {capacity:.1f} RTFx")
    return capacity


def _callers(
    clips: Sequence[Samples],
    tokens: Mapping[str, str],
    rate: float,
    seconds: float,
    obey: float,
) -> list[Caller]:
    """Make so many requests a second, each a little shorter than another, for so long."""
    choose = random.Random(0)
    callers: list[Caller] = []
    came_s = 0.0
    while (came_s := came_s + choose.expovariate(rate)) < seconds:
        key = GREEDY if choose.random() < _GREED else MODEST
        clip = choose.choice(clips)
        clip = clip[: len(clip) - len(callers) % (SAMPLE_RATE // 2)]
        callers.append(Caller(key, tokens[key], clip, came_s, choose.random() < obey))
    return callers


@contextlib.contextmanager
def _streams(server: Server, clips: Sequence[Samples], token: str, count: int) -> Iterator[None]:
    """Play clips to so many live streams, again and again, for the length of a `with` block."""
    loop = asyncio.new_event_loop()

    async def play(number: int) -> None:
        choose = random.Random(number)
        while True:
            blocks = [choose.choice(clips)]
            events = transcribe_live(f"ws://{server.http}", blocks, {}, key=token)
            try:
                async with contextlib.aclosing(events):
                    async for _ in events:
                        pass
            except EarshotError:  # refused, say
                await asyncio.sleep(_REST_S)

    async def play_all() -> None:
        async with asyncio.TaskGroup() as group:  # which waits for all of them to be cancelled
            for number in range(count):
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


def _words(server: Server) -> dict[float, float]:
    """Read how many words were final so long after they were said, or sooner."""
    found = samples(metrics_page(server.metrics), _WORDS)
    return {float(sample.labels["le"]): sample.value for sample in found}


def _late(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return a bound below which 95 of 100 words between two readings lie."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next(bound for bound, count in counts.items() if count >= 0.95 * total)


def _figures(
    callers: Sequence[Caller],
    load: float,
    capacity: float,
    target_s: float,
    seconds: float,
    live_s: float | None,
) -> Overload:
    from_s = _WARM * seconds
    times = [one.latency_s for one in callers if one.latency_s is not None]
    obeying = [one for one in callers if one.obeys]
    refused = [one for one in obeying if one.promised_s is not None]

    def good(key: str) -> float:
        done = sum(
            one.seconds
            for one in callers
            if one.key == key
            and one.let_in_s is not None
            and one.in_time(target_s)
            and from_s <= one.let_in_s + (one.latency_s or 0.0) < seconds
        )
        return done / (seconds - from_s)

    return Overload(
        load=load,
        goodput=good(GREEDY) + good(MODEST),
        capacity=capacity,
        p50_s=float(np.percentile(times or [np.inf], 50)),
        p99_s=float(np.percentile(times or [np.inf], 99)),
        came=len(callers),
        refused=sum(one.promised_s is not None for one in callers),
        obedient=len(refused),
        kept=sum(one.kept for one in refused) / max(1, len(refused)),
        let_in=sum(one.latency_s is not None for one in obeying) / max(1, len(obeying)),
        shares={key: good(key) / capacity for key in (GREEDY, MODEST)},
        live_p95_s=live_s,
        failures=sum(bool(one.failure) for one in callers),
        target_s=target_s,
    )


def _line(one: Overload) -> str:
    shares = ", ".join(f"{key} {share:.0%}" for key, share in one.shares.items())
    live = "" if one.live_p95_s is None else f"; live words p95 <= {one.live_p95_s:g} s"
    return (
        f"{one.load:.0%}: goodput {one.goodput:.1f} RTFx ({shares}), p50 {one.p50_s:.2f} s, p99 "
        f"{one.p99_s:.2f} s; {one.refused} of {one.came} refused; of {one.obedient} who obeyed "
        f"{one.kept:.1%} got in at once, {one.let_in:.1%} at last{live}; {one.failures} failures"
    )


def _report(found: Sequence[Overload]) -> Table:
    header = ("load", "goodput", "p99", "refused", "kept", "let in", GREEDY, MODEST, "live p95")
    rows = [
        (
            f"{one.load:.0%}",
            f"{one.share:.1%}",
            f"{one.p99_s:.2f} s",
            f"{one.refused} of {one.came}",
            f"{one.kept:.1%}",
            f"{one.let_in:.1%}",
            *(f"{one.shares[key]:.0%}" for key in (GREEDY, MODEST)),
            "" if one.live_p95_s is None else f"<= {one.live_p95_s:g} s",
        )
        for one in found
    ]
    return Table(header, rows)
