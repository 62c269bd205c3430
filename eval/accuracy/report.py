"""The report of a run: report.json holds the scores, and sections show them.

The rules of comparison stand in the report, beside the numbers that follow them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from eval.accuracy.gates import TITLES
from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import ClipSet, TimedCall
from eval.accuracy.run import RunFacts
from eval.accuracy.score import (
    BOOTSTRAP_SAMPLES,
    BOOTSTRAP_SEED,
    Accuracy,
    Latency,
    Misheard,
    Rate,
    SetScore,
    Speed,
    SystemScore,
)
from eval.accuracy.worst_clips import worst_clips
from eval.figures import latency_chart, memory_chart, rate_chart
from eval.memory import SAMPLE_S
from eval.record import (
    CONDITIONS,
    Card,
    Check,
    Figure,
    Part,
    Result,
    Section,
    Table,
    Text,
    Verdict,
    Words,
    facts,
    verdict,
)
from serve.contract.codec import from_json, require_version, to_json
from serve.contract.files import read_text

FORMAT_VERSION = 4
GREEDY = "-greedy"  # ends the names of systems that search greedily
_MOST_MISTAKES = 40  # clips in the table of errors
_MOST_WORDS = 12  # of each kind of mistake
_MIB = 2**20

RULES = (
    "Every system gets a file's bytes, in the same order, and returns the whole text; "
    "decoding the audio is timed. Either every system is told the language or none is. "
    "Each runs alone in its own process, on the same CPU cores.",
    "faster-whisper decodes with its own defaults (a beam of 5), or greedily where its name "
    "says so. Two options differ: the list of suppressed tokens is the checkpoint's, and "
    "checkpoints that are not published ones get no text of earlier windows in the prompt. "
    "`faster-whisper-library-defaults` is told nothing at all.",
    "CER and WER: jiwer; all edits of all clips / length of all references, spaces count as "
    'characters. Scored is a pass over all clips before any that is timed; "unstable" counts '
    "the clips whose text was not the same in every call. Text on a clip with an empty "
    "reference counts as insertions. Intervals: 95 %, percentile bootstrap over clips, "
    f"{BOOTSTRAP_SAMPLES} draws, seed {BOOTSTRAP_SEED}; the draws of two systems are paired.",
    "A gate passes if the whole interval of a gap is at most the limit, and fails if the whole "
    "interval is above it. Otherwise it is not decided: the clips are too few to tell. Each is "
    "judged on all clips that both systems heard, of the groups that decide where some are named. "
    "How many clips decide a gap follows from the width of its interval, which shrinks with the "
    "root of their number. faster-whisper's default is the more accurate of float32 and int8, of "
    "those that ran.",
    "Clips that cannot be decoded are given to no system and count for nothing; so do clips that "
    "no system could read.",
    "Latency: file bytes handed over until the whole answer is there, waiting in queues "
    "included; percentiles over all calls. Jitter: deviation of the same clip's latency "
    "between passes, root mean square over clips, so that different lengths of clips do not "
    "count.",
    "RTFx: seconds of real, unpadded audio answered / seconds of wall clock of the phase "
    "(throughput).",
    "Memory: highest resident set of the system's process and all its descendants, client "
    f"included, sampled every {SAMPLE_S:g} s; shared pages count in each process.",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """A scored run."""

    run: RunFacts
    normalizer: str
    normalizers: dict[str, str]  # the description of each normaliser that texts are compared under
    systems: tuple[SystemScore, ...]
    gates: tuple[Check, ...]
    unheard: dict[str, str] = dataclasses.field(default_factory=dict)  # reason by file

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
    advice = "write it again with `python -m eval report`"
    require_version(text, str(file), FORMAT_VERSION, advice=advice)
    # The file holds values for other readers beside the report's own fields.
    return from_json(Report, text, str(file), advice=advice, extra="ignore")


def report_to_json(report: Report) -> str:
    """Return the text of report.json: the report's fields, and values that follow from them."""
    fields = {
        "format_version": FORMAT_VERSION,
        "verdict": report.verdict,
        **vars(report),
        "ratios": ratios(report.systems),
    }
    return to_json(fields, indent=2) + "\n"


def ratios(systems: Sequence[SystemScore]) -> dict[str, dict[str, float]]:
    """Compare the speed of each timed Earshot system with faster-whisper's best figure.

    Greedy is compared with greedy, the configured search with faster-whisper's default.
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
    """Return the systems of faster-whisper that search as ours does: greedily, or not."""
    return [
        score
        for score in systems
        if score.facts.name.startswith("faster-whisper-")
        and score.facts.name.endswith(GREEDY) == ours.facts.name.endswith(GREEDY)
    ]


def chooser(report: Report) -> SystemScore | None:
    """Return the system whose worst clips are shown: the configured one, else the first."""
    scores = {score.facts.name: score for score in report.systems if score.sets}
    return scores.get(f"earshot-{report.run.precision}") or next(iter(scores.values()), None)


# ---------------------------------------------------------------- sections


def result_of(
    report: Report, calls: Mapping[str, Sequence[TimedCall]], normalize: Normalize
) -> Result:
    """Return the result of a run.

    Args:
        report: the scores.
        calls: of each system, by name, for the clips that were misheard worst.
        normalize: the normaliser that texts were compared under.
    """
    run, ours = report.run, chooser(report)
    name = ours.facts.name if ours else None
    sections = [
        *(_accuracy(clip_set, report) for clip_set in run.clips),
        _speed(report),
        _misheard(report, name),
        Section(
            "Worst clips",
            [
                Text(f"The clips that `{name}` misheard worst; texts as they were compared.")
                if ours
                else Text("None: no system heard a clip."),
                *(worst_clips(ours, calls, normalize) if ours else []),
            ],
            printed=False,
        ),
        _conditions(report),
    ]
    return Result(
        checks=report.gates,
        sections=tuple(sections),
        title=f"Evaluation of {run.config_name}",
        about=f"{run.started}; {_clips(run)}; {languages_text(run)}; {run.threads} CPU threads for "
        f"every system, {run.repeats} timed passes.",
        cards=tuple(_cards(ours, report)) if ours else (),
        notes=tuple(_notes(report, name)),
    )


def _clips(run: RunFacts) -> str:
    places: dict[ClipSet, str] = {"timed": run.manifest, "heldout": run.heldout}
    return "; ".join(
        f"{TITLES[name]}: {count} of `{places[name]}`, {run.audio_s[name]:.1f} s"
        + (f" ({run.sources[name]})" if name in run.sources else "")
        for name, count in run.clips.items()
    )


def languages_text(run: RunFacts) -> str:
    """Say which side knows the language of a clip."""
    return f"the language is {'told to' if run.tell_language else 'found out by'} every system"


def _notes(report: Report, ours: str | None) -> list[Part]:
    notes: list[Part] = [Text(f"The figures at the top are of `{ours}`.")] if ours else []
    if report.run.gate_groups:
        notes.append(Text(f"Decided on the clips of {', '.join(report.run.gate_groups)}."))
    unreadable = [reasons.items() for reasons in report.run.unreadable.values()]
    reasons = [pair for pairs in [*unreadable, report.unheard.items()] for pair in pairs]
    if reasons:
        note = f"Clips that no system can read, {len(reasons)}, which count for nothing:"
        notes.append(Table((), [(f"`{file}`", why) for file, why in reasons], note=note))
    return notes


def _cards(ours: SystemScore, report: Report) -> list[Card]:
    """Show the configured system's figures, each beside faster-whisper's best with its search."""
    theirs, run, speed = rivals(ours, report.systems), report.run, ours.speed
    cards = []
    for name, of_set in ours.sets.items():
        rate = of_set.overall.cer
        if rate.percent is not None:
            rates = [s.sets[name].overall.cer.percent for s in theirs if name in s.sets]
            best = _beside([known for known in rates if known is not None], min, "{:.2f} %")
            details = (f"[{rate.low:.2f}, {rate.high:.2f}]", best)
            cards.append(Card(f"CER, {TITLES[name]}", f"{rate.percent:.2f} %", details))
    if speed is None:
        return cards
    timed = [(score.speed, score.facts.peak_memory_bytes) for score in theirs if score.speed]
    best = _beside([other.rtfx_loaded for other, _ in timed], max, "{:.1f}")
    title = f"RTFx, {run.concurrency} at a time"
    cards.append(Card(title, f"{speed.rtfx_loaded:.1f}", (best,)))
    if speed.one_clip_s is not None:
        quick = [1e3 * other.one_clip_s for other, _ in timed if other.one_clip_s is not None]
        best = _beside(quick, min, "{:.0f} ms")
        title = f"{run.one_clip_title}, alone"
        cards.append(Card(title, f"{1e3 * speed.one_clip_s:.0f} ms", (best,)))
    best = _beside([memory / _MIB for _, memory in timed], min, "{:.0f} MiB")
    own = f"{ours.facts.peak_memory_bytes / _MIB:.0f} MiB"
    return [*cards, Card("Peak memory", own, (best,))]


def _beside(values: Sequence[float], best: Callable[[Sequence[float]], float], form: str) -> str:
    if not values:
        return "no faster-whisper to compare"
    return "faster-whisper " + form.format(best(values)).replace(" ", "\N{NO-BREAK SPACE}")


def _accuracy(clip_set: ClipSet, report: Report) -> Section:
    title = f"Accuracy on {TITLES[clip_set]}"
    sets = {s.facts.name: s.sets[clip_set] for s in report.systems if clip_set in s.sets}
    if not sets:
        return Section(title, [Text("None of these systems heard them.")])
    note = f"Edits over the length of all references, with 95 % intervals; `{report.normalizer}`."
    return Section(
        title,
        [
            Text(note),
            *accuracy_figure([report], clip_set),
            _rates(sets),
            *_by("language", {name: of_set.by_language for name, of_set in sets.items()}),
            *_by("group", {name: of_set.by_group for name, of_set in sets.items()}),
            _by_normalizer(sets),
            _mistakes(sets),
        ],
    )


def accuracy_figure(runs: Sequence[Report], clip_set: ClipSet) -> list[Figure]:
    """Chart CER and WER of one run or of two; return nothing if no system has a rate."""
    names = systems_of(runs, lambda score: clip_set in score.sets)
    charts = [
        rate_chart(
            title,
            {
                n: [attrgetter(place)(score_of(run, n).sets[clip_set].overall) for run in runs]
                for n in names
            },
        )
        for title, place in (("CER, %", "cer"), ("WER, %", "wer"))
    ]
    known = [chart for chart in charts if chart is not None]
    legend = "two runs" if len(runs) == 2 else "families"
    return [Figure(known, legend=legend)] if known else []


def score_of(run: Report, name: str) -> SystemScore:
    """Return the score of a system."""
    return next(score for score in run.systems if score.facts.name == name)


def systems_of(runs: Sequence[Report], fits: Callable[[SystemScore], bool]) -> list[str]:
    """Return the systems of the first run, in its order, that fit in every run."""
    fitting = [{score.facts.name for score in run.systems if fits(score)} for run in runs]
    names = [score.facts.name for score in runs[0].systems]
    return [name for name in names if all(name in fit for fit in fitting)]


def percent(rate: Rate) -> str:
    """Write a rate with its interval."""
    if rate.percent is None or rate.low is None or rate.high is None:
        return "no text"
    return f"{rate.percent:.2f} % [{rate.low:.2f}, {rate.high:.2f}]"


def _rates(sets: Mapping[str, SetScore]) -> Table:
    rows = []
    for name, of_set in sets.items():
        counts = of_set.overall.cer.counts
        edits = f"{counts.substitutions}/{counts.deletions}/{counts.insertions} of {counts.length}"
        right = f"{of_set.language_right} of {of_set.language_of}"
        silent = f"{of_set.silent_with_text} of {of_set.silent_clips}"
        accuracy = of_set.overall
        rows.append([name, percent(accuracy.cer), edits, percent(accuracy.wer), right, silent])
    header = ["system", "CER [95 %]", "S/D/I of characters", "WER [95 %]"]
    header += ["language right", "silent clips with text"]
    return Table(header, rows, "Figures", folded="closed")


def _by(what: str, systems: Mapping[str, Mapping[str, Accuracy]]) -> list[Table]:
    """Return a table with a row for each part; nothing if there are no parts."""
    first = next(iter(systems.values()))
    rows = [
        [name, str(accuracy.clips), *(_both_rates(parts[name]) for parts in systems.values())]
        for name, accuracy in first.items()
    ]
    header, opened = [what, "clips", *systems], "open" if what == "group" else "closed"
    title = f"By {what}, CER / WER in %"
    return [Table(header, rows, title, folded=opened)] if rows else []  # type: ignore[arg-type]


def _both_rates(accuracy: Accuracy) -> str:
    rates = (accuracy.cer.percent, accuracy.wer.percent)
    return " / ".join("none" if rate is None else f"{rate:.1f}" for rate in rates)


def _by_normalizer(sets: Mapping[str, SetScore]) -> Table:
    names = list(next(iter(sets.values())).by_normalizer)
    rows = [
        [system, *(percent(r) for part in of.by_normalizer.values() for r in (part.cer, part.wer))]
        for system, of in sets.items()
    ]
    header = ["system", *(f"{kind} {name}" for name in names for kind in ("CER", "WER"))]
    return Table(header, rows, "By normaliser, CER and WER", folded="closed")


def _mistakes(sets: Mapping[str, SetScore]) -> Part:
    """Tabulate character errors per clip and system, of the clips with the most errors."""
    errors = {
        file: [of_set.by_clip[file].errors for of_set in sets.values()]
        for file in next(iter(sets.values())).by_clip
    }
    wrong = [file for file, made in errors.items() if any(made)]
    if not wrong:
        return Text("Every clip was heard without an error by every system.")
    worst = sorted(wrong, key=lambda file: -sum(errors[file]))[:_MOST_MISTAKES]
    rows = [[file, *map(str, errors[file])] for file in sorted(worst)]
    note = f"Of {len(wrong)} clips those with the most." if len(wrong) > len(worst) else ""
    return Table(["clip", *sets], rows, "Character errors", note, folded="closed")


def _speed(report: Report) -> Section:
    run, systems = report.run, report.systems
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
            f"{score.facts.peak_memory_bytes / _MIB:.0f}",
            f"{score.facts.start_s:.1f}",
            str(len(score.unstable)),
            str(len(score.errors)),
        ]
        for score in systems
    ]
    header = ["system", *(title for title, _ in columns), "peak memory, MiB", "start, s"]
    header += ["unstable", "failed calls"]
    note = ""
    if run.one_clip is not None:
        note = f"The {run.one_clip_title} is `{run.one_clip}`, one call at a time, median. "
    timed = [score.speed for score in systems if score.speed is not None]
    calls = {(speed.alone.calls, speed.loaded.calls) for speed in timed}
    numbers = "; ".join(f"{alone} calls alone, {loaded} under load" for alone, loaded in calls)
    note += f"Percentiles are over {numbers or 'nothing: no system of this run was timed'}."
    parts = [*speed_figures([report]), Table(header, rows, "Figures", note, folded="closed")]
    return Section("Speed and memory", [*parts, _ratios(report)])


def speed_figures(runs: Sequence[Report]) -> list[Figure]:
    """Chart latencies, and throughput against memory; return nothing if no system was timed."""
    names, many = systems_of(runs, lambda score: score.speed is not None), runs[-1].run.concurrency
    if not names:
        return []
    speeds = {name: [score_of(run, name).speed for run in runs] for name in names}
    phases = (("One call at a time", "alone"), (f"{many} calls at a time", "loaded"))
    latencies = [
        latency_chart(title, {n: list(map(attrgetter(place), of)) for n, of in speeds.items()})
        for title, place in phases
    ]
    points = {
        name: [
            (score_of(run, name).facts.peak_memory_bytes / _MIB, _rtfx(run, name)) for run in runs
        ]
        for name in names
    }
    legend = "two runs" if len(runs) == 2 else "families"
    bands = (
        "The gap in a bar is the median; its shades hold the middle 50, 90 and 98 % of the calls."
    )
    return [
        Figure([chart for chart in latencies if chart], note=bands, legend=legend),
        Figure(
            [chart for chart in [memory_chart(f"RTFx, {many} calls at a time", points)] if chart],
            note="Up and left is better: more audio in less memory.",
            legend="",
        ),
    ]


def _rtfx(run: Report, name: str) -> float:
    speed = score_of(run, name).speed
    assert speed is not None
    return speed.rtfx_loaded


def _milliseconds(*seconds: float | None, otherwise: str = "none") -> str:
    return " / ".join(otherwise if value is None else f"{1e3 * value:.0f}" for value in seconds)


def latency_text(latency: Latency) -> str:
    """Write its three percentiles in milliseconds."""
    return _milliseconds(latency.p50_s, latency.p95_s, latency.p99_s)


def _jitter(latency: Latency) -> str:
    return _milliseconds(latency.jitter_s, otherwise="one pass")


def _ratios(report: Report) -> Part:
    run, by_name = report.run, ratios(report.systems)
    if not by_name:
        return Text(
            "No ratios: they need a timed Earshot system and a faster-whisper of its search."
        )
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
    return Table(header, rows, note="Figures, not gates:")


def _misheard(report: Report, ours: str | None) -> Section:
    parts: list[Part] = [
        Text("Word by word, as the shortest alignment of reference and text has them.")
    ]
    for number, clip_set in enumerate(report.run.clips):
        parts.append(Text("", f"On {TITLES[clip_set]}"))
        for score in report.systems:
            if of_set := score.sets.get(clip_set):
                counts, name = of_set.overall.wer.counts, score.facts.name
                note = (
                    f"{counts.substitutions} other, {counts.deletions} lost, {counts.insertions} "
                    f"added, of {counts.length} words"
                )
                opened = not number and name == ours
                parts.append(Words(name, note, _word_columns(of_set.misheard), opened))
    return Section("Misheard words", parts, printed=False)


def _word_columns(misheard: Misheard) -> list[tuple[str, list[tuple[str, int]]]]:
    kinds = {
        "Heard as another word": misheard.substitutions,
        "Not heard": misheard.deletions,
        "Heard though nobody said it": misheard.insertions,
    }
    return [
        (
            title,
            [
                (" → ".join(filter(None, (edit.said, edit.heard))), edit.count)
                for edit in edits[:_MOST_WORDS]
            ],
        )
        for title, edits in kinds.items()
    ]


def _conditions(report: Report) -> Section:
    run = report.run
    of_run = {
        "configuration": f"{run.config_name}, precision {run.precision}",
        "CPU threads for every system": run.threads,
        "calls at a time under load": run.concurrency,
        "timed passes": run.repeats,
        run.one_clip_title: run.one_clip or "none has speech",
    }
    compared = {
        f"`{name}`{' (compared under)' if name == report.normalizer else ''}": text
        for name, text in report.normalizers.items()
    }
    settings = [
        dataclasses.replace(facts(score.facts.name, score.facts.settings), folded="closed")
        for score in report.systems
    ]
    parts = [facts("Run", of_run), facts("Machine", run.machine), facts("Normalisers", compared)]
    rules = Text("", "Rules of comparison", RULES)
    return Section(CONDITIONS, [*parts, rules, *settings], printed=False)
