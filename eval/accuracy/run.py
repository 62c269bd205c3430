"""Runs clips x systems and keeps the raw predictions, one folder a run:

run.json                     what was run: configuration, clips, machine
spelling.json                the checkpoint's spellings, for Whisper's English normaliser
predictions/<system>.jsonl   every call, raw
predictions/<system>.json    the system's settings, start-up time and peak memory
logs/<system>.log            what the system's process wrote
report.md, .html, .json      made from these alone, by `python -m eval run` and `score`
"""

import dataclasses
import datetime
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from eval.accuracy import systems
from eval.accuracy.data import ClipSet, SystemFacts, TimedCall, read_calls, ten_second_clip
from eval.accuracy.normalize import Spelling, read_spelling
from eval.accuracy.worker import ClipSets, calls_of, measure_system
from eval.config import Config
from eval.corpora.find import Found, find_clips
from eval.files import read_json, write_json
from eval.machine import machine_facts
from serve import hub
from serve.codec import to_json
from serve.config import Precision
from serve.errors import CheckpointError, ConfigError

RUN_FILE = "run.json"
SPELLING_FILE = "spelling.json"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What was run; `run.json` holds exactly these fields."""

    id: str
    started: str  # UTC, ISO 8601
    config_name: str
    precision: Precision  # of the configured engine
    manifest: str
    heldout: str
    systems: tuple[str, ...]
    heldout_systems: tuple[str, ...]
    timed: tuple[str, ...]
    clips: dict[ClipSet, int]
    audio_s: dict[ClipSet, float]  # unpadded
    ten_second_clip: str | None
    concurrency: int
    repeats: int
    threads: int
    max_cer_gap_faster_whisper: float  # points
    max_cer_gap_fp16: float  # points
    machine: dict[str, str]
    limit: int = 0
    seed: int = 0
    language: str = ""
    sources: dict[ClipSet, str] = dataclasses.field(default_factory=dict)  # what each place holds


LoadedSystem = tuple[SystemFacts, list[TimedCall]]


def run(config: Config, config_path: str, folder: Path, tell: Callable[[str], None]) -> None:
    """Run every configured system over every clip; one finished system is kept before the next.

    `tell` gets a line on each set of clips.

    Raises:
        EarshotError: a clip, a system or something that it needs is missing, or a system failed.
    """
    names = config.eval.systems
    systems.check(names, config)
    found = _found(config, tell)
    clips = {name: of_set.clips for name, of_set in found.items()}
    systems.prepare(names, config, config_path)
    # Every system gets the same threads, ours too.
    runtime = dataclasses.replace(config.runtime, threads=config.eval.threads)
    config = dataclasses.replace(config, runtime=runtime)
    sources = {name: of_set.summary for name, of_set in found.items()}
    facts = _run_facts(config, clips, sources)
    write_json(folder / RUN_FILE, facts)
    write_json(folder / SPELLING_FILE, _spelling(config))
    for name in names:
        _run_system(name, config, clips, facts.id, folder)


def _found(config: Config, tell: Callable[[str], None]) -> dict[ClipSet, Found]:
    """The held-out clips go first: they are many, so a system is warm when the others come."""
    of = config.eval
    places: dict[ClipSet, str] = {"heldout": of.heldout, "timed": of.manifest}
    found = {
        name: find_clips(place, limit=of.limit, seed=of.seed, language=of.language)
        for name, place in places.items()
        if place
    }
    for name, of_set in found.items():
        tell(f"{places[name]}: {of_set.summary}")
    return found


def _spelling(config: Config) -> Spelling:
    """The checkpoint's; none where it is not at hand or, as OpenAI's own files, brings none."""
    try:
        return read_spelling(
            hub.checkpoint_folder(config.build.checkpoint, with_weights=False).path
        )
    except CheckpointError:
        return Spelling()


def _run_facts(config: Config, clips: ClipSets, sources: dict[ClipSet, str]) -> RunFacts:
    ten_second = ten_second_clip(clips["timed"])
    return RunFacts(
        id=uuid.uuid4().hex,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        precision=config.build.precision,
        clips={name: len(of_set) for name, of_set in clips.items()},
        audio_s={name: sum(clip.duration_s for clip in of_set) for name, of_set in clips.items()},
        ten_second_clip=ten_second.file if ten_second else None,
        machine=machine_facts(),
        sources=sources,
        **vars(config.eval),
    )


def _run_system(name: str, config: Config, clips: ClipSets, run_id: str, folder: Path) -> None:
    """Measure one system and keep what it said; an interrupted one leaves `.partial` lines."""
    path = folder / "predictions" / f"{name}.jsonl"
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=calls_of(name, clips, config), desc=f"{name:31}", unit="call")
    with bar, partial.open("w", encoding="utf-8") as file:

        def keep(call: TimedCall) -> None:
            file.write(to_json(call) + "\n")
            file.flush()
            bar.update()

        facts = measure_system(
            name,
            config,
            clips,
            run_id=run_id,
            open_system=systems.open_system,
            on_call=keep,
            log=folder / "logs" / f"{name}.log",
        )
    os.replace(partial, path)
    write_json(path.with_suffix(".json"), facts)


def load_run(folder: Path, names: tuple[str, ...]) -> tuple[RunFacts, list[LoadedSystem]]:
    """Read a run back; `names` chooses systems, none means all, in the order that they ran.

    Raises:
        ConfigError: a file is missing or damaged, belongs to another run, or the systems did not
            get the same clips; the message says what to do.
    """
    facts = read_json(folder / RUN_FILE, RunFacts, "a run")
    loaded = [_load_system(folder, name, facts) for name in dict.fromkeys(names or facts.systems)]
    for clip_set in facts.clips:
        _check_same_clips(folder, clip_set, loaded)
    return facts, loaded


def load_spelling(folder: Path) -> Spelling:
    """The spellings that a run kept; none in runs of earlier versions.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / SPELLING_FILE
    return read_json(path, Spelling, "spellings") if path.is_file() else Spelling()


def _check_same_clips(folder: Path, clip_set: ClipSet, loaded: list[LoadedSystem]) -> None:
    heard = {
        system.name: {call.file for call in calls if call.clip_set == clip_set}
        for system, calls in loaded
    }
    given = {name: files for name, files in heard.items() if files}
    first = next(iter(given), None)
    for name, files in given.items():
        if first and files != given[first]:
            raise ConfigError(f"{folder}: {name} and {first} were not given the same clips")


def _load_system(folder: Path, name: str, run_facts: RunFacts) -> LoadedSystem:
    path = folder / "predictions" / f"{name}.json"
    if name not in run_facts.systems:
        known = ", ".join(run_facts.systems)
        raise ConfigError(f"the run in {folder} did not include {name}; it had {known}")
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing, so {name} did not finish; run again, or name the systems that "
            "did with --systems"
        )
    facts = read_json(path, SystemFacts, "a system's facts")
    if facts.run != run_facts.id:
        raise ConfigError(
            f"{path} is of an earlier run, so {name} did not finish in this one; run again, or "
            "name the systems that did with --systems"
        )
    predictions = path.with_suffix(".jsonl")
    calls = read_calls(predictions)
    if len(calls) != facts.rows:
        raise ConfigError(f"{predictions} has {len(calls)} lines, expected {facts.rows}; run again")
    return facts, calls
