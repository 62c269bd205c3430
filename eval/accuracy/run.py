"""Run clips x systems and keep the raw answers, one folder a run; a later run continues there.

run.json                     the configuration, the clips and the machine
clips.json                   every clip, with a hash of audio and reference
spelling.json                the checkpoint's spellings, for Whisper's English normaliser
predictions/                 the answers of every system; see eval/accuracy/predictions.py
logs/<system>.log            the output of the system's process
report.json, .md, .html      made from these alone, by `python -m eval run` and `report`
"""

import dataclasses
import datetime
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from build import hub
from build.clips import Clip
from eval.accuracy import systems
from eval.accuracy.normalize import Spelling, read_spelling
from eval.accuracy.passages import join_clips
from eval.accuracy.predictions import (
    ClipSet,
    ClipSets,
    Kept,
    Keys,
    SystemFacts,
    TimedCall,
    clip_nearest_10_s,
    keys_of,
    read_calls,
)
from eval.accuracy.worker import OpenSystem, measure_system, timed_phases
from eval.config import EvalConfig, EvaluationProduct, changed
from eval.corpora.find import FoundCorpus, find_clips
from eval.record import Run, Say, load_line, read_json, write_json, write_jsonl
from serve.contract.config import Precision
from serve.contract.errors import CheckpointError, ConfigError
from serve.contract.files import read_bytes
from serve.speech.audio import decode
from serve.speech.features import WINDOW_S
from serve.speech.meter import AudioLimits

RUN_FILE = "run.json"
CLIPS_FILE = "clips.json"
SPELLING_FILE = "spelling.json"
_GO_ON = "run again, which goes on where it ended, or name the systems that did with --systems"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a run; `run.json` holds exactly these fields."""

    started: str  # UTC, ISO 8601
    config_name: str
    precision: Precision  # of the configured engine
    settings: EvalConfig
    clips: dict[ClipSet, int]
    one_clip: str | None  # the timed clip nearest to 10 s, sent alone several times
    one_clip_s: float | None  # its length
    machine: dict[str, str]
    sources: dict[ClipSet, str]  # place and content of each set
    unreadable: dict[ClipSet, dict[str, str]]  # reasons by file

    @property
    def one_clip_title(self) -> str:
        """Name `one_clip` as reports do."""
        return "one clip" if self.one_clip_s is None else f"{self.one_clip_s:.1f} s clip"


@dataclasses.dataclass(frozen=True)
class _SystemRun:
    """The work that is left for one system."""

    name: str
    kept: Kept
    left: ClipSets
    timed: Sequence[Clip]  # () if its speed is known or not requested
    timed_key: str
    former_peak_bytes: int
    windows: int  # of audio, timed phases included


def _windows(clips: Iterable[Clip | TimedCall]) -> int:
    """Count the windows of audio: a system's work depends on them, not on the seconds."""
    return sum(max(1, math.ceil(clip.duration_s / WINDOW_S)) for clip in clips)


def run(of: Run, *, again: bool = False) -> None:
    """Run every configured system over every clip that it has not heard in the run's folder.

    Args:
        of: the run; its folder's answers under the same conditions are kept.
        again: whether earlier answers are dropped.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    config, folder = of.config, of.folder
    names, known = config.eval.systems, systems.specs(config)
    systems.check(names, known, (*config.eval.heldout_systems, *config.eval.timed))
    sets = _found(config, of.say)
    clips = {name: of_set.clips for name, of_set in sets.items()}
    every = [clip for of_set in clips.values() for clip in of_set]
    minutes = sum(clip.duration_s for clip in every) / 60
    of.say(
        f"{len(every)} clips, {minutes:.1f} minutes of audio in {_windows(every)} windows; "
        "--limit N takes fewer clips, --without A,B fewer systems"
    )
    of.say(load_line())
    systems.prepare([known[name] for name in names], config, of.config_path)
    # Every system gets the same threads, ours too.
    config = changed(config, "runtime", threads=config.eval.threads)
    keys = keys_of(clips)
    works = [
        _work(name, config, folder, clips, keys, of.say, systems.key_of(name, config), again=again)
        for name in names
    ]
    write_json(folder / RUN_FILE, _run_facts(config, sets, of.machine))
    write_json(folder / CLIPS_FILE, keys)
    write_json(folder / SPELLING_FILE, _spelling(config))
    if not any(work.windows for work in works):
        of.say("nothing is left to be heard")
    _run_systems(works, config, keys, folder, systems.open_system)


def listen(
    name: str,
    config: EvaluationProduct,
    clips: list[Clip],
    keys: Keys,
    folder: Path,
    say: Say,
    *,
    again: bool,
    open_system: OpenSystem,
) -> None:
    """Transcribe the clips that a system has not transcribed yet, and keep each answer.

    Args:
        name: the system's name.
        config: `eval` says how many calls at a time, and the CPU threads.
        clips: all that there are.
        keys: the clips' hashes.
        folder: the folder of the answers; see `eval.accuracy.predictions`.
        say: gets a line if answers under other conditions are dropped.
        again: whether all former answers are dropped.
        open_system: as in `measure_system`.

    Raises:
        EarshotError: the system cannot be opened, or ended early.
    """
    conditions = f"{config.name}, {config.eval.threads} threads"
    work = _work(name, config, folder, {"timed": clips}, keys, say, conditions, again=again)
    _run_systems([work], config, keys, folder, open_system)


def _found(config: EvaluationProduct, say: Say) -> dict[ClipSet, FoundCorpus]:
    """Find both sets; the held-out clips, being many, go first and warm a system up."""
    of, limits = config.eval, AudioLimits(config.transcriber.max_audio_s)

    def find(place: str, limit: int) -> FoundCorpus:
        found = find_clips(
            place,
            limit=limit,
            seed=of.seed,
            language=of.language,
            half=of.half,
            read=functools.partial(_decode, limits=limits),
        )
        found = dataclasses.replace(found, summary=f"{place}: {found.summary}")
        say(found.summary)
        for file, reason in found.unreadable.items():
            say(f"cannot be read, so no system is given it: {file}: {reason}")
        return found

    timed = find(of.manifest, of.timed_limit or of.limit)
    if not of.heldout:
        return {"timed": timed}
    heldout = find(of.heldout, of.limit)
    clips, summary = heldout.clips, heldout.summary
    if of.heldout == of.manifest:  # the timed clips are scored already
        files = {clip.file for clip in timed.clips}
        clips = [clip for clip in clips if clip.file not in files]
        if not clips:
            raise ConfigError(
                "every clip was drawn to be timed, so none is left to be held out; expected a "
                'lower eval.timed_limit, or eval.heldout = ""'
            )
        summary += f"; {len(clips)} of these are not timed"
    if of.join_s:
        clips = join_clips(clips, of.join_s, limits)
        summary += f"; joined to {len(clips)} passages of at most {of.join_s:g} s by speaker"
        say(summary)
    return {"heldout": FoundCorpus(clips, summary, heldout.unreadable), "timed": timed}


def _decode(path: Path, limits: AudioLimits) -> None:
    for _ in decode(read_bytes(path), limits):
        pass


def _spelling(config: EvaluationProduct) -> Spelling:
    """Read the checkpoint's spellings; none where it is not at hand or, as OpenAI's, has none."""
    try:
        folder = hub.checkpoint_folder(config.build.checkpoint, with_weights=False).path
        return read_spelling(folder)
    except CheckpointError:
        return Spelling()


def _run_facts(
    config: EvaluationProduct, sets: Mapping[ClipSet, FoundCorpus], machine: dict[str, str]
) -> RunFacts:
    nearest = clip_nearest_10_s(sets["timed"].clips)
    return RunFacts(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        precision=config.build.precision,
        settings=config.eval,
        clips={name: len(found.clips) for name, found in sets.items()},
        one_clip=nearest.file if nearest else None,
        one_clip_s=nearest.duration_s if nearest else None,
        machine=machine,
        sources={name: found.summary for name, found in sets.items()},
        unreadable={name: found.unreadable for name, found in sets.items()},
    )


def _work(
    name: str,
    config: EvaluationProduct,
    folder: Path,
    clips: ClipSets,
    keys: Keys,
    say: Say,
    conditions: str,
    *,
    again: bool,
) -> _SystemRun:
    kept, of, timed = Kept(folder, name), config.eval, clips["timed"]
    if kept.go_on(conditions, again=again):
        say(f"{name}: its answers were given under other settings, so it hears all again")
    left = kept.left(clips if name in of.heldout_systems else {"timed": timed}, keys)
    conditions = "\n".join([f"{of.concurrency} {of.repeats}", *keys["timed"].values()])
    timed_key = hashlib.sha256(conditions.encode()).hexdigest()[:16]
    facts, timed_under = kept.facts(), {call.key for call in read_calls(kept.timed_path)}
    is_timed = name not in of.timed or timed_under == {timed_key}
    if not left and is_timed and facts is None:  # it ended after its last answer, before its facts
        left = {"timed": timed[-1:]}
    to_time: Sequence[Clip] = () if is_timed else timed
    windows = sum(map(_windows, left.values()))
    windows += sum(_windows(each.clips) * each.repeats for each in timed_phases(to_time, of))
    peak_bytes = facts.peak_memory_bytes if facts else 0
    return _SystemRun(name, kept, left, to_time, timed_key, peak_bytes, windows)


def _run_systems(
    works: Sequence[_SystemRun],
    config: EvaluationProduct,
    keys: Keys,
    folder: Path,
    open_system: OpenSystem,
) -> None:
    """Run the systems with work left, one after another; one bar tells how long all of it takes."""
    works = [work for work in works if work.windows]
    total = sum(work.windows for work in works)
    with tqdm(total=total, unit="window", smoothing=0.05, disable=not works) as bar:
        for work in works:
            bar.set_description(f"{work.name:31}")
            _run_system(work, config, keys, folder, bar.update, open_system)


def _run_system(
    work: _SystemRun,
    config: EvaluationProduct,
    keys: Keys,
    folder: Path,
    advance: Callable[[int], object],
    open_system: OpenSystem,
) -> None:
    """Transcribe the remaining clips with one system; keep each answer, and count its windows."""
    work.kept.facts_path.unlink(missing_ok=True)
    timed: list[TimedCall] = []
    with work.kept.appended() as keep:

        def take(call: TimedCall) -> None:
            if call.phase == "accuracy":
                keep(dataclasses.replace(call, key=keys[call.clip_set][call.file]))
            else:
                timed.append(dataclasses.replace(call, key=work.timed_key))
            advance(_windows([call]))

        facts = measure_system(
            work.name,
            config,
            work.left,
            timed=work.timed,
            open_system=open_system,
            on_call=take,
            log=folder / "logs" / f"{work.name}.log",
        )
    if work.timed:
        write_jsonl(work.kept.timed_path, timed)
    # A part of the clips may need less memory than all of them.
    peak_bytes = max(facts.peak_memory_bytes, work.former_peak_bytes)
    write_json(work.kept.facts_path, dataclasses.replace(facts, peak_memory_bytes=peak_bytes))


# ---------------------------------------------------------------- load


def load_run(
    folder: Path, names: tuple[str, ...]
) -> tuple[RunFacts, Spelling, list[tuple[SystemFacts, list[TimedCall]]]]:
    """Read a run back: its facts, its spellings, and the facts and calls of each system.

    Args:
        folder: the run's folder.
        names: the systems to read; () is all, in the order that they ran.

    Raises:
        ConfigError: a file is missing or damaged, or a system did not hear all its clips; the
            message says what to do.
    """
    facts = read_json(folder / RUN_FILE, RunFacts, "a run")
    keys = read_json(folder / CLIPS_FILE, Keys, "the clips of a run")
    spelling = read_json(folder / SPELLING_FILE, Spelling, "spellings")
    names = tuple(dict.fromkeys(names or facts.settings.systems))
    return facts, spelling, [_load_system(folder, name, facts.settings, keys) for name in names]


def _load_system(
    folder: Path, name: str, settings: EvalConfig, keys: Keys
) -> tuple[SystemFacts, list[TimedCall]]:
    if name not in settings.systems:
        known = ", ".join(settings.systems)
        raise ConfigError(f"the run in {folder} did not include {name}; it had {known}")
    kept = Kept(folder, name)
    facts = kept.facts()
    heard_by: Keys = keys if name in settings.heldout_systems else {"timed": keys["timed"]}
    calls = kept.heard(heard_by)
    missing = sum(map(len, heard_by.values())) - len(calls)
    if facts is None or missing:
        raise ConfigError(f"{name} did not finish in {folder}: {missing} clips left; {_GO_ON}")
    return facts, [*calls, *(read_calls(kept.timed_path) if name in settings.timed else ())]
