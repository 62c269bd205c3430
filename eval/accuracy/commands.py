"""`python -m eval run`, `score` and `compare`: predictions -> report.json, .md and .html."""

import dataclasses
from pathlib import Path

from eval.accuracy import compare as compared
from eval.accuracy import run as runs
from eval.accuracy.gates import gates
from eval.accuracy.normalize import descriptions, normalizer
from eval.accuracy.page.page import PAGE, write_comparison, write_page
from eval.accuracy.report import Report, head_of, read_report, report_to_json, to_markdown
from eval.accuracy.score import score_system
from eval.config import changed
from eval.files import write_text
from eval.measurement import Result, Run


def evaluate(
    run: Run, *, without: tuple[str, ...], full: bool, again: bool, normalizer: str
) -> Result:
    """Run the configured systems over the configured clips and report on all that they said.

    Args:
        run: its `config.eval` says what and how.
        without: systems that are left out.
        full: whether every system hears the held-out clips and is timed.
        again: whether what they said before is dropped.
        normalizer: how texts are normalised before they are compared.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    everyone = tuple(name for name in run.config.eval.systems if name not in without)
    run.config = changed(run.config, "eval", systems=everyone)
    if full:
        run.config = changed(run.config, "eval", heldout_systems=everyone, timed=everyone)
    runs.run(run, again=again)
    return score(run, folder=run.folder, systems=(), normalizer=normalizer)


def score(run: Run, *, folder: Path, systems: tuple[str, ...] | None, normalizer: str) -> Result:
    """Score what a run kept and write the reports; arguments and errors as `write_report`."""
    report = write_report(folder, systems or (), normalizer)
    text = (
        f"{head_of(to_markdown(report))}\n\nThe whole report: {folder / 'report.md'}; raw "
        f"predictions: {folder / 'predictions'}\n"
        f"To look at, with the clips to listen to: {folder / PAGE}"
    )
    return Result(checks=report.gates, text=text)


def compare(run: Run, *, a: Path, b: Path, html: Path) -> Result:
    """Show two reports side by side, and draw them.

    Raises:
        FileError, ConfigError: one cannot be read, or they share no system.
    """
    first, second = read_report(a), read_report(b)
    text = compared.compare(first, second)
    write_comparison(html, first, second)
    return Result(text=f"{text}\n\nTo look at: {html}")


def write_report(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Report:
    """Score a run's predictions and write the reports beside them.

    Args:
        folder: of the run.
        names: of the systems to score; () is all of the run.
        normalizer_name: how texts are normalised before they are compared.

    Raises:
        ConfigError: the folder holds no run, or a system did not finish.
        FileError: a report cannot be written.
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
    # Of other clips the configured groups say nothing.
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
    write_text(folder / "report.md", to_markdown(report))
    calls = {facts.name: made for facts, made in systems}
    write_page(folder / PAGE, report, calls, normalizer(normalizer_name, spelling))
    return report


def _without_unheard(
    systems: list[runs.LoadedSystem],
) -> tuple[list[runs.LoadedSystem], dict[str, str]]:
    """Return the calls of clips that somebody could read, and why others were not, by file."""
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
