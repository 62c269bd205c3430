"""Everything at once: honest clients by every way, hostile ones, and disruptions early on.

Each action follows from the seed and its number alone.
"""

import collections
import contextlib
import dataclasses
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

from build.clips import load_clips
from eval.clients import CLIENTS, PATIENCE_S, Answer, lost
from eval.config import Config
from eval.load import closed_loop
from eval.memory import resident_bytes, slope
from eval.record import Check, Result, Run, Say
from eval.server import samples, total
from eval.soak.attacks import ATTACKS
from eval.soak.disruptions import MAX_RECOVERY_S, Span, Unable, disruptions, recover, with_link
from eval.soak.scenarios import crowd
from eval.soak.stage import Finding, Found, Stage, files_of, kept, stage
from serve.contract.errors import EarshotError

MAX_GROWTH_KB = 4.0  # an action: a million, 4 GB; pages that a process keeps come in MBs
MAX_DESCRIPTORS = 0.005  # that a process may have more after each action: one in 200
_LEAST_LOOKS = 12
_LEAST_ACTIONS = 2000  # seen by a process, before its growth tells anything
_SHOWN = 3  # complaints of a kind that are told in full
# The server's own faults, as its doors name them.
_FAULT = re.compile(r"^5(?!03)\d\d |^(INTERNAL|UNKNOWN|DATA_LOSS)\b")


@dataclasses.dataclass(frozen=True)
class Look:
    """The memory and descriptors of a process when so many actions were done."""

    actions: int
    memory_kb: float
    descriptors: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of an honest client's."""

    what: str  # the way and the file
    text: str  # that the same server gave in quiet
    patient: bool  # else the client goes before it has an answer
    begin_s: float


class Tally:
    """Counts what came of actions. Thread-safe."""

    def __init__(self) -> None:
        self.actions = 0
        self.spans: list[Span] = []
        self.uneven: str | None = None  # what the server's own counts lack at the end
        self.began_s = time.monotonic()
        self._lock = threading.Lock()
        self._kinds: collections.Counter[str] = collections.Counter()
        self._bad: dict[str, list[str]] = {name: [] for name in _PROMISES}
        self._longest_s = [0.0, 0.0]  # in quiet, and where a disruption was under way
        self._recovered: dict[str, tuple[float, Answer]] = {}
        self._looks: dict[tuple[str, int], list[Look]] = {}

    def honest(self, request: Asked, answer: Answer) -> None:
        """Count an honest request that has ended by now."""
        now_s = time.monotonic()
        with self._lock:
            self.actions += 1
            disrupted = any(span.meets(request.begin_s, now_s) for span in self.spans)
            left = not request.patient and answer.kind != "answered"
            self._kinds["left" if left else answer.kind] += 1
            complaint = f"{request.what}: {answer}"
            if answer.kind == "answered" and answer.text != request.text:
                self._bad["wrong"].append(f"{complaint}, not {request.text!r}")
            if request.patient:
                self._longest_s[disrupted] = max(self._longest_s[disrupted], answer.seconds)
                if answer.waited_in_vain:
                    self._bad["vain"].append(complaint)
                elif answer.kind in ("lost", "failed") and not disrupted:
                    self._bad[answer.kind].append(complaint)

    def hostile(self, what: str, begin_s: float, answer: Answer) -> None:
        """Count a hostile client that has ended."""
        now_s = time.monotonic()
        with self._lock:
            self.actions += 1
            self._kinds["hostile"] += 1
            disrupted = any(span.meets(begin_s, now_s) for span in self.spans)
            if _FAULT.match(answer.text) and not disrupted:
                self._bad["fault"].append(f"{what}: {answer}")

    def recovered(self, what: str, seconds: float, last: Answer) -> None:
        """Note whether the server was itself again after a disruption."""
        with self._lock:
            self._kinds["disruptions"] += 1
            if what not in self._recovered or self._recovered[what][0] < seconds:
                self._recovered[what] = (seconds, last)
            if last.kind != "answered":
                self._bad["back"].append(f"{what}: after {seconds:.0f} s {last}")

    def look(self, role: str, pid: int, memory_kb: float, descriptors: int) -> None:
        """Note a look at a process."""
        with self._lock:
            looks = self._looks.setdefault((role, pid), [])
            looks.append(Look(self.actions, memory_kb, descriptors))

    def found(self) -> Found:
        """Yield all figures and checks."""
        with self._lock:
            yield "actions", self.actions
            took_s = time.monotonic() - self.began_s
            yield "actions a second", self.actions / took_s
            for kind in ("answered", "left", "refused", "failed", "lost", "hostile"):
                yield f"actions: {kind}", self._kinds[kind]
            yield "disruptions", self._kinds["disruptions"]
            for what, longest_s in zip(("beside", "in"), self._longest_s, strict=True):
                yield f"longest wait {what} disruptions, s", longest_s
            for what, (seconds, _) in self._recovered.items():
                yield f"{what}: itself again after, s", seconds
            for name, promise in _PROMISES.items():
                yield _check(promise, self._bad[name])
            even = None if self.uneven is None else not self.uneven
            yield Check("the server's own counts are even", even, self.uneven or "")
            for (role, _), looks in self._looks.items():
                yield from _growth(role, looks)


_PROMISES = {
    "wrong": "no text is another than in quiet",
    "vain": "nobody waits in vain",
    "lost": "every request has its answer where nothing was disrupted",
    "failed": "no honest request fails where nothing was disrupted",
    "fault": "no hostile client makes the server fail",
    "back": f"the server is itself again within {MAX_RECOVERY_S:g} s",
}


def _check(promise: str, bad: Sequence[str]) -> Check:
    detail = f"{len(bad)}: " + "; ".join(bad[:_SHOWN]) if bad else "none against it"
    return Check(promise, not bad, detail)


def _growth(role: str, looks: Sequence[Look]) -> Iterator[Check | tuple[str, float]]:
    if len(looks) < _LEAST_LOOKS or looks[0].actions == looks[-1].actions:
        return
    actions = [look.actions for look in looks]
    memory = slope(actions, [look.memory_kb for look in looks])
    files = slope(actions, [look.descriptors for look in looks])
    yield f"{role}: resident, MB", looks[-1].memory_kb / 1024
    yield f"{role}: descriptors", looks[-1].descriptors
    for promise, grown, limit in (
        (f"{role} grows by at most {MAX_GROWTH_KB:g} KB an action", memory, MAX_GROWTH_KB),
        (f"{role} keeps at most {MAX_DESCRIPTORS:g} files an action", files, MAX_DESCRIPTORS),
    ):
        count = actions[-1] - actions[0]
        shown = f"{grown.value:.4f} [{grown.low:.4f}, {grown.high:.4f}] in {count} actions"
        yield Check(promise, grown.within(limit) if count >= _LEAST_ACTIONS else None, shown)


def uneven(page: str) -> str:
    """Say what is not over by the server's metrics; "" where every request has its answer."""
    under_way = {name: total(page, f"earshot_{name}") for name in _UNDER_WAY}
    outcomes = samples(page, "earshot_requests_total")
    accepted = total(page, "earshot_accepted_total")
    ended = sum(each.value for each in outcomes if each.labels["outcome"] != "rejected")
    complaints = [f"{name} is {value:g}" for name, value in under_way.items() if value]
    if not outcomes:
        complaints.append("the page has no outcomes")
    if accepted != ended:
        complaints.append(f"{accepted:g} were accepted and {ended:g} ended")
    return "; ".join(complaints)


_UNDER_WAY = (
    "pending_requests",
    "live_streams",
    "gateway_inflight_requests",
    "gateway_inflight_bytes",
    "gateway_inflight_upload_bytes",
)


# ---------------------------------------------------------------- mixed


TITLE = "clients of every kind, hostile ones and disruptions at once"
_AT_ONCE = 8
_HOSTILE_SHARE, _CANCELLED_SHARE = 0.1, 0.2
_PATIENCE_S = (0.005, 1.0)  # of who goes before there is an answer
_PAUSE_S = 0.3  # after a request that was not answered
_APART_S = 3.0  # between two disruptions
_DISRUPTED, _WARM = 0.2, 1 / 3  # shares of it that have passed
_LOOK_S = 1.0
_KEYS = 20
_JOB_S = 300.0  # the patience for a job, which gives way to requests
_KEPT_S = 60.0  # that a job is kept after its end, so that as many go as come
_SETTLE_S = 30.0  # for the server's counts to be even when nobody asks any more
_GONE_S = 2 * PATIENCE_S + _JOB_S  # for the last clients to end


@dataclasses.dataclass(frozen=True)
class Load:
    """The extent of a run, which ends with the first of both."""

    minutes: float
    actions: int | None
    seed: int


@dataclasses.dataclass(frozen=True)
class Action:
    """The action of one client."""

    attack: str | None  # of `ATTACKS`; None: it is honest
    door: str
    file: int
    patience_s: float | None  # after which it goes
    key: int  # which of the keys it has


def action(seed: int, number: int, files: int) -> Action:
    """Draw what the client of a number does."""
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


def with_jobs(config: Config, folder: Path) -> Config:
    """Return the config of a server that keeps jobs in a folder."""
    jobs = dataclasses.replace(config.jobs, folder=str(folder / "jobs"), keep_s=_KEPT_S)
    return dataclasses.replace(config, jobs=jobs)


def mixed(run: Run, load: Load) -> Result:
    """Soak a server of its own and write the report, also where it is interrupted.

    Args:
        run: of the product that is attacked.
        load: how much.

    Raises:
        EarshotError: the server did not start, or a clip cannot be used.
        KeyboardInterrupt: of Ctrl-C; the report is written.
    """
    clips = tuple(load_clips(run.config.eval.manifest))
    with tempfile.TemporaryDirectory(prefix="earshot-soak-") as name:
        config = with_jobs(with_link(run.config, Path(name)), Path(name))
        with stage(config, clips, run.say, keys=_KEYS) as running:
            soak = _Mixed(running, load, run.say)
            try:
                soak.run()
            finally:
                result = kept(run, [soak.finding()])
    return result


class _Mixed:
    """One soak of a running server."""

    def __init__(self, running: Stage, load: Load, say: Say) -> None:
        self._stage, self._load, self._say = running, load, say
        self._files = files_of(running.clips)
        self._texts: dict[tuple[str, int], str] = {}
        self._stopped = threading.Event()
        self._tally = Tally()
        self._whole = False

    def run(self) -> None:
        """Ask in quiet, soak, and look whether all that began has ended."""
        self._ask_in_quiet()
        self._tally.began_s = time.monotonic()
        with crowd(3) as pool:
            try:
                clients = [pool.submit(self._clients)]
                others = [pool.submit(self._disrupt), pool.submit(self._look)]
                self._show(clients + others)
            finally:
                self._stopped.set()
            ended, hang = wait(clients + others, _GONE_S)
            if hang:
                raise EarshotError(f"{len(hang)} clients have no answer after {_GONE_S:g} s")
            for client in ended:
                client.result()
        self._settle()
        self._whole = True

    def finding(self) -> Finding:
        """Sum up what was found so far."""
        news = list(self._tally.found())
        checks = [each for each in news if isinstance(each, Check)]
        figures = {each[0]: float(each[1]) for each in news if not isinstance(each, Check)}
        seed = f"seed {self._load.seed}"
        checks.append(Check("it comes to its end", self._whole or None, seed))
        ended = self._stage.server.process.poll()
        checks.append(Check("the server runs to the end", ended is None, f"exit status {ended}"))
        took_s = time.monotonic() - self._tally.began_s
        return Finding("mixed", TITLE, tuple(checks), figures, took_s)

    @property
    def _share(self) -> float:
        """Return how much of it is done, at most 1."""
        minutes = (time.monotonic() - self._tally.began_s) / 60 / self._load.minutes
        actions = self._tally.actions / self._load.actions if self._load.actions else 0.0
        return min(1.0, max(minutes, actions))

    def _ask_in_quiet(self) -> None:
        """Get the text of every file by every door, with which all later ones are compared."""
        for door, file in itertools.product(CLIENTS, range(len(self._files))):
            answer = CLIENTS[door](self._stage.at, self._files[file].ask())
            if answer.kind != "answered":
                raise EarshotError(f"{door}, {self._files[file].name}, in quiet: {answer}")
            self._texts[door, file] = answer.text
        self._say(f"{len(self._texts)} texts in quiet")

    def _show(self, running: list["Future[None]"]) -> None:
        """Show a bar, until there is enough or something breaks."""
        with tqdm(total=100, unit="%", leave=False, disable=None) as bar:
            while self._share < 1:
                bar.update(round(100 * self._share) - bar.n)
                bar.set_postfix_str(f"{self._tally.actions} actions")
                if self._stage.server.process.poll() is not None or any(
                    map(Future.done, running[:-2])
                ):
                    return
                time.sleep(_LOOK_S)

    def _clients(self) -> None:
        """Do one action after another."""
        numbers = itertools.count() if self._load.actions is None else range(self._load.actions)
        closed_loop(self._act, numbers, at_once=_AT_ONCE, stop=self._stopped)

    def _act(self, number: int) -> None:
        act = action(self._load.seed, number, len(self._files))
        begin_s = time.monotonic()
        if act.attack is None:
            answer = self._honest(act, begin_s)
        else:
            answer = _attacked(ATTACKS[act.attack], self._stage)
            self._tally.hostile(act.attack, begin_s, answer)
        if act.patience_s is None and answer.kind in ("lost", "refused"):
            self._stopped.wait(_PAUSE_S)

    def _honest(self, act: Action, begin_s: float) -> Answer:
        file = self._files[act.file]
        request = Asked(
            what=f"{act.door}, {file.name}",
            text=self._texts[act.door, act.file],
            patient=act.patience_s is None,
            begin_s=begin_s,
        )
        at = dataclasses.replace(self._stage.at, key=self._stage.server.keys[act.key])
        patience_s = _JOB_S if act.door == "job" else PATIENCE_S
        answer = CLIENTS[act.door](at, file.ask(act.patience_s or patience_s))
        self._tally.honest(request, answer)
        return answer

    def _disrupt(self) -> None:
        """Disrupt again and again early on; what comes later is for growth."""
        for what, act in disruptions(self._load.seed):
            if self._stopped.wait(_APART_S) or self._share > _DISRUPTED:
                return
            span = Span(what, time.monotonic())
            self._tally.spans.append(span)
            with contextlib.suppress(Unable, psutil.NoSuchProcess):
                act(self._stage)
                self._tally.recovered(what, *recover(self._stage))
            span.end_s = time.monotonic()
            self._say(f"{what}: {span.end_s - span.begin_s:.0f} s")

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self._share < _WARM:
                continue
            for role, process in self._stage.server.processes().items():
                with contextlib.suppress(psutil.Error):
                    memory_kb = resident_bytes(process) / 1024
                    self._tally.look(role, process.pid, memory_kb, process.num_fds())

    def _settle(self) -> None:
        end_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < end_s and self._tally.uneven != "":
            time.sleep(_LOOK_S)
            self._tally.uneven = uneven(self._stage.server.page())


def _attacked(attack: Callable[[Stage], Answer], running: Stage) -> Answer:
    began = time.monotonic()
    try:
        return attack(running)
    except OSError as error:  # nobody listens just now, say
        return lost(error, began)
