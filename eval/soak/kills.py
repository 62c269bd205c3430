"""Scenarios of processes that die or stand still: everything ends once, and comes back."""

import contextlib
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

from eval.soak.client import WAYS, Ending, counted, crowd, endings
from eval.soak.stage import Stage
from eval.soak.steady import Found
from eval.soak.verdict import Check

MAX_RECOVERY_S = 60.0
_ROLES = ("tritonserver", "whisper", "whisper_stream", "gateway")
_IN_FLIGHT = 9
_TIMEOUT_S = 90.0
_STALL_S = 4.0


def kills(stage: Stage, minutes: float) -> Found:
    """`kill -9` of each process below the supervisor in turn, with requests in flight."""
    del minutes
    yield Check("the gateway is a process of its own", "gateway" in stage.processes(), _who(stage))
    for role in _ROLES:
        yield from _kill(stage, role)


def _kill(stage: Stage, role: str) -> Found:
    victim = stage.processes().get(role)
    if victim is None:
        yield Check(f"{role} is there to be killed", None, _who(stage))
        return
    with crowd(_IN_FLIGHT) as pool:
        calls = _in_flight(stage, pool)
        victim.kill()
        recovered_s, last = stage.answers_again(MAX_RECOVERY_S)
        found = endings(calls)
    stage.say(f"kills: {role}: {counted(found)}; {last.kind} after {recovered_s:.1f} s")
    # The reply of `by_stream` is checked to have one last message; gRPC and HTTP have one reply.
    ended = not any(ending.waited_in_vain for ending in found)
    yield Check(f"{role} killed: every request in flight has an ending", ended, counted(found))
    if last.kind == "answered":
        yield f"{role} killed: answers again after, s", recovered_s
    yield Check(
        f"{role} killed: answers again within {MAX_RECOVERY_S:g} s",
        last.kind == "answered",
        f"after {recovered_s:.1f} s: {last}",
    )


def stall(stage: Stage, minutes: float) -> Found:
    """Each model's process stands still for 4 s while requests arrive.

    Triton gives a model's process up that takes nothing for a second, which no option changes, so
    it may be started again; but nobody may wait for it in vain.
    """
    del minutes
    for role in ("whisper", "whisper_stream"):
        victim = stage.processes().get(role)
        if victim is None:
            yield Check(f"{role} is there to be stalled", False, _who(stage))
            return
        with crowd(_IN_FLIGHT) as pool:
            victim.suspend()
            try:
                calls = _in_flight(stage, pool)
                time.sleep(_STALL_S)
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.resume()
            recovered_s, last = stage.answers_again(MAX_RECOVERY_S)
            found = endings(calls)
        stage.say(f"stall: {role}: {counted(found)}; {last.kind} after {recovered_s:.1f} s")
        clear = all(ending.kind in ("answered", "refused") for ending in found)
        yield Check(f"{role} stalled: each is answered or refused", clear, counted(found))
        yield f"{role} stalled: answers again after, s", recovered_s
        yield Check(
            f"{role} stalled: answers again within {MAX_RECOVERY_S:g} s",
            last.kind == "answered",
            f"after {recovered_s:.1f} s: {last}",
        )


def _in_flight(stage: Stage, pool: ThreadPoolExecutor) -> list[Future[Ending]]:
    """Requests of every kind, long enough to be in flight when this returns."""
    longest = sorted(stage.clips, key=lambda clip: -clip.duration_s)[:3]
    files = itertools.cycle(clip.path.read_bytes() for clip in longest)
    ways = itertools.cycle(WAYS)
    calls = [pool.submit(next(ways), stage.at, next(files), _TIMEOUT_S) for _ in range(_IN_FLIGHT)]
    time.sleep(1.0)
    return calls


def _who(stage: Stage) -> str:
    return ", ".join(f"{name} {process.pid}" for name, process in stage.processes().items())
