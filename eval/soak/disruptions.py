"""Disruptions of a server's processes: kills, stalls, and the loss of what they need."""

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from eval.clients import Answer, Ask, by_grpc, by_stream
from eval.config import EvaluationProduct
from eval.soak.stage import Stage

MAX_RECOVERY_S = 90.0
_ROLES = ("sandbox", "gateway", "whisper", "tritonserver")
_DURATION_S = 4.0  # of a disruption that ends by itself
_STEADY_S = 3.0  # the same processes answered for so long: the server has recovered
_LOOK_S = 0.5
_ASK_S = 20.0


@dataclasses.dataclass
class DisruptionInterval:
    """The time of a disruption by the monotonic clock; `end_s` is infinite until it has ended."""

    name: str
    begin_s: float
    end_s: float = float("inf")

    def meets(self, begin_s: float, end_s: float) -> bool:
        """Return whether another interval overlaps it."""
        return begin_s <= self.end_s and end_s >= self.begin_s


class NothingToDisruptError(Exception):
    """The process of a role does not run."""


def with_link(config: EvaluationProduct, folder: Path) -> EvaluationProduct:
    """Return the config with a link to its engine, which can be removed."""
    link = folder / "engine"
    link.symlink_to(Path(config.engine).absolute(), target_is_directory=True)
    return dataclasses.replace(config, engine=str(link))


def disruptions(seed: int) -> Iterator[tuple[str, Callable[[Stage], None]]]:
    """Yield all of them again and again, each time in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(list(_KINDS.items()), len(_KINDS))


def recover(stage: Stage) -> tuple[float, Answer]:
    """Wait until the server has recovered; return the seconds and the last answer."""
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


def _kill(role: str, stage: Stage) -> None:
    _process(stage, role).kill()


def _stall(role: str, stage: Stage) -> None:
    victim = _process(stage, role)
    victim.suspend()
    try:
        time.sleep(_DURATION_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()


def _limit(limit: int, value: Callable[[psutil.Process], int], stage: Stage) -> None:
    """Lower a resource limit of the gateway for a while."""
    victim = _process(stage, "gateway")
    before = victim.rlimit(limit)
    victim.rlimit(limit, (value(victim), before[1]))
    try:
        time.sleep(_DURATION_S)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.rlimit(limit, before)


def _remove_engine(stage: Stage) -> None:
    """Remove the engine's folder while the process that has it is started again."""
    link = Path(stage.server.config.engine)
    target = link.readlink()
    link.unlink()
    try:
        with contextlib.suppress(NothingToDisruptError):
            _kill("whisper", stage)
        time.sleep(_DURATION_S)
    finally:
        link.symlink_to(target, target_is_directory=True)


def _process(stage: Stage, role: str) -> psutil.Process:
    process = stage.server.processes().get(role)
    if process is None:
        raise NothingToDisruptError(f"there is no process {role}")
    return process


_KINDS: dict[str, Callable[[Stage], None]] = {
    **{f"{role} killed": functools.partial(_kill, role) for role in _ROLES},
    **{f"{role} stopped for {_DURATION_S:g} s": functools.partial(_stall, role) for role in _ROLES},
    "a full disk": functools.partial(_limit, psutil.RLIMIT_FSIZE, lambda _: 0),
    "no descriptors left": functools.partial(_limit, psutil.RLIMIT_NOFILE, psutil.Process.num_fds),
    "the engine's folder gone": _remove_engine,
}
