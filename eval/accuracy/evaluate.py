"""`python -m eval run` and `report`: predictions -> report.json and the report's files."""

import dataclasses
from pathlib import Path

from eval.accuracy import run as runs
from eval.accuracy.compare import compared
from eval.accuracy.gates import gates
from eval.accuracy.normalize import descriptions, normalizer
from eval.accuracy.report import Report, read_report, report_to_json, result_of
from eval.accuracy.score import score_system
from eval.config import changed
from eval.record import Result, Run, write_text


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
