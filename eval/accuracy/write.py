"""A run's predictions -> its reports: report.json, report.md and report.html, in its folder."""

import dataclasses
from pathlib import Path

from eval.accuracy.gates import gates
from eval.accuracy.normalize import descriptions, normalizer
from eval.accuracy.page.page import write_page
from eval.accuracy.report import Report, report_to_json, to_markdown
from eval.accuracy.run import LoadedSystem, load_run, load_spelling
from eval.accuracy.score import score_system
from eval.files import write_text

PAGE = "report.html"


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
    run, systems = load_run(folder, names)
    spelling = load_spelling(folder)
    systems, unheard = _without_unheard(systems)
    scores = tuple(
        score_system(facts, calls, normalizer_name, spelling) for facts, calls in systems
    )
    heard = {
        group for score in scores for one in score.sets.values() for group in one.groups.values()
    }
    # Of other clips the configured groups say nothing.
    run = dataclasses.replace(run, gate_groups=tuple(g for g in run.gate_groups if g in heard))
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


def _without_unheard(systems: list[LoadedSystem]) -> tuple[list[LoadedSystem], dict[str, str]]:
    """The calls of clips that somebody could read, and why nobody could the others, by file."""
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
