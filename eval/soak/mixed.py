"""Everything at once: honest clients of every API, hostile ones, and disruptions early on.

The seed and the number of an action determine what its client does.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
from tqdm import tqdm

from eval.clients import CLIENTS, PATIENCE_S, Answer, Ask, by_grpc, by_stream, lost
from eval.config import EvaluationProduct, changed
from eval.load import closed_loop
from eval.processes import resident_bytes, slope
from eval.record import Check
from eval.server import samples, total
from eval.soak.attacks import ATTACKS
from eval.soak.stage import Found, SoakSettings, Stage, crowd, files_of, stage
from serve.contract.errors import EarshotError

MAX_RECOVERY_S = 90.0
_ROLES = ("sandbox", "gateway", "whisper", "tritonserver")
_DURATION_S = 4.0  # of a disruption that ends by itself
_STEADY_S = 3.0  # the same processes answered for so long: the server has recovered
_AGAIN_S = 0.5
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
    """Yield all disruptions in a loop, each round in another order."""
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
        time.sleep(_AGAIN_S)
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


MAX_GROWTH_KB = 4.0  # per action: a million, 4 GB; a process keeps pages in MBs
MAX_DESCRIPTORS = 0.005  # growth per action: one in 200
_MIN_SAMPLES = 12
_MIN_ACTIONS = 2000  # seen by a process before its growth is judged
_SHOWN = 3  # complaints of a kind in the report
_AT_ONCE = 8
_HOSTILE_SHARE, _CANCELLED_SHARE = 0.1, 0.2
_PATIENCE_S = (0.005, 1.0)  # of a client that leaves before its answer
_PAUSE_S = 0.3  # after a request without an answer
_APART_S = 3.0  # between two disruptions
_DISRUPTED, _WARM = 0.2, 1 / 3  # shares of the run: the end of disruptions, the start of sampling
_LOOK_S = 1.0
_KEYS = 20
_JOB_S = 300.0  # the patience for a job, which waits for requests
_RETENTION_S = 60.0  # of a job after its end, so that as many are removed as come
_SETTLE_S = 30.0  # for the server's counts to be even without requests
_GONE_S = 2 * PATIENCE_S + _JOB_S  # for the last clients to end
_SERVER_FAULT = re.compile(r"^5(?!03)\d\d |^(INTERNAL|UNKNOWN|DATA_LOSS)\b")
_PROMISES = {
    "wrong": "every text is the same as in quiet",
    "vain": "no client waits in vain",
    "lost": "every request has its answer if nothing was disrupted",
    "failed": "no honest request fails if nothing was disrupted",
    "fault": "no hostile client makes the server fail",
    "back": f"the server recovers within {MAX_RECOVERY_S:g} s",
}
_PENDING = (
    "pending_requests",
    "live_streams",
    "gateway_inflight_requests",
    "gateway_inflight_bytes",
    "gateway_inflight_upload_bytes",
)


# ---------------------------------------------------------------- counting


class Tally:
    """Counts the outcomes of actions. Thread-safe."""

    def __init__(self) -> None:
        self.actions = 0
        self.disruptions: list[DisruptionInterval] = []
        self.uneven: str | None = None  # what is uneven in the server's own counts at the end
        self.began_s = time.monotonic()
        self._lock = threading.Lock()
        self._kinds: collections.Counter[str] = collections.Counter()
        self._bad: dict[str, list[str]] = {name: [] for name in _PROMISES}
        self._longest_s = {"beside": 0.0, "in": 0.0}  # of waits, by whether something was disrupted
        self._recovered_s: dict[str, float] = {}
        # Actions so far, KB of memory and descriptors, by role and process.
        self._samples: dict[tuple[str, int], list[tuple[float, float, float]]] = {}

    def _disrupted(self, begin_s: float) -> bool:
        now_s = time.monotonic()
        return any(interval.meets(begin_s, now_s) for interval in self.disruptions)

    def honest(
        self, name: str, begin_s: float, answer: Answer, *, text: str, patient: bool
    ) -> None:
        """Count an honest request that has just ended.

        Args:
            name: the API and the file.
            begin_s: its start.
            answer: its end.
            text: the text of the same request without other load.
            patient: False if the client left before it had an answer.
        """
        with self._lock:
            self.actions += 1
            disrupted = self._disrupted(begin_s)
            left = not patient and answer.kind != "answered"
            self._kinds["left" if left else answer.kind] += 1
            complaint = f"{name}: {answer}"
            if answer.kind == "answered" and answer.text != text:
                self._bad["wrong"].append(f"{complaint}, not {text!r}")
            if patient:
                when = "in" if disrupted else "beside"
                self._longest_s[when] = max(self._longest_s[when], answer.seconds)
                if answer.waited_in_vain:
                    self._bad["vain"].append(complaint)
                elif answer.kind in ("lost", "failed") and not disrupted:
                    self._bad[answer.kind].append(complaint)

    def hostile(self, name: str, begin_s: float, answer: Answer) -> None:
        """Count a hostile client that has just ended."""
        with self._lock:
            self.actions += 1
            self._kinds["hostile"] += 1
            if _SERVER_FAULT.match(answer.text) and not self._disrupted(begin_s):
                self._bad["fault"].append(f"{name}: {answer}")

    def recovered(self, name: str, seconds: float, last: Answer) -> None:
        """Count a disruption, and note whether the server recovered from it."""
        with self._lock:
            self._kinds["disruptions"] += 1
            self._recovered_s[name] = max(self._recovered_s.get(name, 0.0), seconds)
            if last.kind != "answered":
                self._bad["back"].append(f"{name}: after {seconds:.0f} s {last}")

    def sample(self, role: str, pid: int, memory_kb: float, descriptors: int) -> None:
        """Note the resources of a process."""
        with self._lock:
            found = self._samples.setdefault((role, pid), [])
            found.append((self.actions, memory_kb, descriptors))

    def found(self) -> Found:
        """Yield all figures and checks."""
        with self._lock:
            yield "actions", self.actions
            yield "actions a second", self.actions / (time.monotonic() - self.began_s)
            for kind in ("answered", "left", "refused", "failed", "lost", "hostile"):
                yield f"actions: {kind}", self._kinds[kind]
            yield "disruptions", self._kinds["disruptions"]
            for when, longest_s in self._longest_s.items():
                yield f"longest wait {when} disruptions, s", longest_s
            for name, seconds in self._recovered_s.items():
                yield f"{name}: recovered after, s", seconds
            for name, promise in _PROMISES.items():
                bad = self._bad[name]
                detail = f"{len(bad)}: " + "; ".join(bad[:_SHOWN]) if bad else "none against it"
                yield Check(promise, not bad, detail)
            even = None if self.uneven is None else not self.uneven
            detail = "not compared" if self.uneven is None else self.uneven or "no difference"
            yield Check("the server's own counts are even", even, detail)
            for (role, _), found in self._samples.items():
                yield from _growth(role, found)


def _growth(role: str, found: Sequence[tuple[float, float, float]]) -> Found:
    actions, memory_kb, descriptors = zip(*found, strict=True)
    count = actions[-1] - actions[0]
    if len(found) < _MIN_SAMPLES or not count:
        return
    yield f"{role}: resident, MB", memory_kb[-1] / 1024
    yield f"{role}: descriptors", descriptors[-1]
    for promise, values, limit in (
        (f"grows by at most {MAX_GROWTH_KB:g} KB an action", memory_kb, MAX_GROWTH_KB),
        (f"keeps at most {MAX_DESCRIPTORS:g} files an action", descriptors, MAX_DESCRIPTORS),
    ):
        grown = slope(actions, values)
        passed = grown.within(limit) if count >= _MIN_ACTIONS else None
        yield Check(f"{role} {promise}", passed, f"{grown} in {count} actions")


def uneven(page: str) -> str:
    """Describe what the server's metrics hold pending; "" if every request has its answer."""
    pending = {name: total(page, f"earshot_{name}") for name in _PENDING}
    outcomes = samples(page, "earshot_requests_total")
    accepted = total(page, "earshot_accepted_total")
    ended = sum(each.value for each in outcomes if each.labels["outcome"] != "rejected")
    complaints = [f"{name} is {value:g}" for name, value in pending.items() if value]
    if not outcomes:
        complaints.append("the page has no outcomes")
    if accepted != ended:
        complaints.append(f"{accepted:g} were accepted and {ended:g} ended")
    return "; ".join(complaints)


# ---------------------------------------------------------------- actions


@dataclasses.dataclass(frozen=True)
class Action:
    """The action of one client."""

    attack: str | None  # of `ATTACKS`; None: the client is honest
    api: str
    file: int
    patience_s: float | None  # None: it waits for its answer
    key: int


def action(seed: int, number: int, files: int) -> Action:
    """Draw the action of a number."""
    rng = random.Random(f"{seed}/{number}")
    hostile = rng.random() < _HOSTILE_SHARE
    cancelled = rng.random() < _CANCELLED_SHARE
    return Action(
        rng.choice(list(ATTACKS)) if hostile else None,
        rng.choice(list(CLIENTS)),
        rng.randrange(files),
        rng.uniform(*_PATIENCE_S) if cancelled else None,
        rng.randrange(_KEYS),
    )


def mixed(settings: SoakSettings) -> Found:
    """Soak a server; an interrupt keeps what was counted.

    Raises:
        EarshotError: the server did not start, or a clip cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-soak-") as name:
        config = with_link(settings.config, Path(name))
        config = changed(config, "jobs", folder=f"{name}/jobs", keep_s=_RETENTION_S)
        with stage(dataclasses.replace(settings, config=config), keys=_KEYS) as running:
            soak = _Mixed(running)
            try:
                soak.run()
            finally:
                yield from soak.tally.found()
                ended = running.server.process.poll()
                detail = f"exit status {ended}; seed {settings.seed}"
                yield Check("the server runs to the end", ended is None, detail)


class _Mixed:
    """One soak of a running server."""

    def __init__(self, running: Stage) -> None:
        self.tally = Tally()
        self._stage, self._settings = running, running.settings
        self._files = files_of(self._settings.clips)
        self._texts: dict[tuple[str, int], str] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Ask in quiet, soak, and check that everything has ended."""
        self._ask_in_quiet()
        self.tally.began_s = time.monotonic()
        with crowd(3) as pool:
            try:
                clients = pool.submit(self._clients)
                threads = [clients, pool.submit(self._disrupt), pool.submit(self._sample)]
                self._show(clients)
            finally:
                self._stopped.set()
            ended, hang = wait(threads, _GONE_S)
            if hang:
                raise EarshotError(f"{len(hang)} clients have no answer after {_GONE_S:g} s")
            for thread in ended:
                thread.result()
        end_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < end_s and self.tally.uneven != "":
            time.sleep(_LOOK_S)
            self.tally.uneven = uneven(self._stage.server.page())

    @property
    def _share(self) -> float:
        """Return how much of the run is done, at most 1."""
        minutes = (time.monotonic() - self.tally.began_s) / 60 / self._settings.minutes
        limit = self._settings.actions
        return min(1.0, max(minutes, self.tally.actions / limit if limit else 0.0))

    def _ask_in_quiet(self) -> None:
        """Get the text of every file from every API; later ones are compared with it."""
        for api, file in itertools.product(CLIENTS, range(len(self._files))):
            answer = CLIENTS[api](self._stage.at, self._files[file].ask())
            if answer.kind != "answered":
                raise EarshotError(f"{api}, {self._files[file].name}, in quiet: {answer}")
            self._texts[api, file] = answer.text
        self._stage.say(f"{len(self._texts)} texts in quiet")

    def _show(self, clients: "Future[None]") -> None:
        """Show a progress bar until the run is done or something breaks."""
        with tqdm(total=100, unit="%", leave=False, disable=None) as bar:
            while self._share < 1 and not clients.done():
                if self._stage.server.process.poll() is not None:
                    return
                bar.update(round(100 * self._share) - bar.n)
                bar.set_postfix_str(f"{self.tally.actions} actions")
                time.sleep(_LOOK_S)

    def _clients(self) -> None:
        limit = self._settings.actions
        numbers: Iterator[int] = itertools.islice(itertools.count(), limit)
        closed_loop(self._act, numbers, at_once=_AT_ONCE, stop=self._stopped)

    def _act(self, number: int) -> None:
        act = action(self._settings.seed, number, len(self._files))
        begin_s = time.monotonic()
        if act.attack is None:
            answer = self._honest(act, begin_s)
        else:
            try:
                answer = ATTACKS[act.attack](self._stage)
            except OSError as error:  # the server does not listen now
                answer = lost(error, begin_s)
            self.tally.hostile(act.attack, begin_s, answer)
        if act.patience_s is None and answer.kind in ("lost", "refused"):
            self._stopped.wait(_PAUSE_S)

    def _honest(self, act: Action, begin_s: float) -> Answer:
        file, text = self._files[act.file], self._texts[act.api, act.file]
        at = dataclasses.replace(self._stage.at, key=self._stage.server.keys[act.key])
        patience_s = act.patience_s or (_JOB_S if act.api == "job" else PATIENCE_S)
        answer = CLIENTS[act.api](at, file.ask(patience_s))
        name, patient = f"{act.api}, {file.name}", act.patience_s is None
        self.tally.honest(name, begin_s, answer, text=text, patient=patient)
        return answer

    def _disrupt(self) -> None:
        """Disrupt the server in the first part of the run; the rest measures growth."""
        for name, act in disruptions(self._settings.seed):
            if self._stopped.wait(_APART_S) or self._share > _DISRUPTED:
                return
            interval = DisruptionInterval(name, time.monotonic())
            self.tally.disruptions.append(interval)
            with contextlib.suppress(NothingToDisruptError, psutil.NoSuchProcess):
                act(self._stage)
                self.tally.recovered(name, *recover(self._stage))
            interval.end_s = time.monotonic()
            self._stage.say(f"{name}: {interval.end_s - interval.begin_s:.0f} s")

    def _sample(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self._share < _WARM:
                continue
            for role, process in self._stage.server.processes().items():
                with contextlib.suppress(psutil.Error):
                    memory_kb = resident_bytes(process) / 1024
                    self.tally.sample(role, process.pid, memory_kb, process.num_fds())
