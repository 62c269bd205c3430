"""`python -m eval run` and `report`: answers -> report.json and the report."""

import dataclasses
import operator
from pathlib import Path

from eval.accuracy import run as runs
from eval.accuracy.gates import TITLES, gates
from eval.accuracy.normalize import descriptions, normalizer
from eval.accuracy.predictions import ClipSet
from eval.accuracy.report import (
    Report,
    accuracy_figure,
    read_report,
    report_to_json,
    result_of,
    speed_figures,
)
from eval.accuracy.score import SystemScore, score_system
from eval.config import changed
from eval.record import CONDITIONS, Part, Result, Run, Section, Table, Text, facts, write_text
from serve.contract.errors import ConfigError

_SPEEDS = (  # figure, where a Speed has it, factor, digits
    ("one clip ms", "one_clip_s", 1e3, 0),
    ("alone p50 ms", "alone.p50_s", 1e3, 0),
    ("loaded p95 ms", "loaded.p95_s", 1e3, 0),
    ("RTFx alone", "rtfx_alone", 1.0, 1),
    ("RTFx loaded", "rtfx_loaded", 1.0, 1),
)
_CONDITIONS = (  # what must be equal for figures to be comparable
    "manifest",
    "heldout",
    "clips",
    "audio_s",
    "limit",
    "timed_limit",
    "seed",
    "half",
    "language",
    "tell_language",
    "join_s",
    "gate_groups",
    "concurrency",
    "repeats",
    "threads",
    "machine",
)
_MOST_CLIPS = 40
_Figure = tuple[float | None, int]  # None where it was not measured; digits to show


@dataclasses.dataclass(frozen=True)
class ChangedClip:
    """A clip whose number of character errors changed."""

    system: str
    clip_set: ClipSet
    file: str
    a: int
    b: int


def compared(a: Report, b: Report) -> Result:
    """Show two reports side by side: a, b, and b - a for each system that both have.

    Raises:
        ConfigError: they share no system.
    """
    rows, changed = figure_rows(a, b), clips_that_changed(a, b)
    sets = [name for name in a.run.clips if name in b.run.clips]
    accuracy: list[Part] = []
    for name in sets:
        accuracy += [Text("", f"On {TITLES[name]}"), *accuracy_figure([a, b], name)]
    clips = [[c.system, c.file, str(c.a), str(c.b), f"{c.b - c.a:+d}"] for c in changed]
    note = f"Character errors, the greatest changes first; {len(changed)} in all."
    header = ["system", "clip", "A", "B", "B - A"]
    differing = differing_conditions(a, b)
    speed = speed_figures([a, b])
    return Result(
        title="Two runs, compared",
        about=f"A: {_name(a)}. B: {_name(b)}.",
        sections=(
            *([Section("Not the same in both", [Text("", items=differing)])] if differing else []),
            Section("Accuracy", accuracy or [Text("The runs share no set of clips.")], False),
            Section("Speed", speed or [Text("No system was timed in both runs.")], False),
            Section("Clips", [Table(header, clips[:_MOST_CLIPS], note=note)], False),
            Section("Figures", [Table(["system", "figure", "A", "B", "B - A"], rows)]),
            Section(CONDITIONS, [facts("A", a.run.machine), facts("B", b.run.machine)], False),
        ),
    )


def _name(report: Report) -> str:
    return f"{report.run.config_name}, {report.run.started}, {report.verdict}"


def figure_rows(a: Report, b: Report) -> list[list[str]]:
    """Return every figure that both reports have: system, figure, a, b, and b - a.

    Raises:
        ConfigError: they share no system.
    """
    rows = []
    for name, one_score, two_score in _both(a, b):
        ours, theirs = _figures(one_score), _figures(two_score)
        for label in [label for label in ours if label in theirs]:
            (first, digits), (second, _) = ours[label], theirs[label]
            rows.append([name, label, *_triple(first, second, digits)])
    return rows


def differing_conditions(a: Report, b: Report) -> list[str]:
    """List what was not the same in both runs, though figures depend on it."""
    pairs = [(name, getattr(a.run, name), getattr(b.run, name)) for name in _CONDITIONS]
    pairs.append(("normalizer", a.normalizer, b.normalizer))
    pairs.append(("normalizers", a.normalizers, b.normalizers))
    return [f"{what} differs: {left} and {right}" for what, left, right in pairs if left != right]


def clips_that_changed(a: Report, b: Report) -> list[ChangedClip]:
    """Return clips of both runs with more or fewer character errors, the greatest change first.

    Raises:
        ConfigError: they share no system.
    """
    changed = [
        ChangedClip(name, clip_set, file, counts.errors, second.sets[clip_set].by_clip[file].errors)
        for name, first, second in _both(a, b)
        for clip_set, of_set in first.sets.items()
        for file, counts in of_set.by_clip.items()
        if clip_set in second.sets
        and file in second.sets[clip_set].by_clip
        and second.sets[clip_set].by_clip[file].errors != counts.errors
    ]
    return sorted(changed, key=lambda clip: (-abs(clip.b - clip.a), clip.system, clip.file))


def _both(a: Report, b: Report) -> list[tuple[str, SystemScore, SystemScore]]:
    """Return the systems that both have, in the order of the first."""
    systems = [{score.facts.name: score for score in report.systems} for report in (a, b)]
    both = [(name, systems[0][name], systems[1][name]) for name in systems[0] if name in systems[1]]
    if not both:
        names = [", ".join(by_name) for by_name in systems]
        raise ConfigError(f"the reports share no system: {names[0]} and {names[1]}")
    return both


def _figures(score: SystemScore) -> dict[str, _Figure]:
    """Return the figures that `compare` shows of a system, by title."""
    figures: dict[str, _Figure] = {}
    for clip_set, of_set in score.sets.items():
        figures[f"CER %, {clip_set}"] = (of_set.overall.cer.percent, 2)
        for name, accuracy in of_set.by_normalizer.items():
            figures[f"WER %, {clip_set}, {name}"] = (accuracy.wer.percent, 2)
    if score.speed is not None:
        for label, place, factor, digits in _SPEEDS:
            value = operator.attrgetter(place)(score.speed)
            figures[label] = (None if value is None else value * factor, digits)
    figures["memory MiB"] = (score.facts.peak_memory_bytes / 2**20, 0)
    return figures


def _triple(a: float | None, b: float | None, digits: int) -> tuple[str, str, str]:
    first, second = ("none" if value is None else f"{value:.{digits}f}" for value in (a, b))
    gap = "" if a is None or b is None else f"{b - a:+.{digits}f}"
    return first, second, gap


# ---------------------------------------------------------------- evaluate


def evaluate(
    run: Run, *, without: tuple[str, ...], full: bool, again: bool, normalizer: str
) -> Result:
    """Run the configured systems over the configured clips and report on all their answers.

    Args:
        run: its `config.eval` names systems and clips.
        without: systems that are left out.
        full: whether every system hears the held-out clips and is timed.
        again: whether earlier answers are dropped.
        normalizer: of texts, before they are compared.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    everyone = tuple(name for name in run.config.eval.systems if name not in without)
    run.config = changed(run.config, "eval", systems=everyone)
    if full:
        run.config = changed(run.config, "eval", heldout_systems=everyone, timed=everyone)
    runs.run(run, again=again)
    return score(run.folder, (), normalizer)


def report(
    run: Run,
    *,
    a: Path,
    b: Path | None,
    systems: tuple[str, ...] | None,
    normalizer: str,
    output: Path,
) -> Result:
    """Score a kept run again and write its report; or show two reports side by side.

    Args:
        run: receives the path of the report.
        a: the folder of a run, or with `b` that or a report.json.
        b: the other of two.
        systems: to be scored; None is all systems of the run.
        normalizer: of texts, before they are compared.
        output: the folder of two reports' page.

    Raises:
        ConfigError: the folder holds no run, a system did not finish, or two reports share no
            system.
        FileError: a report cannot be read or written.
    """
    folder = a if b is None else output
    result = (
        score(a, systems or (), normalizer) if b is None else compared(*map(read_report, (a, b)))
    )
    run.path = folder / f"{run.command}.json"
    return result


def score(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Result:
    """Score a run's predictions and write report.json beside them.

    Args:
        folder: of the run.
        names: of the systems to score; () is all systems of the run.
        normalizer_name: of texts, before they are compared.

    Raises:
        ConfigError: the folder holds no run, or a system did not finish.
        FileError: report.json cannot be written.
    """
    run, systems = runs.load_run(folder, names)
    spelling = runs.load_spelling(folder)
    systems, unheard = _without_unheard(systems)
    scores = tuple(
        score_system(facts, calls, normalizer_name, spelling) for facts, calls in systems
    )
    groups = {
        group
        for score in scores
        for of_set in score.sets.values()
        for group in of_set.groups.values()
    }
    # The configured groups decide nothing of other clips.
    run = dataclasses.replace(run, gate_groups=tuple(g for g in run.gate_groups if g in groups))
    judged = gates(
        scores,
        run.precision,
        max_gap_faster_whisper=run.max_cer_gap_faster_whisper,
        max_gap_fp16=run.max_cer_gap_fp16,
        groups=run.gate_groups,
    )
    report = Report(run, normalizer_name, descriptions(spelling), scores, tuple(judged), unheard)
    write_text(folder / "report.json", report_to_json(report))
    calls = {facts.name: made for facts, made in systems}
    return result_of(report, calls, normalizer(normalizer_name, spelling))


def _without_unheard(
    systems: list[runs.LoadedSystem],
) -> tuple[list[runs.LoadedSystem], dict[str, str]]:
    """Return the calls of clips that some system could read, and the reasons of others by file."""
    scored = [call for _, calls in systems for call in calls if call.phase == "accuracy"]
    answered = {(call.clip_set, call.file) for call in scored if call.error is None}
    unheard = {
        call.file: str(call.error) for call in scored if (call.clip_set, call.file) not in answered
    }
    kept = [
        (facts, [call for call in calls if (call.clip_set, call.file) in answered])
        for facts, calls in systems
    ]
    return kept, unheard
