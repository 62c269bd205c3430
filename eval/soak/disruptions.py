"""Disruptions of the processes now and then: kills, stalls, and the loss of what they need."""

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from eval.clients import Answer, Ask, by_grpc, by_stream
from eval.config import Config
from eval.soak.stage import Stage

MAX_RECOVERY_S = 90.0
_ROLES = ("sandbox", "gateway", "whisper", "tritonserver")
_LASTS_S = 4.0  # of what ends by itself
_STEADY_S = 3.0  # answered for so long by the same processes: it is over
_LOOK_S = 0.5
_ASK_S = 20.0


@dataclasses.dataclass
class Span:
    """A disruption of the server, by the monotonic clock; `end_s` is infinite meanwhile."""

    what: str
    begin_s: float
    end_s: float = float("inf")

    def meets(self, begin_s: float, end_s: float) -> bool:
        """Return whether what went on then was under way in it."""
        return begin_s <= self.end_s and end_s >= self.begin_s


class Unable(Exception):
    """There was nothing to do it to."""


def with_link(config: Config, folder: Path) -> Config:
    """Return the config with a link to its engine, which can go."""
    link = folder / "engine"
    link.symlink_to(Path(config.engine).absolute(), target_is_directory=True)
    return dataclasses.replace(config, engine=str(link))


def disruptions(seed: int) -> Iterator[tuple[str, Callable[[Stage], None]]]:
    """Yield all of them over and over, each time in an order of their own."""
    rng = random.Random(seed)
    kinds = list(_KINDS.items())
    for _ in itertools.count():
        yield from rng.sample(kinds, len(kinds))


def recover(stage: Stage) -> tuple[float, Answer]:
    """Wait until the server is itself again; the seconds, and the last answer."""
    began = steady_s = time.monotonic()
    pids, last = stage.server.pids(), Answer("lost", "not asked yet", 0.0)
    while time.monotonic() - began < MAX_RECOVERY_S and stage.server.process.poll() is None:
        for send in (by_grpc, by_stream):
            last = send(stage.at, Ask(stage.short, patience_s=_ASK_S))
            if last.kind != "answered":
                break
        now = stage.server.pids()
        if last.kind != "answered" or now != pids:
            pids, steady_s = now, time.monotonic()
        elif time.monotonic() - steady_s >= _STEADY_S:
            break
        time.sleep(_LOOK_S)
    return time.monotonic() - began, last


# ---------------------------------------------------------------- what there is


def _kill(role: str) -> Callable[[Stage], None]:
    def act(stage: Stage) -> None:
        _found(stage, role).kill()

    return act


def _stall(role: str) -> Callable[[Stage], None]:
    def act(stage: Stage) -> None:
        victim = _found(stage, role)
        victim.suspend()
        try:
            time.sleep(_LASTS_S)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()

    return act


def _limited(
    role: str, limit: int, value: Callable[[psutil.Process], int]
) -> Callable[[Stage], None]:
    def act(stage: Stage) -> None:
        victim = _found(stage, role)
        before = victim.rlimit(limit)
        victim.rlimit(limit, (value(victim), before[1]))
        try:
            time.sleep(_LASTS_S)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.rlimit(limit, before)

    return act


def _engine_goes(stage: Stage) -> None:
    """Take the engine's folder away while the process that has it is started again."""
    link = Path(stage.config.engine)
    target = link.readlink()
    link.unlink()
    try:
        with contextlib.suppress(Unable):
            _found(stage, "whisper").kill()
        time.sleep(_LASTS_S)
    finally:
        link.symlink_to(target, target_is_directory=True)


def _found(stage: Stage, role: str) -> psutil.Process:
    process = stage.server.processes().get(role)
    if process is None:
        raise Unable(f"{role} was not there")
    return process


_KINDS: dict[str, Callable[[Stage], None]] = {
    **{f"{role} killed": _kill(role) for role in _ROLES},
    **{f"{role} stopped for {_LASTS_S:g} s": _stall(role) for role in _ROLES},
    "a full disk": _limited("gateway", psutil.RLIMIT_FSIZE, lambda _: 0),
    "no descriptors left": _limited("gateway", psutil.RLIMIT_NOFILE, psutil.Process.num_fds),
    "the engine's folder gone": _engine_goes,
}
