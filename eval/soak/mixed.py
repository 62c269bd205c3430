"""Everything at once: honest clients of every API, hostile ones, and disruptions early on.

The seed and the number of an action determine what its client does.
"""

import contextlib
import functools
import itertools
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import psutil

from eval.clients import CLIENTS, PATIENCE_S
from eval.config import changed
from eval.load import closed_loop
from eval.processes import slope
from eval.server import RunningServer, samples, total
from eval.soak.attacks import ATTACKS
from eval.soak.stage import Stage, crowd
from serve.contract.errors import EarshotError

MAX_RECOVERY_S = 90.0
MAX_GROWTH_KB = 4.0  # per action: a million, 4 GB; a process keeps pages in MBs
MAX_DESCRIPTORS = 0.005  # growth per action: one in 200
_MIN_SAMPLES = 12
_MIN_ACTIONS = 2000  # seen by a process before its growth is judged
_AT_ONCE = 8
_HOSTILE_SHARE, _CANCELLED_SHARE = 0.1, 0.2
_PATIENCE_S = (0.005, 1.0)  # patience of a client that leaves before its answer
_PAUSE_S = 0.3  # after a request without an answer
_DISRUPTED, _WARM = 0.2, 1 / 3  # shares of the run: the end of disruptions, the start of sampling
_LOOK_S = 1.0
_KEYS = 20
_JOB_S = 300.0  # the patience for a job, which waits for requests
_RETENTION_S = 60.0  # from a job's end to its removal, so that as many go as come
_SETTLE_S = 30.0  # for the server's counts to be even without requests
_GONE_S = 2 * PATIENCE_S + _JOB_S  # for the last clients to end


# ---------------------------------------------------------------- disruptions

_ROLES = ("sandbox", "gateway", "whisper", "tritonserver")
_APART_S = 3.0  # between two disruptions
_DURATION_S = 4.0  # length of a disruption that ends by itself
_STEADY_S = 3.0  # the same processes answered for so long: the server has recovered
_ASK_S = 20.0


def _kill(role: str, server: RunningServer) -> None:
    server.processes()[role].kill()


def _stall(role: str, server: RunningServer) -> None:
    victim = server.processes()[role]
    victim.suspend()
    time.sleep(_DURATION_S)
    victim.resume()


def _limit(resource: int, used: Callable[[psutil.Process], int], server: RunningServer) -> None:
    """Allow the gateway no more of a resource than it uses, for a while."""
    victim = server.processes()["gateway"]
    before = victim.rlimit(resource)
    victim.rlimit(resource, (used(victim), before[1]))
    time.sleep(_DURATION_S)
    victim.rlimit(resource, before)


DISRUPTIONS: dict[str, Callable[[RunningServer], None]] = {
    **{f"{role} killed": functools.partial(_kill, role) for role in _ROLES},
    **{f"{role} stopped for {_DURATION_S:g} s": functools.partial(_stall, role) for role in _ROLES},
    "a full disk": functools.partial(_limit, psutil.RLIMIT_FSIZE, lambda _: 0),
    "no descriptors left": functools.partial(_limit, psutil.RLIMIT_NOFILE, psutil.Process.num_fds),
}
"""Disruptions of a server by name; a function raises KeyError if there is no such process."""


def _recover(stage: Stage, server: RunningServer) -> float:
    """Wait until both of KServe's models answer from the same processes; return the seconds."""
    began_s = steady_since_s = time.monotonic()
    pids = server.pids()
    while time.monotonic() - began_s < MAX_RECOVERY_S and server.process.status() is None:
        apis = ("KServe gRPC", "KServe stream")
        answers = [stage.send(server, api, patience_s=_ASK_S) for api in apis]
        former_pids, pids = pids, server.pids()
        if pids != former_pids or any(answer.kind != "answered" for answer in answers):
            steady_since_s = time.monotonic()
        elif time.monotonic() - steady_since_s >= _STEADY_S:
            return time.monotonic() - began_s
        time.sleep(_PAUSE_S)
    return float("inf")


# ---------------------------------------------------------------- actions


def mixed(stage: Stage) -> None:
    """Send in quiet, soak, and check that everything has ended.

    Raises:
        EarshotError: the server did not start, does not hold, or leaves clients without an answer.
    """
    stage.may_refuse, stopped = True, threading.Event()
    with tempfile.TemporaryDirectory(prefix="earshot-soak-") as name, crowd(1) as pool:
        config = changed(stage.config, "jobs", folder=f"{name}/jobs", keep_s=_RETENTION_S)
        with stage.server(config, keys=_KEYS) as server:
            for api, file in itertools.product(CLIENTS, stage.files):
                answer = stage.send(server, api, file)
                if answer.kind != "answered":
                    raise EarshotError(f"{api}, {file}, without load: {answer}")
            act = functools.partial(_act, stage, server, stopped)
            clients = pool.submit(
                closed_loop, act, itertools.count(), at_once=_AT_ONCE, stop=stopped
            )
            try:
                began_s, duration_s = time.monotonic(), 60 * stage.minutes
                _disrupt(stage, server, clients, began_s + _DISRUPTED * duration_s)
                warm_s, end_s = began_s + _WARM * duration_s, began_s + duration_s
                _measure_growth(stage, server, clients, warm_s, end_s)
            finally:
                stopped.set()
            if not wait([clients], _GONE_S).done:
                raise EarshotError(f"clients have no answer after {_GONE_S:g} s")
            clients.result()
            end_s = time.monotonic() + _SETTLE_S
            while (complaints := uneven(server.page())) and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
            stage.none_of("uneven counts of the server", complaints)


def _act(stage: Stage, server: RunningServer, stopped: threading.Event, number: int) -> None:
    rng = random.Random(f"{stage.seed}/{number}")
    if rng.random() < _HOSTILE_SHARE:
        answer = stage.attack(server, rng.choice(list(ATTACKS)))
    else:
        api, patient = rng.choice(list(CLIENTS)), rng.random() >= _CANCELLED_SHARE
        patience_s = _JOB_S if api == "job" else PATIENCE_S
        answer = stage.send(
            server,
            api,
            rng.choice(list(stage.files)),
            addresses=rng.choice(server.addresses),
            patience_s=patience_s if patient else rng.uniform(*_PATIENCE_S),
        )
    if answer.kind in ("lost", "refused"):
        stopped.wait(_PAUSE_S)


def _goes_on(server: RunningServer, clients: Future[None], end_s: float) -> bool:
    """Return whether the server and its clients are at work, and there is time left."""
    return time.monotonic() < end_s and not clients.done() and server.process.status() is None


def _disrupt(stage: Stage, server: RunningServer, clients: Future[None], end_s: float) -> None:
    """Disrupt the server again and again; add the slowest recovery."""
    names = random.Random(stage.seed).sample(list(DISRUPTIONS), len(DISRUPTIONS))
    recoveries = list[tuple[float, str]]()
    for name in itertools.cycle(names):
        time.sleep(_APART_S)
        if not _goes_on(server, clients, end_s):
            break
        with stage.disruption():
            with contextlib.suppress(KeyError, psutil.NoSuchProcess):
                DISRUPTIONS[name](server)
            recoveries.append((_recover(stage, server), name))
        stage.say(f"{name}: recovered after {recoveries[-1][0]:.0f} s")
    stage.add("disruptions", len(recoveries))
    slowest_s, name = max(recoveries, default=(0.0, ""))
    stage.at_most("slowest recovery, s", slowest_s, MAX_RECOVERY_S, name)


def _measure_growth(
    stage: Stage, server: RunningServer, clients: Future[None], warm_s: float, end_s: float
) -> None:
    """Add the growth of each process under load from `warm_s` on."""
    # Requests so far, KB of memory and descriptors, by role and process.
    measured = defaultdict[tuple[str, int], list[tuple[float, float, float]]](list)
    while _goes_on(server, clients, end_s):
        time.sleep(_LOOK_S)
        if time.monotonic() < warm_s:
            continue
        for role, process in server.processes().items():
            with contextlib.suppress(psutil.Error):
                memory_kb, descriptors = process.memory_info().rss / 1024, process.num_fds()
                measurement = len(stage.outcomes), memory_kb, descriptors
                measured[role, process.pid].append(measurement)
    for (role, _), measurements in measured.items():
        judge_growth(stage, role, measurements)


def judge_growth(
    stage: Stage, role: str, measurements: Sequence[tuple[float, float, float]]
) -> None:
    """Add the growth per action of a process.

    Args:
        stage: receives the figures.
        role: the process's name.
        measurements: actions so far, KB of memory, number of descriptors.
    """
    actions, memory_kb, descriptors = zip(*measurements, strict=True)
    count = actions[-1] - actions[0]
    if len(measurements) < _MIN_SAMPLES or not count:
        return
    for name, values, limit in (
        ("growth of memory, KB an action", memory_kb, MAX_GROWTH_KB),
        ("growth of descriptors, an action", descriptors, MAX_DESCRIPTORS),
    ):
        growth, error = slope(actions, values)
        decided = count >= _MIN_ACTIONS and abs(growth - limit) >= error
        passed = growth <= limit if decided else None
        detail = f"{growth:.4f} ± {error:.4f} in {count:g} actions"
        stage.add(f"{role}: {name}", growth, f"at most {limit:g}", passed, detail)


_PENDING = (
    "pending_requests",
    "live_streams",
    "gateway_inflight_requests",
    "gateway_inflight_bytes",
    "gateway_inflight_upload_bytes",
)


def uneven(page: str) -> list[str]:
    """Describe the pending requests in the server's metrics; [] if every request has its answer."""
    pending = {name: total(page, f"earshot_{name}") for name in _PENDING}
    outcomes = samples(page, "earshot_requests_total")
    accepted = total(page, "earshot_accepted_total")
    ended = sum(sample.value for sample in outcomes if sample.labels["outcome"] != "rejected")
    complaints = [f"{name} is {value:g}" for name, value in pending.items() if value]
    if not outcomes:
        complaints.append("the page has no outcomes")
    if accepted != ended:
        complaints.append(f"{accepted:g} were accepted and {ended:g} ended")
    return complaints
