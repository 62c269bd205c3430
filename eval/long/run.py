"""Runs systems x long recordings and keeps what they said; a later run goes on where one ended.

run.json                     what was run: configuration, recordings, machine
recordings.jsonl             the truth
predictions/<system>.jsonl   every answer, raw, each kept as soon as it is there
predictions/<system>.json    the system's settings and peak memory, once it has heard everything
logs/<system>.log            what the system's process wrote
report.md, .html, long.json  made from these alone
"""

import dataclasses
import datetime
import uuid
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from eval.accuracy.data import SystemFacts, TimedCall
from eval.accuracy.kept import Kept, Keys
from eval.accuracy.worker import measure_system
from eval.config import Config, changed
from eval.long.compose import Composed, compose, read_sentences
from eval.long.plan import NAMES, PEOPLE_PLAN, PLAN, plan
from eval.long.systems import open_system, prepare_names
from eval.long.truth import Recording, read_manifest
from eval.record import Run, read_json, write_json, write_jsonl
from serve.contract.errors import ConfigError

RUN_FILE = "run.json"
RECORDINGS_FILE = "recordings.jsonl"

_TIMEOUT_S = 7200.0  # for one recording of 20 minutes, on a machine that has other work


@dataclasses.dataclass(frozen=True)
class LongRun:
    """The facts of a run; `run.json` holds exactly these fields."""

    id: str
    started: str  # UTC, ISO 8601
    config_name: str
    threads: int
    seed: int
    recordings: str  # where they lie, which is different for different ones
    machine: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Heard:
    """All that a system said."""

    facts: SystemFacts
    calls: tuple[TimedCall, ...]  # one a recording, in their order


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A run, read back."""

    run: LongRun
    recordings: tuple[Recording, ...]
    systems: tuple[Heard, ...]
    unfinished: tuple[str, ...]  # systems that have not heard everything


def run_long(
    of: Run, names: tuple[str, ...], *, minutes: float | None, seed: int, again: bool
) -> None:
    """Let systems hear recordings that they have not heard yet.

    Args:
        of: the run; its `config.eval.threads` is what every system gets.
        names: of the systems.
        minutes: of composed recordings, at least; None: of the whole plan.
        seed: of the recordings.
        again: whether what these systems said before is dropped.

    Raises:
        EarshotError: a system, or something that it needs, is missing or failed.
        ConfigError: the folder holds a run of other recordings or settings.
    """
    prepare_names(names, of)
    config, folder = of.config, of.folder
    places = config.eval.manifest, config.eval.heldout, config.eval.passages
    speech = [place for place in dict.fromkeys(places) if place]  # one may be another
    sentences = [
        sentence for place in speech for sentence in read_sentences(place, config.eval.half)
    ]
    people = any(sentence.speaker for sentence in sentences)
    rows = plan(PEOPLE_PLAN if people else PLAN, minutes)
    composed = compose(rows, seed, sentences, of.say)
    config = _fair(config)
    facts = _resumed(config, seed, composed, of)
    for name in names:
        _run_system(name, config, composed, facts, folder, again=again)


def _fair(config: Config) -> Config:
    """Set one recording at a time, the same threads for ours, and time for the longest."""
    config = changed(config, "eval", timed=(), heldout_systems=(), concurrency=1)
    config = changed(config, "runtime", threads=config.eval.threads)
    return changed(config, "transcriber", request_timeout_s=_TIMEOUT_S, max_decode_s=_TIMEOUT_S)


def _resumed(config: Config, seed: int, composed: Composed, of: Run) -> LongRun:
    """Return the run that the folder holds, if it is the same; else a new one."""
    new = LongRun(
        id=uuid.uuid4().hex,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        threads=config.eval.threads,
        seed=seed,
        recordings=str(composed.folder),
        machine=of.machine,
    )
    path = of.folder / RUN_FILE
    if path.is_file():
        before = read_json(path, LongRun, "a run")
        for name in ("config_name", "threads", "recordings"):
            if getattr(before, name) != getattr(new, name):
                raise ConfigError(
                    f"{of.folder} holds a run with {name} = {getattr(before, name)}, this one has "
                    f"{getattr(new, name)}; delete it, or choose another place with --output"
                )
        return before
    write_jsonl(of.folder / RECORDINGS_FILE, composed.recordings)
    write_json(path, new)
    return new


def _run_system(
    name: str, config: Config, composed: Composed, facts: LongRun, folder: Path, *, again: bool
) -> None:
    """Let one system hear what it has not heard yet, and keep each answer."""
    kept = Kept(folder, name)
    kept.open(again=again)
    clips = [recording.clip(composed.folder) for recording in composed.recordings]
    left = kept.left({"timed": clips}, _keys(composed.recordings)).get("timed", [])
    if not left and kept.facts() is None:
        left = clips[-1:]  # it died after its last answer, before its facts were known
    bar = tqdm(
        total=sum(clip.duration_s for clip in clips) / 60,
        initial=sum(clip.duration_s for clip in clips if clip not in left) / 60,
        desc=f"{name:36}",
        bar_format="{l_bar}{bar}| {n:.1f} of {total:.1f} minutes [{elapsed}<{remaining}]",
    )
    with bar, kept.appended() as keep:

        def heard(call: TimedCall) -> None:
            keep(call)
            bar.update(call.duration_s / 60)

        if left:
            log = folder / "logs" / f"{name}.log"
            measured = measure_system(
                name,
                config,
                {"timed": left},
                run_id=facts.id,
                open_system=open_system,
                on_call=heard,
                log=log,
            )
            write_json(kept.facts_path, dataclasses.replace(measured, rows=len(clips)))


def _keys(recordings: Sequence[Recording]) -> Keys:
    """Return keys, none of which changes as long as the run's recordings are the same."""
    return {"timed": dict.fromkeys((recording.file for recording in recordings), "")}


def load_long(folder: Path) -> Loaded:
    """Read a run back.

    Raises:
        FileError: a file is missing.
        ConfigError: one is damaged.
    """
    run = read_json(folder / RUN_FILE, LongRun, "a run of `python -m eval long`")
    recordings = tuple(read_manifest(folder / RECORDINGS_FILE))
    finished, unfinished = [], []
    for name in NAMES:
        kept = Kept(folder, name)
        if not kept.scored_path.is_file():
            continue
        by_file = {call.file: call for call in kept.heard(_keys(recordings))}
        facts = kept.facts()
        if facts is not None and len(by_file) == len(recordings):
            finished.append(
                Heard(facts, tuple(by_file[recording.file] for recording in recordings))
            )
        else:
            unfinished.append(name)
    return Loaded(run, recordings, tuple(finished), tuple(unfinished))
