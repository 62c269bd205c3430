"""Scores -> what report.json and report.md hold.

The rules of comparison stand in the report itself, beside the numbers that follow them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eval.accuracy.data import ClipSet, SystemFacts
from eval.accuracy.gates import TITLES
from eval.accuracy.rules import RULES
from eval.accuracy.run import RunFacts
from eval.accuracy.score import (
    Accuracy,
    Latency,
    Rate,
    SetScore,
    Speed,
    SystemScore,
)
from eval.measurement import Check, Verdict, table, verdict
from serve.contract.codec import from_json, require_version, to_json
from serve.contract.files import read_text

FORMAT_VERSION = 4
MOST_MISTAKES = 40  # clips in the table of errors
GREEDY = "-greedy"  # how the names of systems end that search greedily


@dataclasses.dataclass(frozen=True)
class Report:
    """A scored run."""

    run: RunFacts
    normalizer: str
    normalizers: dict[str, str]  # what each does that texts were compared under
    systems: tuple[SystemScore, ...]
    gates: tuple[Check, ...]
    unheard: dict[str, str] = dataclasses.field(default_factory=dict)  # by file: why by nobody

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of all gates."""
        return verdict(self.gates)


def read_report(path: Path) -> Report:
    """Read a report.json, or that of the folder which holds it.

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
    """Return the text of report.json: the report's fields, and what follows from them."""
    fields = {
        "format_version": FORMAT_VERSION,
        "verdict": report.verdict,
        **vars(report),
        "ratios": ratios(report.systems),
    }
    return to_json(fields, indent=2) + "\n"


def ratios(systems: Sequence[SystemScore]) -> dict[str, dict[str, float]]:
    """Compare the speed of each timed Earshot system with faster-whisper's best figure.

    Greedy is held against greedy, what is configured against faster-whisper's default.
    `throughput`: ours / theirs under load, more is better; `one_clip_latency` and `memory`:
    ours / theirs, less is better.
    """
    by_name: dict[str, dict[str, float]] = {}
    for score in systems:
        name, speed = score.facts.name, score.speed
        theirs = [(s.speed, s.facts.peak_memory_bytes) for s in rivals(score, systems) if s.speed]
        if speed is None or not theirs or not name.startswith("earshot-"):
            continue
        by_name[name] = {
            "throughput": speed.rtfx_loaded / max(other.rtfx_loaded for other, _ in theirs),
            "memory": score.facts.peak_memory_bytes / min(memory for _, memory in theirs),
        }
        quickest = [other.one_clip_s for other, _ in theirs if other.one_clip_s]
        if speed.one_clip_s and quickest:
            by_name[name]["one_clip_latency"] = speed.one_clip_s / min(quickest)
    return by_name


def rivals(ours: SystemScore, systems: Sequence[SystemScore]) -> list[SystemScore]:
    """Return those of faster-whisper that search as ours does: greedily, or not."""
    return [
        score
        for score in systems
        if score.facts.name.startswith("faster-whisper-")
        and score.facts.name.endswith(GREEDY) == ours.facts.name.endswith(GREEDY)
    ]


def head_of(markdown: str) -> str:
    """Return the part of a report that is printed: its figures."""
    return markdown.partition("## Rules")[0].rstrip()


def to_markdown(report: Report) -> str:
    """Return the text of report.md."""
    run = report.run
    parts = [
        f"# Evaluation of {run.config_name}",
        f"{run.started}; {_clips(run)}; {languages_text(run)}; {run.threads} CPU threads for "
        f"every system, {run.repeats} timed passes.",
        gates_text(report.gates),
        *([f"Decided on the clips of {', '.join(run.gate_groups)}."] if run.gate_groups else []),
        *_unheard(report),
        *(part for clip_set in run.clips for part in _heard(clip_set, report)),
        "## Speed and memory",
        _speed(report.systems, run),
        _ratios(report.systems, run),
        "## Normalisers",
        _normalizers(report),
        "## Rules",
        "\n".join(f"- {rule}" for rule in RULES),
        "## Machine",
        "\n".join(f"- {key}: {value}" for key, value in run.machine.items()),
        "## Settings",
        *(settings_text(score.facts) for score in report.systems),
    ]
    return "\n\n".join(parts) + "\n"


_VERDICTS = {"passed": "Passed", "failed": "FAILED", "not decided": "Not decided"}


def _clips(run: RunFacts) -> str:
    manifests: dict[ClipSet, str] = {"timed": run.manifest, "heldout": run.heldout}
    return "; ".join(
        f"{TITLES[name]}: {count} of `{manifests[name]}`, {run.audio_s[name]:.1f} s"
        + (f" ({run.sources[name]})" if name in run.sources else "")
        for name, count in run.clips.items()
    )


def languages_text(run: RunFacts) -> str:
    """Say who knew what language is spoken."""
    return f"the language is {'told to' if run.tell_language else 'found out by'} every system"


def unread(report: Report) -> dict[str, str]:
    """Return clips that count for nothing, by file, and why."""
    unreadable = [reasons.items() for reasons in report.run.unreadable.values()]
    return {file: why for reasons in [*unreadable, report.unheard.items()] for file, why in reasons}


def _unheard(report: Report) -> list[str]:
    reasons = unread(report)
    if not reasons:
        return []
    lines = [f"- `{file}`: {why}" for file, why in reasons.items()]
    return [
        f"Clips that nobody can read, {len(reasons)}, which count for nothing:",
        "\n".join(lines),
    ]


def _heard(clip_set: ClipSet, report: Report) -> list[str]:
    """Return the part of report.md on one set of clips."""
    title = f"## Accuracy on {TITLES[clip_set]}"
    sets = {
        score.facts.name: score.sets[clip_set] for score in report.systems if clip_set in score.sets
    }
    if not sets:
        return [title, "None of these systems heard them."]
    by_language = {name: of_set.by_language for name, of_set in sets.items()}
    by_group = {name: of_set.by_group for name, of_set in sets.items()}
    return [
        title,
        f"Normalised by `{report.normalizer}`:",
        _accuracy(sets),
        *_by("language", by_language),
        *_by("group", by_group),
        "By normaliser, CER and WER:",
        _by_normalizer(sets),
        "Character errors:",
        _mistakes(sets),
    ]


def _normalizers(report: Report) -> str:
    """Describe what texts are compared under, then the others that are reported beside it."""
    lines = [f"- `{name}`: {text}." for name, text in report.normalizers.items()]
    return f"Normaliser: `{report.normalizer}`. Of all:\n\n" + "\n".join(lines)


def _by_normalizer(sets: dict[str, SetScore]) -> str:
    names = list(next(iter(sets.values())).by_normalizer)
    rows = [
        [
            system,
            *(
                percent(rate)
                for part in of_set.by_normalizer.values()
                for rate in (part.cer, part.wer)
            ),
        ]
        for system, of_set in sets.items()
    ]
    header = ["system", *(f"{kind} {name}" for name in names for kind in ("CER", "WER"))]
    return table(header, rows)


def gates_text(gates: Sequence[Check]) -> str:
    """Write the verdict, and each gate."""
    marks = {True: "passed", False: "**FAILED**", None: "**not decided**"}
    lines = [f"- {marks[gate.passed]}: {gate.name}. {gate.detail}" for gate in gates]
    return "\n".join([f"**{_VERDICTS[verdict(gates)]}**", "", *lines])


def percent(rate: Rate) -> str:
    """Write a rate with its interval."""
    if rate.percent is None or rate.low is None or rate.high is None:
        return "no text"
    return f"{rate.percent:.2f} % [{rate.low:.2f}, {rate.high:.2f}]"


def _accuracy(sets: dict[str, SetScore]) -> str:
    rows = []
    for name, of_set in sets.items():
        counts = of_set.overall.cer.counts
        rows.append(
            [
                name,
                percent(of_set.overall.cer),
                f"{counts.substitutions}/{counts.deletions}/{counts.insertions} of {counts.length}",
                percent(of_set.overall.wer),
                f"{of_set.language_right} of {of_set.language_of}",
                f"{of_set.silent_with_text} of {of_set.silent_clips}",
            ]
        )
    header = ["system", "CER [95 %]", "S/D/I of characters", "WER [95 %]"]
    return table([*header, "language right", "silent clips with text"], rows)


def parts_rows(systems: Mapping[str, Mapping[str, Accuracy]]) -> list[list[str]]:
    """Tabulate parts of a set: name, clips, and CER / WER in % of every system, one part a row."""
    first = next(iter(systems.values()))
    return [
        [name, str(accuracy.clips), *(_both_rates(parts[name]) for parts in systems.values())]
        for name, accuracy in first.items()
    ]


def _both_rates(accuracy: Accuracy) -> str:
    rates = (accuracy.cer.percent, accuracy.wer.percent)
    return " / ".join("none" if rate is None else f"{rate:.1f}" for rate in rates)


def _by(what: str, systems: Mapping[str, Mapping[str, Accuracy]]) -> list[str]:
    """Return a table of one kind of parts, and what it shows; nothing where there are none."""
    rows = parts_rows(systems)
    if not rows:
        return []
    return [f"By {what}, CER / WER in %:", table([what, "clips", *systems], rows)]


def _milliseconds(*seconds: float | None, otherwise: str = "none") -> str:
    return " / ".join(otherwise if value is None else f"{1e3 * value:.0f}" for value in seconds)


def latency_text(latency: Latency) -> str:
    """Write its three percentiles in milliseconds."""
    return _milliseconds(latency.p50_s, latency.p95_s, latency.p99_s)


def _jitter(latency: Latency) -> str:
    return _milliseconds(latency.jitter_s, otherwise="one pass")


def _speed(systems: Sequence[SystemScore], run: RunFacts) -> str:
    many = f"{run.concurrency} at a time"
    columns: tuple[tuple[str, Callable[[Speed], str]], ...] = (
        (f"{run.one_clip_title}, ms", lambda speed: _milliseconds(speed.one_clip_s)),
        ("alone p50/p95/p99, ms", lambda speed: latency_text(speed.alone)),
        ("jitter, ms", lambda speed: _jitter(speed.alone)),
        (f"{many} p50/p95/p99, ms", lambda speed: latency_text(speed.loaded)),
        ("jitter, ms", lambda speed: _jitter(speed.loaded)),
        ("RTFx alone", lambda speed: f"{speed.rtfx_alone:.1f}"),
        (f"RTFx {many}", lambda speed: f"{speed.rtfx_loaded:.1f}"),
    )
    rows = [
        [
            score.facts.name,
            *("" if score.speed is None else cell(score.speed) for _, cell in columns),
            f"{score.facts.peak_memory_bytes / 2**20:.0f}",
            f"{score.facts.start_s:.1f}",
            str(len(score.unstable)),
            str(len(score.errors)),
        ]
        for score in systems
    ]
    header = ["system", *(title for title, _ in columns), "peak memory, MiB", "start, s"]
    note = ""
    if run.one_clip is not None:
        note = f"The {run.one_clip_title} is `{run.one_clip}`, one call at a time, median. "
    timed = [score.speed for score in systems if score.speed is not None]
    calls = {(speed.alone.calls, speed.loaded.calls) for speed in timed}
    numbers = "; ".join(f"{alone} calls alone, {loaded} under load" for alone, loaded in calls)
    note += f"Percentiles are over {numbers or 'nothing: no system of this run was timed'}."
    return f"{note}\n\n{table([*header, 'unstable', 'failed calls'], rows)}"


def _ratios(systems: Sequence[SystemScore], run: RunFacts) -> str:
    by_name = ratios(systems)
    if not by_name:
        return "No ratios: they need a timed Earshot system and a faster-whisper of its search."
    rows = [
        [
            name,
            f"{values['throughput']:.2f}",
            f"{values['one_clip_latency']:.2f}" if "one_clip_latency" in values else "none",
            f"{values['memory']:.2f}",
        ]
        for name, values in by_name.items()
    ]
    header = [
        "against faster-whisper, the better of float32 and int8",
        f"throughput {run.concurrency} at a time (aim: 1 or more)",
        f"latency of the {run.one_clip_title} (aim: 1 or less)",
        "peak memory",
    ]
    return f"Figures, not gates:\n\n{table(header, rows)}"


def _mistakes(sets: dict[str, SetScore]) -> str:
    """Tabulate character errors per clip and system, of the clips where systems made the most."""
    errors = {
        file: [of_set.by_clip[file].errors for of_set in sets.values()]
        for file in next(iter(sets.values())).by_clip
    }
    wrong = [file for file, made in errors.items() if any(made)]
    if not wrong:
        return "None: every clip was heard without an error by every system."
    worst = sorted(wrong, key=lambda file: -sum(errors[file]))[:MOST_MISTAKES]
    rows = [[file, *map(str, errors[file])] for file in sorted(worst)]
    more = f"Of {len(wrong)} clips those with the most:\n\n" if len(wrong) > len(worst) else ""
    return more + table(["clip", *sets], rows)


def settings_text(facts: SystemFacts) -> str:
    """List a system's settings."""
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.settings.items())
    return f"### {facts.name}\n\n{lines}"
