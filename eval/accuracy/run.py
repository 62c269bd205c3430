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
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
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
from eval.accuracy.worker import measure_system, timed_calls_of
from eval.config import Config, changed
from eval.corpora.find import Found, find_clips
from eval.record import Run, Say, load_line, read_json, write_json
from serve.contract.config import Precision
from serve.contract.errors import CheckpointError, ConfigError
from serve.contract.files import read_bytes
from serve.speech.audio import decode
from serve.speech.features import WINDOW_S
from serve.speech.meter import Limits


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time that a system takes."""

    start_s: float
    window_s: float  # one window, one call at a time

    @classmethod
    def of(cls, start_s: float, calls: Sequence[TimedCall]) -> "Cost":
        """Compute it of some calls, of which the first may have warmed the system up."""
        warm = calls[1:] or calls
        return cls(start_s, statistics.fmean(c.latency_s / windows(c.duration_s) for c in warm))


def windows(duration_s: float) -> int:
    """Return how many windows hold so much audio: what a system's work goes by, not the seconds."""
    return max(1, math.ceil(duration_s / WINDOW_S))


def start_line(clips: Mapping[ClipSet, Sequence[Clip]], probed: int) -> str:
    """Write what is to be heard, before anything runs.

    Args:
        clips: of both sets.
        probed: how many of them each system hears first.
    """
    every = [clip for of_set in clips.values() for clip in of_set]
    audio_s = sum(clip.duration_s for clip in every)
    return (
        f"{len(every)} clips, {audio_s / 60:.1f} minutes of audio in "
        f"{sum(windows(clip.duration_s) for clip in every)} windows; each system hears "
        f"{min(probed, len(every))} of them first, which tells about how long all of them take; "
        "--limit N takes fewer clips, --without A,B fewer systems"
    )


def estimate_line(name: str, cost: Cost, left: int) -> str:
    """Write how long a system will take for the windows that it has left."""
    return (
        f"{name:31} about {_minutes(cost, left)} minutes: {left} windows of {cost.window_s:.2f} s"
    )


def total_line(systems: Mapping[str, tuple[Cost, int]]) -> str:
    """Write how long all systems will take; each has a cost and the windows it has left."""
    if not systems:
        return "nothing is left to be heard"
    seconds = sum(cost.start_s + cost.window_s * left for cost, left in systems.values())
    return f"all that is left{'':15} about {seconds / 60:5.1f} minutes, if nothing else runs here"


def _minutes(cost: Cost, left: int) -> str:
    return f"{(cost.start_s + cost.window_s * left) / 60:5.1f}"


# ---------------------------------------------------------------- run


RUN_FILE = "run.json"
CLIPS_FILE = "clips.json"
SPELLING_FILE = "spelling.json"
PROBED_CLIPS = 4  # that a system hears first, one after another, to see how long all will take


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a run; `run.json` holds exactly these fields."""

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
    one_clip: str | None  # that is asked alone again and again: the timed one nearest to 10 s
    one_clip_s: float | None  # its length
    concurrency: int
    repeats: int
    threads: int
    max_cer_gap_faster_whisper: float  # points
    max_cer_gap_fp16: float  # points
    machine: dict[str, str]
    limit: int = 0
    timed_limit: int = 0
    seed: int = 0
    half: str = ""
    language: str = ""
    tell_language: bool = False
    join_s: float = 0.0
    gate_groups: tuple[str, ...] = ()
    sources: dict[ClipSet, str] = dataclasses.field(default_factory=dict)  # what each place holds
    unreadable: dict[ClipSet, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def one_clip_title(self) -> str:
        """Name `one_clip` as reports do."""
        return "one clip" if self.one_clip_s is None else f"{self.one_clip_s:.1f} s clip"


# Not those of [eval] that other commands read.
_KEPT = {field.name for field in dataclasses.fields(RunFacts)}

LoadedSystem = tuple[SystemFacts, list[TimedCall]]
_GO_ON = "run again, which goes on where it ended, or name the systems that did with --systems"


@dataclasses.dataclass(frozen=True)
class _Work:
    """All that one system is to hear in a run, and what of that is left."""

    name: str
    kept: Kept
    clips: ClipSets
    timed: Sequence[Clip]  # () where it is not timed, or was
    timed_key: str
    left: ClipSets
    facts_before: SystemFacts | None

    @property
    def is_done(self) -> bool:
        return not self.left and not self.timed and self.facts_before is not None

    def windows(self, repeats: int) -> int:
        """Count the windows that are left, timed phases included."""
        scored = [clip for of_set in self.left.values() for clip in of_set]
        timed = timed_calls_of(self.timed, repeats) if self.timed else []
        return sum(windows(clip.duration_s) for clip in [*scored, *timed])


@dataclasses.dataclass(frozen=True)
class _Common:
    """The same for every system of a run."""

    config: Config
    clips: ClipSets
    keys: Keys
    folder: Path
    run_id: str
    say: Say

    def keyed(self, call: TimedCall) -> TimedCall:
        """Return the call with the key of its clip."""
        return dataclasses.replace(call, key=self.keys[call.clip_set][call.file])


def run(of: Run, *, again: bool = False) -> None:
    """Run every configured system over every clip that it has not heard in the run's folder.

    Args:
        of: the run; its folder's answers of the same conditions are gone on with.
        again: whether what was said before is dropped.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    config, folder, tell = of.config, of.folder, of.say
    names = config.eval.systems
    known = systems.specs(config)
    systems.check(names, known, (*config.eval.heldout_systems, *config.eval.timed))
    sets = _found(config, tell)
    clips = {name: of_set.clips for name, of_set in sets.items()}
    tell(start_line(clips, PROBED_CLIPS))
    tell(load_line())
    systems.prepare([known[name] for name in names], config, of.config_path)
    # Every system gets the same threads, ours too.
    config = changed(config, "runtime", threads=config.eval.threads)
    facts = _run_facts(config, sets, folder, of.machine)
    common = _Common(config, clips, keys_of(clips), folder, facts.id, tell)
    works = [_work(name, common, again=again) for name in names]
    write_json(folder / RUN_FILE, facts)
    write_json(folder / CLIPS_FILE, common.keys)
    write_json(folder / SPELLING_FILE, _spelling(config))
    left = [work for work in works if not work.is_done]
    costs: dict[str, tuple[Cost, int]] = {}
    for number, work in enumerate(left, start=1):
        tell(f"{work.name}, {number} of {len(left)} systems, hears a few clips")
        cost = _probe(work, common)
        work = _work(work.name, common, again=False)
        costs[work.name] = cost, work.windows(config.eval.repeats)
        tell(estimate_line(work.name, *costs[work.name]))
    tell(total_line(costs))
    for work in [_work(work.name, common, again=False) for work in left]:
        _run_system(work, common)


def _found(config: Config, tell: Say) -> dict[ClipSet, Found]:
    """Find both sets; the held-out clips, being many, go first and warm a system up."""
    of, limits = config.eval, Limits(config.transcriber.max_audio_s)
    places: dict[ClipSet, str] = {"heldout": of.heldout, "timed": of.manifest}
    drawn = {"heldout": of.limit, "timed": of.timed_limit or of.limit}
    read = functools.partial(_decode, limits=limits)
    sets: dict[ClipSet, Found] = {}
    for name, place in places.items():
        if place:
            sets[name] = find_clips(
                place,
                limit=drawn[name],
                seed=of.seed,
                language=of.language,
                half=of.half,
                read=read,
            )
    for name, of_set in sets.items():
        tell(f"{places[name]}: {of_set.summary}")
        for file, reason in of_set.unreadable.items():
            tell(f"cannot be read, so nobody is given it: {file}: {reason}")
    if "heldout" in sets and of.heldout == of.manifest:
        sets["heldout"] = _without(sets["heldout"], sets["timed"].clips)
    if "heldout" in sets and of.join_s:
        sets["heldout"] = _as_passages(sets["heldout"], of.join_s, limits)
        tell(f"{places['heldout']}: {sets['heldout'].summary}")
    return sets


def _decode(path: Path, limits: Limits) -> None:
    for _ in decode(read_bytes(path), limits):
        pass


def _without(clip_set: Found, others: Sequence[Clip]) -> Found:
    """Leave out what is timed: it is scored there, so the same place need not give it twice."""
    files = {clip.file for clip in others}
    clips = [clip for clip in clip_set.clips if clip.file not in files]
    if not clips:
        raise ConfigError(
            "every clip was drawn to be timed, so none is left to be held out; draw fewer with "
            "--timed-limit, or say --heldout ''"
        )
    summary = f"{clip_set.summary}; {len(clips)} of these are not timed"
    return Found(clips, summary, clip_set.unreadable)


def _as_passages(clip_set: Found, longest_s: float, limits: Limits) -> Found:
    clips = join_clips(clip_set.clips, longest_s, limits)
    summary = (
        f"{clip_set.summary}; joined to {len(clips)} passages of one speaker each, of at most "
    )
    return Found(clips, f"{summary}{longest_s:g} s", clip_set.unreadable)


def _spelling(config: Config) -> Spelling:
    """Read the checkpoint's spellings; none where it is not at hand or, as OpenAI's, has none."""
    try:
        return read_spelling(
            hub.checkpoint_folder(config.build.checkpoint, with_weights=False).path
        )
    except CheckpointError:
        return Spelling()


def _run_facts(
    config: Config, sets: Mapping[ClipSet, Found], folder: Path, machine: dict[str, str]
) -> RunFacts:
    clips = {name: of_set.clips for name, of_set in sets.items()}
    nearest = clip_nearest_10_s(clips["timed"])
    return RunFacts(
        id=_id_of(folder),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        config_name=config.name,
        precision=config.build.precision,
        clips={name: len(of_set) for name, of_set in clips.items()},
        audio_s={name: sum(clip.duration_s for clip in of_set) for name, of_set in clips.items()},
        one_clip=nearest.file if nearest else None,
        one_clip_s=nearest.duration_s if nearest else None,
        machine=machine,
        sources={name: of_set.summary for name, of_set in sets.items()},
        unreadable={name: of_set.unreadable for name, of_set in sets.items()},
        **{name: value for name, value in vars(config.eval).items() if name in _KEPT},
    )


def _id_of(folder: Path) -> str:
    """Return the id of a folder, which keeps it, so that what it holds can be gone on with."""
    try:
        return read_json(folder / RUN_FILE, RunFacts, "a run").id
    except ConfigError:  # none yet, or of an earlier version
        return uuid.uuid4().hex


def _work(name: str, common: _Common, *, again: bool) -> _Work:
    kept, of, clips, keys = Kept(common.folder, name), common.config.eval, common.clips, common.keys
    if kept.go_on(systems.key_of(name, common.config), again=again):
        common.say(
            f"{name}: what it said before was said under other settings, so it hears all again"
        )
    only_timed: ClipSets = {"timed": clips["timed"]}
    heard_by = clips if name in of.heldout_systems else only_timed
    left, facts = kept.left(heard_by, keys), kept.facts()
    key = timed_key(clips["timed"], keys["timed"], of.concurrency, of.repeats)
    is_timed = name not in of.timed or kept.is_timed(key)
    if not left and is_timed and facts is None:  # it ended after its last answer, before its facts
        left = {"timed": clips["timed"][-1:]}
    return _Work(
        name=name,
        kept=kept,
        clips=heard_by,
        timed=() if is_timed else clips["timed"],
        timed_key=key,
        left=left,
        facts_before=facts,
    )


def _probe(work: _Work, common: _Common) -> Cost:
    """Let a system hear a few of what is left, one after another, to see what a window costs.

    What it says is kept as any other.
    """
    scored = [(name, clip) for name, of_set in work.left.items() for clip in of_set]
    few = scored[:: max(1, len(scored) // PROBED_CLIPS)][:PROBED_CLIPS]
    if not few:  # the timed phases alone are left
        few = [("timed", clip) for clip in work.timed[:PROBED_CLIPS]]
    alone = dataclasses.replace(common, config=changed(common.config, "eval", concurrency=1))
    clips: dict[ClipSet, list[Clip]] = {}
    for name, clip in few:
        clips.setdefault(name, []).append(clip)
    calls: list[TimedCall] = []
    with work.kept.appended() as keep:

        def take(call: TimedCall) -> None:
            calls.append(call)
            if scored:
                keep(common.keyed(call))

        facts = _measured(work, alone, clips, (), take)
    return Cost.of(facts.start_s, calls)


def _measured(
    work: _Work,
    common: _Common,
    clips: ClipSets,
    timed: Sequence[Clip],
    take: Callable[[TimedCall], None],
) -> SystemFacts:
    return measure_system(
        work.name,
        common.config,
        clips,
        timed=timed,
        run_id=common.run_id,
        open_system=systems.open_system,
        on_call=take,
        log=common.folder / "logs" / f"{work.name}.log",
    )


def _run_system(work: _Work, common: _Common) -> None:
    """Let one system hear what is left, and keep each answer."""
    work.kept.facts_path.unlink(missing_ok=True)
    timed: list[TimedCall] = []
    total = work.windows(common.config.eval.repeats)
    bar = tqdm(total=total, desc=f"{work.name:31}", unit="window")
    with bar, work.kept.appended() as keep:

        def take(call: TimedCall) -> None:
            if call.phase == "accuracy":
                keep(common.keyed(call))
            else:
                timed.append(call)
            bar.update(windows(call.duration_s))

        facts = _measured(work, common, work.left, work.timed, take)
    if work.timed:
        work.kept.keep_timed(timed, work.timed_key)
    work.kept.finish(facts, work.facts_before)


def load_run(folder: Path, names: tuple[str, ...]) -> tuple[RunFacts, list[LoadedSystem]]:
    """Read a run back; `names` chooses systems, none means all, in the order that they ran.

    Raises:
        ConfigError: a file is missing or damaged, or a system did not hear all of its clips; the
            message says what to do.
    """
    facts = read_json(folder / RUN_FILE, RunFacts, "a run")
    keys = read_json(folder / CLIPS_FILE, Keys, "the clips of a run")
    return facts, [
        _load_system(folder, name, facts, keys) for name in dict.fromkeys(names or facts.systems)
    ]


def load_spelling(folder: Path) -> Spelling:
    """Read the spellings that a run kept; none in runs of earlier versions.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / SPELLING_FILE
    return read_json(path, Spelling, "spellings") if path.is_file() else Spelling()


def _load_system(folder: Path, name: str, run_facts: RunFacts, keys: Keys) -> LoadedSystem:
    if name not in run_facts.systems:
        known = ", ".join(run_facts.systems)
        raise ConfigError(f"the run in {folder} did not include {name}; it had {known}")
    kept = Kept(folder, name)
    facts = kept.facts()
    if facts is None or facts.run != run_facts.id:
        raise ConfigError(f"{name} did not finish in {folder}; {_GO_ON}")
    only_timed: Keys = {"timed": keys["timed"]}
    heard_by = keys if name in run_facts.heldout_systems else only_timed
    calls = kept.heard(heard_by)
    missing = sum(map(len, heard_by.values())) - len(calls)
    if missing:
        raise ConfigError(f"{name} did not hear {missing} clips in {folder}; {_GO_ON}")
    return facts, [*calls, *(kept.timed_calls() if name in run_facts.timed else ())]
