"""`python -m eval run` and `report`: answers -> report.json and the report; two runs compared."""

from pathlib import Path

from eval.accuracy import run as runs
from eval.accuracy.normalize import Normalize, description, normalizer
from eval.accuracy.predictions import TimedCall
from eval.accuracy.report import Report, accuracy_parts, result_of, speed_parts
from eval.accuracy.score import TITLES, SystemScore, gates, score_system
from eval.config import changed
from eval.record import (
    CONDITIONS,
    Part,
    ReportSection,
    Result,
    Run,
    Table,
    Text,
    facts,
    verdict,
    write_json,
)
from serve.contract.errors import ConfigError

FORMAT_VERSION = 6  # of report.json
_MAX_CLIPS = 40  # in the table of changed clips


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
    runs.run(run, again=again)
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
    return compared(*(score(folder, systems or (), normalizer)[0] for folder in (a, b)))


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
    scores = [score_system(of, calls, normalizer_name, spelling) for of, calls in systems]
    # The configured groups decide nothing of other clips.
    groups = {call.group for _, calls in systems for call in calls}
    deciding = tuple(group for group in settings.gate_groups if group in groups)
    judged = gates(scores, run.precision, settings, deciding)
    rules = description(normalizer_name, spelling)
    report = Report(run, normalizer_name, rules, tuple(scores), tuple(judged), deciding)
    calls = {of.name: made for of, made in systems}
    return report, calls, normalizer(normalizer_name, spelling)


# ---------------------------------------------------------------- two runs


def compared(a: Report, b: Report) -> Result:
    """Show two runs side by side, for each system that both have.

    Raises:
        ConfigError: they share no system.
    """
    first, second = ({score.facts.name: score for score in run.systems} for run in (a, b))
    names = [name for name in first if name in second]
    if not names:
        raise ConfigError(
            f"the runs share no system: {', '.join(first) or 'none'} and "
            f"{', '.join(second) or 'none'}; expected at least one that both ran"
        )
    both = {
        f"{run}: {name}": of[name] for name in names for run, of in (("A", first), ("B", second))
    }
    accuracy = list[Part]()
    for clip_set in [name for name in a.run.clips if name in b.run.clips]:
        sets = {
            name: score.sets[clip_set] for name, score in both.items() if clip_set in score.sets
        }
        accuracy += [Text("", f"On {TITLES[clip_set]}"), *accuracy_parts(sets)]
    clips = _changed_clips(names, first, second)
    note = f"Character errors, the greatest changes first; {len(clips)} in all."
    table = Table(["system", "clip", "A", "B", "B - A"], clips[:_MAX_CLIPS], note=note)
    about = [f"{r.run.config_name}, {r.run.started}, {verdict(r.gates)}" for r in (a, b)]
    machines = [facts("A", a.run.machine), facts("B", b.run.machine)]
    differing = _differing_conditions(a, b)
    return Result(
        title="Two runs, compared",
        about=f"A: {about[0]}. B: {about[1]}.",
        sections=(
            ReportSection("Conditions that differ", [Text(differing or "None.")]),
            ReportSection("Accuracy", accuracy or [Text("The runs share no set of clips.")]),
            ReportSection("Speed", speed_parts(both, b.run)),
            ReportSection("Clips", [table], False),
            ReportSection(CONDITIONS, machines, False),
        ),
    )


def _differing_conditions(a: Report, b: Report) -> str:
    """Name the conditions of figures that were not the same in both runs."""
    left, right = (
        {
            **vars(report.run.settings),
            "clips": report.run.clips,
            "audio_s": report.run.audio_s,
            "machine": report.run.machine,
        }
        for report in (a, b)
    )
    return "; ".join(
        f"{name} differs: {value} and {right[name]}"
        for name, value in left.items()
        if value != right[name]
    )


def _changed_clips(
    names: list[str], first: dict[str, SystemScore], second: dict[str, SystemScore]
) -> list[list[str]]:
    """Return a row for each clip whose character errors changed, the greatest change first."""
    changed = [
        (name, file, counts.errors, second[name].sets[clip_set].by_clip[file].errors)
        for name in names
        for clip_set, of_set in first[name].sets.items()
        if clip_set in second[name].sets
        for file, counts in of_set.by_clip.items()
        if file in second[name].sets[clip_set].by_clip
    ]
    changed.sort(key=lambda row: (-abs(row[3] - row[2]), row[0], row[1]))
    return [[name, file, str(a), str(b), f"{b - a:+d}"] for name, file, a, b in changed if a != b]
