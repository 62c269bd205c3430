"""`python -m eval long`: let systems hear long recordings, score the answers, and report."""

import collections
import dataclasses
import datetime
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from eval.accuracy.normalize import DEFAULT, Spelling, descriptions, normalizer
from eval.accuracy.predictions import Kept, Keys, SystemFacts, TimedCall
from eval.accuracy.report import percent
from eval.accuracy.score import Counts, Rate
from eval.accuracy.worker import measure_system
from eval.config import Config, EvalConfig, changed
from eval.figures import rate_chart
from eval.long.compose import (
    KINDS,
    UNSPOKEN,
    Composed,
    Recording,
    What,
    compose,
    read_manifest,
    read_sentences,
)
from eval.long.plan import NAMES, PEOPLE_PLAN, PLAN, plan
from eval.long.score import (
    BLOCK_S,
    NEAR_CUT_S,
    RUN,
    TOUCH_S,
    Figures,
    LongScore,
    long_gates,
    score_long,
)
from eval.long.systems import open_system, prepare_names
from eval.long.without_speech import invented
from eval.record import (
    CONDITIONS,
    Figure,
    Part,
    Result,
    Run,
    Section,
    Table,
    Text,
    facts,
    read_json,
    write_json,
    write_jsonl,
)
from serve.contract.errors import ConfigError

RUN_FILE = "run.json"
RECORDINGS_FILE = "recordings.jsonl"

PASSAGES = "tests/data/human/long.jsonl"  # beside the bundled clips of people
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
    bundled = config.eval.manifest == EvalConfig.manifest
    places = config.eval.manifest, config.eval.heldout, PASSAGES if bundled else ""
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
    return changed(config, "transcriber", request_timeout_s=_TIMEOUT_S)


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


# ---------------------------------------------------------------- report


_SHOWN: tuple[What, ...] = ("speech", *UNSPOKEN)

RULES = (
    "Every system gets a recording's bytes and returns the whole text, one recording at a time, "
    "alone in its own process, on the same CPU cores. None is told the language.",
    "Words and characters: the whole recording's words are aligned at once (jiwer); the characters "
    "of a sentence are then compared with the words that fell to it. Rates are all edits / the "
    f"length of all references; intervals 95 %, bootstrap over minutes ({BLOCK_S:.0f} s).",
    f"Lost are words without a counterpart, in stretches if {RUN} and more in a row. Added words "
    f"in stretches of {RUN} and more are repeated if they stand in the text once more near by, "
    "else made up.",
    "Characters where nobody speaks: of segments that share no more than "
    f"{TOUCH_S:g} s with any sentence. Systems that are not asked for timestamps have no times but "
    "those of their windows, which hardly ever do.",
    f"Beside a cut are sentences within {NEAR_CUT_S:g} s of where one window's segments end and "
    "the next one's begin.",
    "RTFx: seconds of audio / seconds from the bytes to the whole text, one recording at a time.",
)


def long(
    run: Run,
    *,
    systems: tuple[str, ...] | None,
    minutes: float | None,
    seed: int,
    again: bool,
    without_speech: bool,
) -> Result:
    """Let systems hear recordings, and score all answers that the folder holds.

    Args:
        run: its config says the limits of the gates.
        systems: their names; None is all.
        minutes, seed, again: as of `run_long`.
        without_speech: whether they hear short clips in which nobody speaks instead.

    Raises:
        EarshotError: a system, or something that it needs, is missing or failed.
        ConfigError: the folder holds a run of other recordings or settings.
    """
    if without_speech:
        return invented(run, systems=systems, seed=seed)
    run_long(run, systems or NAMES, minutes=minutes, seed=seed, again=again)
    loaded, normalize = load_long(run.folder), normalizer(DEFAULT)
    scores = tuple(
        score_long(system.facts, system.calls, loaded.recordings, normalize)
        for system in loaded.systems
    )
    return result_of(loaded, scores, run.config.eval.max_cer_gap_faster_whisper)


def result_of(loaded: Loaded, scores: Sequence[LongScore], max_cer_gap: float) -> Result:
    """Return the result of scored recordings."""
    run, kept = loaded.run, [{**vars(s), "blocks": None, "sentences": None} for s in scores]
    notes = [f"`{name}` has not heard everything yet; run again." for name in loaded.unfinished]
    recordings = Section("Recordings", [_recordings(loaded.recordings)], printed=False)
    settings = [
        dataclasses.replace(facts(score.name, score.facts.settings), folded="closed")
        for score in scores
    ]
    conditions: list[Part] = [facts("Machine", run.machine), Text("", "Rules", RULES), *settings]
    return Result(
        {"run": run, "systems": kept, "unfinished": loaded.unfinished},
        tuple(long_gates(scores, max_cer_gap)),
        (*_sections(loaded, scores), recordings, Section(CONDITIONS, conditions, printed=False)),
        f"Long recordings: {run.config_name}",
        f"{run.started}; {contents(loaded.recordings)}; {run.threads} CPU threads for every "
        f"system; normaliser `{DEFAULT}`: {descriptions(Spelling())[DEFAULT]}.",
        notes=(Text("", items=notes),) if notes else (),
    )


def contents(recordings: Sequence[Recording]) -> str:
    """Say what the recordings hold, in a line."""
    total_s = sum(recording.duration for recording in recordings)
    spoken_s = sum(s.end_s - s.start_s for recording in recordings for s in recording.sentences)
    words = sum(len(recording.text.split()) for recording in recordings)
    return (
        f"{len(recordings)} recordings, {total_s / 60:.1f} minutes, of which {spoken_s / 60:.1f} "
        f"are speech ({words:,} words)"
    )


def _sections(loaded: Loaded, scores: Sequence[LongScore]) -> list[Section]:
    """Return the sections on the answers, each with a row for each system."""

    def section(title: str, note: str, columns: dict[str, Callable[[Figures], str]]) -> Section:
        rows = [
            (score.name, *(cell(score.overall) for cell in columns.values())) for score in scores
        ]
        return Section(title, [Table(("system", *columns), rows, note=note)])

    rates = {
        title: {score.name: [getattr(score.overall, name)] for score in scores}
        for title, name in (("CER, %", "cer"), ("WER, %", "wer"))
    }
    charts = [chart for title, of in rates.items() if (chart := rate_chart(title, of))]
    accuracy = section(
        "Accuracy",
        "Counts are words, of all that were said.",
        {
            "CER [95 %]": lambda f: percent(f.cer),
            "WER [95 %]": lambda f: percent(f.wer),
            "lost": lambda f: str(f.wer.counts.deletions),
            "in stretches": lambda f: str(f.lost_in_stretches),
            "added": lambda f: str(f.wer.counts.insertions),
            "repeated": lambda f: str(f.repeated),
            "made up": lambda f: str(f.made_up),
            "RTFx": lambda f: f"{f.rtfx:.1f}",
        },
    )
    return [
        Section("Accuracy", [*([Figure(charts)] if charts else []), *accuracy.parts]),
        _by_kind(loaded.recordings, scores),
        section(
            "Text where nobody speaks",
            "Characters, by what there is instead of speech.",
            {what: lambda f, what=what: str(f.unspoken[what]) for what in UNSPOKEN},  # type: ignore[misc]
        ),
        section(
            "Beside cuts",
            "Lost and added words of sentences beside a cut, and of all others.",
            {
                "cuts": lambda f: "not known" if f.cuts is None else str(f.cuts),
                "lost": lambda f: _share(f.at_cuts.deletions, f.at_cuts),
                "added": lambda f: _share(f.at_cuts.insertions, f.at_cuts),
                "lost elsewhere": lambda f: _share(f.elsewhere.deletions, f.elsewhere),
                "added elsewhere": lambda f: _share(f.elsewhere.insertions, f.elsewhere),
            },
        ),
        _languages(scores),
    ]


def _share(count: int, of: Counts) -> str:
    return f"{count} of {of.length} ({100 * count / of.length:.2f} %)" if of.length else "none"


def _by_kind(recordings: Sequence[Recording], scores: Sequence[LongScore]) -> Section:
    kinds = list(dict.fromkeys(recording.kind for recording in recordings))
    rows = [(score.name, *(percent(score.by_kind[kind].cer) for kind in kinds)) for score in scores]
    note = "CER. " + "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + "."
    return Section("By kind of recording", [Table(("system", *kinds), rows, note=note)])


def _languages(scores: Sequence[LongScore]) -> Section:
    rows = []
    for score in scores:
        right = sum(first == answer for first, answer in score.languages)
        mixed = score.by_kind.get("languages")
        empty = Rate(None, None, None, Counts())
        rows.append(
            (
                score.name,
                f"{right} of {len(score.languages)}",
                percent(mixed.first_language if mixed else empty),
                percent(mixed.other_languages if mixed else empty),
            )
        )
    note = (
        "Recordings whose language was answered as that of their first sentence; and CER of "
        "sentences in recordings that change it."
    )
    header = ("system", "answered", "CER, first language", "CER, the other")
    return Section("Languages", [Table(header, rows, note=note)])


def _recordings(recordings: Sequence[Recording]) -> Table:
    """Tabulate the length and the content of each recording."""
    rows = []
    for recording in recordings:
        seconds: dict[What, float] = collections.defaultdict(float)
        for stretch in recording.stretches:
            seconds[stretch.what] += stretch.end_s - stretch.start_s
        rows.append(
            [
                recording.file,
                f"{recording.duration / 60:.1f}",
                str(len(recording.sentences)),
                *(f"{seconds[what]:.0f}" for what in _SHOWN),
            ]
        )
    header = ["recording", "minutes", "sentences", *(f"{what}, s" for what in _SHOWN)]
    return Table(header, rows)
