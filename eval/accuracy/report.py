"""Scores -> report.json and report.md, and the comparison of two reports.

The rules of comparison stand in the report itself, beside the numbers that follow them.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.accuracy.normalize import DESCRIPTIONS
from eval.accuracy.run import RunFacts, load_run
from eval.accuracy.score import (
    BOOTSTRAP_SAMPLES,
    BOOTSTRAP_SEED,
    Gate,
    Latency,
    Rate,
    SystemScore,
    gates,
    score_system,
)
from eval.accuracy.worker import MEMORY_SAMPLE_S
from eval.files import write_text
from serve.codec import from_json, require_version, to_json
from serve.errors import ConfigError
from serve.files import read_text

FORMAT_VERSION = 1
THEIRS = "faster-whisper-int8"  # speed is held against it; accuracy against the most accurate

Column = tuple[str, Callable[[SystemScore], str]]
"""A title, and what stands below it for a system."""

RULES = f"""\
- Every system gets a file's bytes, in the same order, and returns the whole text; decoding the
  audio is timed. No system is told the language. Each runs alone in its own process, on the same
  CPU cores, after one pass over all clips that is not counted.
- CER and WER: jiwer; all edits of all clips / length of all references, spaces count as
  characters. Scored is the first pass under load; "unstable" counts the clips whose text was not
  the same in every call. Text on a clip with an empty reference counts as insertions. Intervals:
  95 %, percentile bootstrap over clips, {BOOTSTRAP_SAMPLES} draws, seed {BOOTSTRAP_SEED}.
- Latency: file bytes handed over until the whole answer is there, waiting in queues included;
  percentiles over all calls. Jitter: deviation of the same clip's latency between passes, root
  mean square over clips, so that different lengths of clips do not count.
- RTFx: seconds of real, unpadded audio answered / seconds of wall clock of the phase (throughput).
- Memory: highest resident set of the system's process and all its descendants, client included,
  sampled every {MEMORY_SAMPLE_S:g} s; shared pages count in each process.
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """A scored run."""

    run: RunFacts
    normalizer: str
    systems: tuple[SystemScore, ...]
    gates: tuple[Gate, ...]

    @property
    def passed(self) -> bool:
        """Whether no gate failed."""
        return all(gate.passed is not False for gate in self.gates)


def write_report(folder: Path, names: tuple[str, ...], normalizer_name: str) -> Report:
    """Score a run's predictions and write report.json and report.md beside them.

    Args:
        folder: of the run.
        names: of the systems to score; () is all of the run.
        normalizer_name: how texts are normalised before they are compared.

    Raises:
        ConfigError: the folder holds no run, or a system did not finish.
    """
    run, systems = load_run(folder, names)
    scores = tuple(score_system(facts, calls, normalizer_name) for facts, calls in systems)
    judged = gates(scores, run.max_cer_gap_faster_whisper, run.max_cer_gap_fp16)
    report = Report(run, normalizer_name, scores, tuple(judged))
    write_text(folder / "report.json", report_to_json(report))
    write_text(folder / "report.md", to_markdown(report))
    return report


def read_report(path: Path) -> Report:
    """A report.json, or that of the folder which holds it.

    Raises:
        FileError: it cannot be read.
        ConfigError: it is no report, or of another format.
    """
    file = path / "report.json" if path.is_dir() else path
    text = read_text(file, "expected a report")
    advice = "write it again with `python -m eval score`"
    require_version(text, str(file), FORMAT_VERSION, advice=advice)
    # What the report's fields imply is written beside them, for other readers.
    return from_json(Report, text, str(file), advice=advice, extra="ignore")


def report_to_json(report: Report) -> str:
    """The text of report.json: the report's fields, and what follows from them."""
    fields = {
        "format_version": FORMAT_VERSION,
        "passed": report.passed,
        **vars(report),
        "ratios": ratios(report.systems),
    }
    return to_json(fields, indent=2) + "\n"


def ratios(systems: Sequence[SystemScore]) -> dict[str, dict[str, float]]:
    """Speed of each Earshot system against faster-whisper's int8, where both are there.

    `throughput`: ours / theirs under load, more is better; `ten_second_latency`: ours / theirs,
    less is better; `memory`: ours / theirs.
    """
    theirs = next((score for score in systems if score.facts.name == THEIRS), None)
    found: dict[str, dict[str, float]] = {}
    if theirs is None:
        return found
    for score in systems:
        if not score.facts.name.startswith("earshot-"):
            continue
        of_system = {
            "throughput": score.rtfx_loaded / theirs.rtfx_loaded,
            "memory": score.facts.peak_memory_bytes / theirs.facts.peak_memory_bytes,
        }
        if score.ten_second_s and theirs.ten_second_s:
            of_system["ten_second_latency"] = score.ten_second_s / theirs.ten_second_s
        found[score.facts.name] = of_system
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text; numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "-" * (widths[0] + 2) + "|" + "|".join("-" * (w + 1) + ":" for w in widths[1:])
    return "\n".join([line(header), rule + "|", *(line(row) for row in rows)])


def to_markdown(report: Report) -> str:
    """What report.md holds."""
    run = report.run
    normaliser = f"`{report.normalizer}`: {DESCRIPTIONS[report.normalizer]}."
    parts = [
        f"# Evaluation of {run.config_name}",
        f"{run.started}, {run.clips} clips of `{run.manifest}`, {run.audio_s:.1f} s of audio; "
        f"{run.threads} CPU threads for every system, {run.repeats} timed passes.",
        f"**{'Passed' if report.passed else 'FAILED'}**",
        _gates(report.gates),
        "## Accuracy",
        f"Normaliser {normaliser}",
        _table_of(_ACCURACY, report.systems),
        "### By language",
        _by_language(report.systems),
        "## Speed and memory",
        _speed(report.systems, run),
        _ratios(report.systems, run),
        "## What was heard wrong",
        _mistakes(report.systems),
        "## Rules",
        RULES.strip(),
        "## Machine",
        "\n".join(f"- {key}: {value}" for key, value in run.machine.items()),
        "## Settings",
        *(_settings(score) for score in report.systems),
    ]
    return "\n\n".join(parts) + "\n"


def _gates(gates: Sequence[Gate]) -> str:
    marks = {True: "passed", False: "**FAILED**", None: "not judged"}
    return "\n".join(f"- {marks[gate.passed]}: {gate.name}. {gate.detail}" for gate in gates)


def percent(rate: Rate) -> str:
    """A rate with its interval."""
    if rate.percent is None or rate.low is None or rate.high is None:
        return "no text"
    return f"{rate.percent:.2f} % [{rate.low:.2f}, {rate.high:.2f}]"


def _table_of(columns: Sequence[Column], systems: Sequence[SystemScore]) -> str:
    """A table with a line for each system, its name first."""
    rows = [[score.facts.name, *(cell(score) for _, cell in columns)] for score in systems]
    return table(["system", *(title for title, _ in columns)], rows)


def _edits(score: SystemScore) -> str:
    counts = score.overall.cer.counts
    return f"{counts.substitutions}/{counts.deletions}/{counts.insertions} of {counts.length}"


def _raw(score: SystemScore) -> str:
    rate = score.raw.cer.percent
    return "no text" if rate is None else f"{rate:.2f} %"


_ACCURACY: tuple[Column, ...] = (
    ("CER [95 %]", lambda score: percent(score.overall.cer)),
    ("S/D/I of characters", _edits),
    ("WER [95 %]", lambda score: percent(score.overall.wer)),
    ("raw CER", _raw),
    ("language right", lambda score: f"{score.language_right} of {score.language_of}"),
    ("silent clips with text", lambda score: f"{score.silent_with_text} of {score.silent_clips}"),
    ("unstable", lambda score: str(len(score.unstable))),
    ("failed calls", lambda score: str(len(score.errors))),
)


def _by_language(systems: Sequence[SystemScore]) -> str:
    rows = [
        [score.facts.name, language, str(part.clips), percent(part.cer), percent(part.wer)]
        for score in systems
        for language, part in score.by_language.items()
    ]
    return table(["system", "language", "clips", "CER [95 %]", "WER [95 %]"], rows)


def _milliseconds(*seconds: float | None, otherwise: str = "none") -> str:
    return " / ".join(otherwise if value is None else f"{1e3 * value:.0f}" for value in seconds)


def _percentiles(latency: Latency) -> str:
    return _milliseconds(latency.p50_s, latency.p95_s, latency.p99_s)


def _jitter(latency: Latency) -> str:
    return _milliseconds(latency.jitter_s, otherwise="one pass")


def _speed(systems: Sequence[SystemScore], run: RunFacts) -> str:
    many = f"{run.concurrency} at a time"
    columns: tuple[Column, ...] = (
        ("10 s clip, ms", lambda score: _milliseconds(score.ten_second_s)),
        ("alone p50/p95/p99, ms", lambda score: _percentiles(score.alone)),
        ("jitter, ms", lambda score: _jitter(score.alone)),
        (f"{many} p50/p95/p99, ms", lambda score: _percentiles(score.loaded)),
        ("jitter, ms", lambda score: _jitter(score.loaded)),
        ("RTFx alone", lambda score: f"{score.rtfx_alone:.1f}"),
        (f"RTFx {many}", lambda score: f"{score.rtfx_loaded:.1f}"),
        ("peak memory, MiB", lambda score: f"{score.facts.peak_memory_bytes / 2**20:.0f}"),
        ("start, s", lambda score: f"{score.facts.start_s:.1f}"),
    )
    note = f"The 10 s clip is `{run.ten_second_clip}`, one call at a time, median. "
    calls = {(score.alone.calls, score.loaded.calls) for score in systems}
    numbers = "; ".join(f"{alone} calls alone, {loaded} under load" for alone, loaded in calls)
    return f"{note}Percentiles are over {numbers}.\n\n{_table_of(columns, systems)}"


def _ratios(systems: Sequence[SystemScore], run: RunFacts) -> str:
    found = ratios(systems)
    if not found:
        return f"No ratios: this run needs {THEIRS} and an Earshot system for them."
    rows = [
        [
            name,
            f"{values['throughput']:.2f}",
            f"{values['ten_second_latency']:.2f}" if "ten_second_latency" in values else "none",
            f"{values['memory']:.2f}",
        ]
        for name, values in found.items()
    ]
    header = [
        f"against {THEIRS}",
        f"throughput {run.concurrency} at a time (aim: 1 or more)",
        "latency of the 10 s clip (aim: 1.2 or less)",
        "peak memory",
    ]
    return f"Figures, not gates:\n\n{table(header, rows)}"


def _mistakes(systems: Sequence[SystemScore]) -> str:
    """Character errors per clip and system, where a system made any."""
    files = [
        file
        for file in (systems[0].by_clip if systems else {})
        if any(score.by_clip[file].errors for score in systems)
    ]
    if not files:
        return "Nothing: every clip was heard without an error by every system."
    header = ["clip: character errors", *(score.facts.name for score in systems)]
    rows = [[file, *(str(score.by_clip[file].errors) for score in systems)] for file in files]
    return table(header, rows)


def _settings(score: SystemScore) -> str:
    lines = "\n".join(f"- {key}: {value}" for key, value in score.facts.settings.items())
    return f"### {score.facts.name}\n\n{lines}"


_COMPARED = (  # figure, where a SystemScore has it, factor, digits
    ("CER %", "overall.cer.percent", 1.0, 2),
    ("WER %", "overall.wer.percent", 1.0, 2),
    ("10 s clip ms", "ten_second_s", 1e3, 0),
    ("alone p50 ms", "alone.p50_s", 1e3, 0),
    ("loaded p95 ms", "loaded.p95_s", 1e3, 0),
    ("RTFx alone", "rtfx_alone", 1.0, 1),
    ("RTFx loaded", "rtfx_loaded", 1.0, 1),
    ("memory MiB", "facts.peak_memory_bytes", 1 / 2**20, 0),
)


def compare(a: Report, b: Report) -> str:
    """Two reports side by side: a, b, and b - a for each system that both have.

    Raises:
        ConfigError: they share no system.
    """
    systems = [{score.facts.name: score for score in report.systems} for report in (a, b)]
    both = [name for name in systems[0] if name in systems[1]]
    if not both:
        names = [", ".join(by_name) for by_name in systems]
        raise ConfigError(f"the reports share no system: {names[0]} and {names[1]}")
    rows = []
    for name in both:
        for label, place, factor, digits in _COMPARED:
            values = [operator.attrgetter(place)(by_name[name]) for by_name in systems]
            one, two = (None if value is None else value * factor for value in values)
            rows.append([name, label, *_triple(one, two, digits)])
    differing = [f"NOTE: {what} differs: {x} and {y}" for what, x, y in _conditions(a, b) if x != y]
    runs = [f"A: {a.run.config_name}, {a.run.started}", f"B: {b.run.config_name}, {b.run.started}"]
    return "\n".join([*runs, *differing, "", table(["system", "figure", "A", "B", "B - A"], rows)])


def _triple(one: float | None, two: float | None, digits: int) -> list[str]:
    cells = ["none" if value is None else f"{value:.{digits}f}" for value in (one, two)]
    gap = "" if one is None or two is None else f"{two - one:+.{digits}f}"
    return [*cells, gap]


def _conditions(a: Report, b: Report) -> list[tuple[str, Any, Any]]:
    """What must be equal for figures to be comparable."""
    names = ("manifest", "clips", "audio_s", "concurrency", "repeats", "threads", "machine")
    pairs = [(name, getattr(a.run, name), getattr(b.run, name)) for name in names]
    return [("normalizer", a.normalizer, b.normalizer), *pairs]
