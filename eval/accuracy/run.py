"""Run clips x systems and keep the raw answers, one folder a run; a later run continues there.

run.json                     the configuration, the clips and the machine
clips.json                   every clip, with a hash of its audio and reference
spelling.json                the checkpoint's spellings, for Whisper's English normaliser
predictions/                 the answers of every system; see eval/accuracy/predictions.py
logs/<system>.log            the output of the system's process
report.json, .md, .html      made from these alone, by `python -m eval run` and `report`
"""

import dataclasses
import datetime
import functools
import math
import uuid
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
    timed_key,
)
from eval.accuracy.worker import OpenSystem, measure_system, timed_calls_of
from eval.config import EvalConfig, EvaluationProduct, changed
from eval.corpora.find import FoundCorpus, find_clips
from eval.record import Run, Say, load_line, read_json, write_json
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

    id: str
    started: str  # UTC, ISO 8601
    config_name: str
    precision: Precision  # of the configured engine
    settings: EvalConfig
    clips: dict[ClipSet, int]
    audio_s: dict[ClipSet, float]  # unpadded
    one_clip: str | None  # the timed clip nearest to 10 s, sent alone several times
    one_clip_s: float | None  # its length
    machine: dict[str, str]
    sources: dict[ClipSet, str] = dataclasses.field(default_factory=dict)  # content of each place
    unreadable: dict[ClipSet, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def one_clip_title(self) -> str:
        """Name `one_clip` as reports do."""
        return "one clip" if self.one_clip_s is None else f"{self.one_clip_s:.1f} s clip"


LoadedSystem = tuple[SystemFacts, list[TimedCall]]


@dataclasses.dataclass(frozen=True)
class _SystemRun:
    """The clips that one system has not heard yet."""

    name: str
    kept: Kept
    left: ClipSets
    timed: Sequence[Clip]  # () if its speed is known or not requested
    timed_key: str
    facts_before: SystemFacts | None

    def windows(self, repeats: int) -> int:
        """Count the windows that are left, timed phases included."""
        scored = [clip for of_set in self.left.values() for clip in of_set]
        return _windows([*scored, *(timed_calls_of(self.timed, repeats) if self.timed else [])])


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
    facts, keys = _run_facts(config, sets, folder, of.machine), keys_of(clips)
    works = [
        _work(name, config, folder, clips, keys, of.say, systems.key_of(name, config), again=again)
        for name in names
    ]
    write_json(folder / RUN_FILE, facts)
    write_json(folder / CLIPS_FILE, keys)
    write_json(folder / SPELLING_FILE, _spelling(config))
    windows = [work.windows(config.eval.repeats) for work in works]
    if not any(windows):
        of.say("nothing is left to be heard")
    # One bar for all systems, so that it tells how long everything takes.
    with tqdm(total=sum(windows), unit="window", smoothing=0.05) as bar:
        for work, count in zip(works, windows, strict=True):
            if count:
                bar.set_description(f"{work.name:31}")
                _run_system(work, config, keys, folder, facts.id, bar.update, systems.open_system)


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
    if windows := work.windows(1):
        with tqdm(total=windows, desc=f"{name:36}", unit="window") as bar:
            _run_system(work, config, keys, folder, conditions, bar.update, open_system)


def _found(config: EvaluationProduct, say: Say) -> dict[ClipSet, FoundCorpus]:
    """Find both sets; the held-out clips, being many, go first and warm a system up."""
    of, limits = config.eval, AudioLimits(config.transcriber.max_audio_s)
    places: dict[ClipSet, str] = {"heldout": of.heldout, "timed": of.manifest}
    drawn = {"heldout": of.limit, "timed": of.timed_limit or of.limit}
    sets: dict[ClipSet, FoundCorpus] = {
        name: find_clips(
            place,
            limit=drawn[name],
            seed=of.seed,
            language=of.language,
            half=of.half,
            read=functools.partial(_decode, limits=limits),
        )
        for name, place in places.items()
        if place
    }
    for name, of_set in sets.items():
        say(f"{places[name]}: {of_set.summary}")
        for file, reason in of_set.unreadable.items():
            say(f"cannot be read, so no system is given it: {file}: {reason}")
    if "heldout" not in sets:
        return sets
    heldout = sets["heldout"]
    if of.heldout == of.manifest:  # the timed clips are scored already
        files = {clip.file for clip in sets["timed"].clips}
        clips = [clip for clip in heldout.clips if clip.file not in files]
        if not clips:
            raise ConfigError(
                "every clip was drawn to be timed, so none is left to be held out; expected a "
                'lower eval.timed_limit, or eval.heldout = ""'
            )
        summary = f"{heldout.summary}; {len(clips)} of these are not timed"
        heldout = FoundCorpus(clips, summary, heldout.unreadable)
    if of.join_s:
        clips = join_clips(heldout.clips, of.join_s, limits)
        joined = f"joined to {len(clips)} passages of one speaker each, of at most {of.join_s:g} s"
        heldout = FoundCorpus(clips, f"{heldout.summary}; {joined}", heldout.unreadable)
        say(f"{of.heldout}: {heldout.summary}")
    return {**sets, "heldout": heldout}


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
    config: EvaluationProduct,
    sets: Mapping[ClipSet, FoundCorpus],
    folder: Path,
    machine: dict[str, str],
) -> RunFacts:
    clips = {name: of_set.clips for name, of_set in sets.items()}
    nearest = clip_nearest_10_s(clips["timed"])
    try:
        run_id = read_json(folder / RUN_FILE, RunFacts, "a run").id
    except ConfigError:  # none yet, or of an earlier version
        run_id = uuid.uuid4().hex
    return RunFacts(
        id=run_id,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        precision=config.build.precision,
        settings=config.eval,
        clips={name: len(of_set) for name, of_set in clips.items()},
        audio_s={name: sum(clip.duration_s for clip in of_set) for name, of_set in clips.items()},
        one_clip=nearest.file if nearest else None,
        one_clip_s=nearest.duration_s if nearest else None,
        machine=machine,
        sources={name: of_set.summary for name, of_set in sets.items()},
        unreadable={name: of_set.unreadable for name, of_set in sets.items()},
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
    kept, of = Kept(folder, name), config.eval
    if kept.go_on(conditions, again=again):
        say(f"{name}: its answers were given under other settings, so it hears all again")
    timed = clips["timed"]
    left = kept.left(clips if name in of.heldout_systems else {"timed": timed}, keys)
    key, facts = timed_key(timed, keys["timed"], of.concurrency, of.repeats), kept.facts()
    is_timed = name not in of.timed or kept.is_timed(key)
    if not left and is_timed and facts is None:  # it ended after its last answer, before its facts
        left = {"timed": timed[-1:]}
    return _SystemRun(name, kept, left, () if is_timed else timed, key, facts)


def _run_system(
    work: _SystemRun,
    config: EvaluationProduct,
    keys: Keys,
    folder: Path,
    run_id: str,
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
                timed.append(call)
            advance(_windows([call]))

        facts = measure_system(
            work.name,
            config,
            work.left,
            timed=work.timed,
            run_id=run_id,
            open_system=open_system,
            on_call=take,
            log=folder / "logs" / f"{work.name}.log",
        )
    if work.timed:
        work.kept.keep_timed(timed, work.timed_key)
    # A part of the clips may need less memory than all of them.
    before = work.facts_before.peak_memory_bytes if work.facts_before else 0
    peak = max(facts.peak_memory_bytes, before)
    write_json(work.kept.facts_path, dataclasses.replace(facts, peak_memory_bytes=peak))


# ---------------------------------------------------------------- load


def load_run(folder: Path, names: tuple[str, ...]) -> tuple[RunFacts, list[LoadedSystem]]:
    """Read a run back; `names` chooses systems, none means all, in the order that they ran.

    Raises:
        ConfigError: a file is missing or damaged, or a system did not hear all of its clips; the
            message says what to do.
    """
    facts = read_json(folder / RUN_FILE, RunFacts, "a run")
    keys = read_json(folder / CLIPS_FILE, Keys, "the clips of a run")
    names = tuple(dict.fromkeys(names or facts.settings.systems))
    return facts, [_load_system(folder, name, facts, keys) for name in names]


def load_spelling(folder: Path) -> Spelling:
    """Read the spellings of a run.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    return read_json(folder / SPELLING_FILE, Spelling, "spellings")


def _load_system(folder: Path, name: str, run: RunFacts, keys: Keys) -> LoadedSystem:
    settings = run.settings
    if name not in settings.systems:
        known = ", ".join(settings.systems)
        raise ConfigError(f"the run in {folder} did not include {name}; it had {known}")
    kept = Kept(folder, name)
    facts = kept.facts()
    if facts is None or facts.run != run.id:
        raise ConfigError(f"{name} did not finish in {folder}; {_GO_ON}")
    heard_by: Keys = keys if name in settings.heldout_systems else {"timed": keys["timed"]}
    calls = kept.heard(heard_by)
    missing = sum(map(len, heard_by.values())) - len(calls)
    if missing:
        raise ConfigError(f"{name} did not hear {missing} clips in {folder}; {_GO_ON}")
    return facts, [*calls, *(kept.timed_calls() if name in settings.timed else ())]
