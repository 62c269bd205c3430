"""A run's predictions -> its reports: report.json, report.md and report.html, in its folder."""

from pathlib import Path

from eval.accuracy.gates import gates
from eval.accuracy.normalize import descriptions, normalizer
from eval.accuracy.page.page import write_page
from eval.accuracy.report import Report, report_to_json, to_markdown
from eval.accuracy.run import load_run, load_spelling
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
    scores = tuple(
        score_system(facts, calls, normalizer_name, spelling) for facts, calls in systems
    )
    judged = gates(
        scores,
        run.precision,
        max_gap_faster_whisper=run.max_cer_gap_faster_whisper,
        max_gap_fp16=run.max_cer_gap_fp16,
    )
    report = Report(run, normalizer_name, descriptions(spelling), scores, tuple(judged))
    write_text(folder / "report.json", report_to_json(report))
    write_text(folder / "report.md", to_markdown(report))
    calls = {facts.name: made for facts, made in systems}
    write_page(folder / PAGE, report, calls, normalizer(normalizer_name, spelling))
    return report
