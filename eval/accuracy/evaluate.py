"""`python -m eval run` and `report`: answers -> report.json and the report; two runs compared."""

from pathlib import Path

from eval.accuracy import run as runs
from eval.accuracy.normalize import Normalize, normalizer
from eval.accuracy.predictions import TimedCall
from eval.accuracy.report import Report, compare_runs, result_of
from eval.accuracy.score import gates, score_system
from eval.config import changed
from eval.record import Result, Run, verdict, write_json

FORMAT_VERSION = 6  # of report.json


def evaluate(
    run: Run, *, without: tuple[str, ...], full: bool, again: bool, normalizer: str
) -> Result:
    """Run the configured systems over the configured clips and report on all their answers.

    Args:
        run: its `config.eval` names systems and clips.
        without: systems that are left out.
        full: whether every system transcribes the held-out clips and is timed.
        again: whether earlier answers are dropped.
        normalizer: the name of the text normaliser.

    Raises:
        EarshotError: a system or something that it needs is missing, or a system failed; no clip
            can be read.
    """
    names = tuple(name for name in run.config.eval.systems if name not in without)
    run.config = changed(run.config, "eval", systems=names)
    if full:
        run.config = changed(run.config, "eval", heldout_systems=names, timed=names)
    runs.run_systems(run, again=again)
    return kept_result(run.folder, (), normalizer)


def report(
    run: Run,
    *,
    a: Path,
    b: Path | None,
    systems: tuple[str, ...] | None,
    normalizer: str,
    output: Path,
) -> Result:
    """Score a kept run again and write its report; or show two runs side by side.

    Args:
        run: receives the path of the report.
        a: the folder of a run.
        b: the folder of another one.
        systems: to be scored; None is all systems of the run.
        normalizer: the name of the text normaliser.
        output: the folder of two runs' page.

    Raises:
        ConfigError: a folder holds no run, a system did not finish, or two runs share no system.
        FileError: a report cannot be read or written.
    """
    run.path = (a if b is None else output) / f"{run.command}.json"
    if b is None:
        return kept_result(a, systems or (), normalizer)
    return compare_runs(*(score(folder, systems or (), normalizer)[0] for folder in (a, b)))


def kept_result(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Result:
    """Score a run, write report.json beside its predictions, and return the result; as `score`."""
    report, calls, normalize = score(folder, names, normalizer_name)
    head = {"format_version": FORMAT_VERSION, "verdict": verdict(report.gates)}
    write_json(folder / "report.json", {**head, **vars(report)})
    return result_of(report, calls, normalize)


def score(
    folder: Path, names: tuple[str, ...], normalizer_name: str
) -> tuple[Report, dict[str, list[TimedCall]], Normalize]:
    """Score a run's predictions.

    Args:
        folder: the run's folder.
        names: the systems to score; () is all systems of the run.
        normalizer_name: the name of the text normaliser.

    Returns:
        The report, the calls of each system by name, and the normaliser.

    Raises:
        ConfigError: the folder holds no run, or a system did not finish.
    """
    run, spelling, systems = runs.load_run(folder, names)
    settings = run.settings
    normalize = normalizer(normalizer_name, spelling)
    scores = [score_system(facts, calls, normalize) for facts, calls in systems]
    # The configured groups decide nothing of other clips.
    groups = {call.group for _, calls in systems for call in calls}
    deciding = tuple(group for group in settings.gate_groups if group in groups)
    checks = gates(scores, run.precision, settings, deciding)
    report = Report(run, normalizer_name, tuple(scores), tuple(checks), deciding)
    return report, {facts.name: calls for facts, calls in systems}, normalize
