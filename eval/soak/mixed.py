"""Everything at once: honest clients by every door, hostile ones, and disruptions early on.

What each action is follows from the seed and its number alone.
"""

import contextlib
import dataclasses
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
from tqdm import tqdm

from build.clips import load_clips
from eval.clients import CLIENTS, PATIENCE_S, Answer, lost
from eval.config import Config
from eval.load import closed_loop
from eval.memory import resident_bytes
from eval.record import Check, Result, Run, Say
from eval.soak.attacks import ATTACKS
from eval.soak.disruptions import Span, Unable, disruptions, recover, with_link
from eval.soak.files import files_of
from eval.soak.findings import Finding, kept
from eval.soak.scenarios import crowd
from eval.soak.stage import Stage, stage
from eval.soak.tally import Asked, Tally, uneven
from serve.contract.errors import EarshotError

TITLE = "clients of every kind, hostile ones and disruptions at once"
_AT_ONCE = 8
_HOSTILE_SHARE, _CANCELLED_SHARE = 0.1, 0.2
_PATIENCE_S = (0.005, 1.0)  # of who goes before there is an answer
_PAUSE_S = 0.3  # after a request that was not answered
_APART_S = 3.0  # between two disruptions
_DISRUPTED, _WARM = 0.2, 1 / 3  # shares of it that have passed
_LOOK_S = 1.0
_KEYS = 20
_KEPT_S = 60.0  # that a job is kept after its end, so that as many go as come
_SETTLE_S = 30.0  # for the server's counts to be even when nobody asks any more
_GONE_S = 2 * PATIENCE_S  # for the last clients to end


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
        answer = CLIENTS[act.door](at, file.ask(act.patience_s or PATIENCE_S))
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
