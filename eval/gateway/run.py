"""Asks a real server for the same clips by several ways in turn, so that noise meets all alike."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from build.clips import Clip
from eval.config import changed
from eval.corpora.find import find_clips
from eval.gateway.connections import Idle, Kept, measure_idle, measure_kept
from eval.gateway.floods import Flood, measure_floods
from eval.gateway.ways import KSERVE, OPENAI, TRITON, Ask, by_form, by_grpc, straight
from eval.measurement import Check, Result, Run, Say
from eval.processes import descendants
from eval.server import by_role, cpu_s
from serve.contract.errors import EarshotError
from serve.supervisor.run import for_this_machine, running_server
from serve.wire.folder import engine_links, grpc_target

LEAST = 0.95  # of the throughput straight to Triton
MOST = 2.0  # times as long as in quiet that a short clip waits for its text beside a flood
SHORT_S = 2.0
DRAWS = 4000  # of a bootstrap

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Way:
    """Figures of a way to a transcript."""

    name: str
    rtfx: float  # median of the passes
    share: float  # of what goes straight to Triton, by all passes together
    interval: tuple[float, float]  # of the share, 95 %, by a bootstrap over rounds of passes
    gateway_ms: float  # of processor time of the gateway, for each request
    server_ms: float  # and of all processes, which other work on the machine disturbs less

    def __str__(self) -> str:
        """Write a line of the report."""
        return (
            f"{self.name:20} {self.rtfx:6.1f} RTFx  {100 * self.share:6.1f} % "
            f"[{100 * self.interval[0]:.1f}, {100 * self.interval[1]:.1f}]  CPU a request: gateway "
            f"{self.gateway_ms:.1f} ms, all {self.server_ms:.0f} ms"
        )


@dataclasses.dataclass(frozen=True)
class Cost:
    """All that was measured."""

    ways: tuple[Way, ...]
    kept: Kept
    idle: tuple[Idle, ...]
    floods: tuple[Flood, ...]  # the first is none

    @property
    def checks(self) -> tuple[Check, ...]:
        """Check that the gateway takes no more than it may, and no flood keeps others waiting."""
        quiet_ms, least = self.floods[0].median_ms, f"at least {LEAST:.0%} of it straight to Triton"
        return (
            *(
                Check(f"throughput by {way.name}, {least}", way.share >= LEAST, f"{way.share:.1%}")
                for way in self.ways[1:]
            ),
            *(
                Check(
                    f"a text beside {flood.name}, at most {MOST:g} times as late as in quiet",
                    flood.median_ms <= MOST * quiet_ms and not flood.failures,
                    f"{flood.median_ms:.0f} ms against {quiet_ms:.0f}, {flood.failures} failures",
                )
                for flood in self.floods
            ),
        )


def gateway(run: Run, *, at_once: int, passes: int, connections: int, seconds: float) -> Result:
    """Start a server and measure its gateway.

    Args:
        run: of the product whose server it is.
        at_once: requests at a time.
        passes: how often each way gets all clips.
        connections: that do nothing, of each kind.
        seconds: for which they do.

    Raises:
        EarshotError: the server did not start, or a request failed.
    """
    config, say = run.config, run.say
    clips = sorted(find_clips(config.eval.manifest).clips, key=lambda clip: -clip.duration_s)
    measured = changed(config, "live", max_streams=10_000)
    measured = dataclasses.replace(measured, server=for_this_machine(config.server))
    limit_s = config.transcriber.request_timeout_s
    with running_server(measured) as server, contextlib.ExitStack() as stack:
        ways = {
            TRITON: stack.enter_context(
                straight(grpc_target(engine_links(server.folder, 1)[0]), limit_s)
            ),
            KSERVE: stack.enter_context(by_grpc(server.grpc, limit_s)),
            OPENAI: stack.enter_context(by_form(server.http, limit_s)),
        }
        process = gateway_process()
        measured_ways = measure_ways(ways, clips, at_once, passes, process, say)
        for way in measured_ways:
            say(str(way))
        kept = measure_kept(server.http)
        say(str(kept))
        idle = _shown(measure_idle(server, process, connections, seconds), say)
        floods = _shown(measure_floods(server.http, ways[OPENAI], _short(clips), seconds), say)
        server.require_unbroken()
    cost = Cost(tuple(measured_ways), kept, idle, floods)
    return Result(cost, cost.checks)


def _shown(figures: Iterable[T], say: Say) -> tuple[T, ...]:
    """Return all figures, each of them said as it comes."""
    kept = []
    for figure in figures:
        say(str(figure))
        kept.append(figure)
    return tuple(kept)


def _short(clips: Sequence[Clip]) -> bytes:
    return min(clips, key=lambda clip: abs(clip.duration_s - SHORT_S)).path.read_bytes()


def gateway_process() -> psutil.Process:
    """Find the gateway that this process has started.

    Raises:
        EarshotError: there is none.
    """
    for role, process in by_role(os.getpid()):
        if role == "gateway":
            return process
    raise EarshotError("the gateway's process is not there")


def measure_ways(
    ways: Mapping[str, Ask],
    clips: Sequence[Clip],
    at_once: int,
    passes: int,
    process: psutil.Process,
    say: Say,
) -> list[Way]:
    """Give each way all clips, some at a time, as often as there are passes, in turn.

    Args:
        ways: by their names; the first is what the others are compared with.
        clips: what is sent, in this order.
        at_once: requests at a time.
        passes: those that count; one goes before them.
        process: the gateway's.
        say: gets a line of progress at a time.

    Raises:
        EarshotError: a request failed.
    """
    audio_s = sum(clip.duration_s for clip in clips)
    files = [clip.path.read_bytes() for clip in clips]
    took_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = {name: np.zeros(2) for name in ways}  # of the gateway, and of all
    with ThreadPoolExecutor(at_once) as pool:
        for number, name in _in_turn(list(ways), passes):
            spent, began_s = _cpu_s(process), time.perf_counter()
            list(pool.map(ways[name], files))
            took = time.perf_counter() - began_s
            if number:
                took_s[name].append(took)
                cpu_s[name] += _cpu_s(process) - spent
            say(f"{'pass' if number else 'warm-up'} {number}: {name}: {audio_s / took:.1f} RTFx")
    straight = took_s[next(iter(ways))]
    return [
        Way(
            name,
            rtfx=audio_s / float(np.median(took)),
            share=sum(straight) / sum(took),
            interval=interval_of(straight, took),
            gateway_ms=1e3 * float(cpu_s[name][0]) / (passes * len(clips)),
            server_ms=1e3 * float(cpu_s[name][1]) / (passes * len(clips)),
        )
        for name, took in took_s.items()
    ]


def _in_turn(names: Sequence[str], passes: int) -> Iterator[tuple[int, str]]:
    """Yield the number and the way of each pass; no way is always the first of a round."""
    for number in range(passes + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def interval_of(straight_s: Sequence[float], took_s: Sequence[float]) -> tuple[float, float]:
    """Bootstrap the interval of a way's share, 95 %; its passes are paired by their rounds."""
    both = np.array([straight_s, took_s])
    draws = np.random.default_rng(0).integers(both.shape[1], size=(DRAWS, both.shape[1]))
    sums = both[:, draws].sum(axis=2)
    low, high = np.percentile(sums[0] / sums[1], [2.5, 97.5])
    return float(low), float(high)


def _cpu_s(gateway: psutil.Process) -> npt.NDArray[np.float64]:
    """Return processor time so far of the gateway, and of all processes below this one."""
    return np.array([cpu_s(gateway), sum(map(cpu_s, descendants(os.getpid())))])
