"""The report of a run: report.json holds the scores, and sections show them.

The rules of comparison stand in the report, beside the numbers that follow them.
"""

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jiwer

from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import CallsBySystem, ClipSet, RunFacts, TimedCall
from eval.accuracy.score import (
    BOOTSTRAP_SAMPLES,
    BOOTSTRAP_SEED,
    TITLES,
    Accuracy,
    Latency,
    Rate,
    SystemScore,
    common_clips,
    compared_texts,
)
from eval.figures import latency_chart, rate_chart
from eval.processes import SAMPLE_S
from eval.record import (
    CONDITIONS,
    Check,
    Figure,
    Part,
    ReportClip,
    ReportSection,
    Result,
    SharedTranscript,
    Table,
    Text,
    facts,
    verdict,
)
from serve.contract.errors import ConfigError, FileError
from serve.contract.files import read_bytes

_MAX_CHANGED = 40  # clips in the table of two runs
MAX_CLIPS = 10
MAX_BYTES_PER_CLIP = 1_000_000  # of embedded audio, before base64
_MIME = {".wav": "wav", ".flac": "flac", ".mp3": "mpeg", ".ogg": "ogg", ".opus": "ogg"}
_MIME |= {".m4a": "mp4", ".mp4": "mp4", ".webm": "webm"}
_WITHOUT_SPACES = frozenset(("zh", "yue", "ja", "th", "lo", "my", "km", "bo"))

_RULES = Path(__file__).parents[1] / "templates" / "rules.txt"


@dataclasses.dataclass(frozen=True)
class Report:
    """A scored run; `report.json` holds these fields."""

    run: RunFacts
    normalizer: str
    systems: tuple[SystemScore, ...]
    gates: tuple[Check, ...]
    groups: tuple[str, ...] = ()  # of clips, which decide the gates; () = all


def result_of(report: Report, calls: CallsBySystem, normalize: Normalize) -> Result:
    """Return the result of a run.

    Args:
        report: the scores.
        calls: the calls that were scored, for the worst clips.
        normalize: the normaliser that texts were compared under.
    """
    run, settings = report.run, report.run.settings
    language = "told to" if settings.tell_language else "found out by"
    clips = "; ".join(f"{TITLES[name]}: {source}" for name, source in run.sources.items())
    notes: list[Part] = []
    if report.groups:
        notes.append(Text(f"Decided on the clips of {', '.join(report.groups)}."))
    unreadable = [
        (f"`{file}`", reason)
        for reasons in run.unreadable.values()
        for file, reason in reasons.items()
    ]
    if unreadable:
        note = f"Clips that cannot be read, {len(unreadable)}, which count for nothing:"
        notes.append(Table((), unreadable, note=note))
    conditions = {
        "configuration": f"{run.config_name}, precision {run.precision}",
        "normaliser": report.normalizer,
    }
    tables: list[Part] = [
        facts("Run", conditions),
        facts("Machine", run.machine),
        Text("", "Rules of comparison", _rules()),
        *(facts(s.facts.name, s.facts.settings, "closed") for s in report.systems),
    ]
    return Result(
        checks=report.gates,
        sections=(
            *(_accuracy(clip_set, report) for clip_set in run.clips),
            ReportSection("Speed and memory", _speed_parts(report)),
            ReportSection("Worst clips", worst_clips(report, calls, normalize), printed=False),
            ReportSection(CONDITIONS, tables, printed=False),
        ),
        title=f"Evaluation of {run.config_name}",
        about=f"{run.started}; {clips}; the language is {language} every system; "
        f"{settings.threads} CPU threads for every system, {settings.repeats} timed passes.",
        notes=tuple(notes),
    )


def _rules() -> list[str]:
    text = _RULES.read_text(encoding="utf-8")
    text = text.format(draws=BOOTSTRAP_SAMPLES, seed=BOOTSTRAP_SEED, sample_s=f"{SAMPLE_S:g}")
    return [" ".join(rule.split()) for rule in text.split("\n\n")]


def _accuracy(clip_set: ClipSet, report: Report) -> ReportSection:
    """Return the charts and the tables of CER and WER on some clips."""
    title = f"Accuracy on {TITLES[clip_set]}"
    sets = {s.facts.name: s.sets[clip_set] for s in report.systems if clip_set in s.sets}
    if not sets:
        return ReportSection(title, [Text("None of these systems heard them.")])
    note = f"Edits over the length of all references, with 95 % intervals; `{report.normalizer}`."
    charts = [
        rate_chart("CER, %", {name: score.overall.cer for name, score in sets.items()}),
        rate_chart("WER, %", {name: score.overall.wer for name, score in sets.items()}),
    ]
    rows = []
    for name, score in sets.items():
        cer, wer, counts = score.overall.cer, score.overall.wer, score.overall.cer.counts
        edits = f"{counts.substitutions}/{counts.deletions}/{counts.insertions} of {counts.length}"
        language = f"{score.language_right} of {score.language_of}"
        silent = f"{score.silent_with_text} of {score.silent_clips}"
        rows.append([name, percent(cer), edits, percent(wer), language, silent])
    header = ["system", "CER [95 %]", "S/D/I of characters", "WER [95 %]"]
    header += ["language right", "silent clips with text"]
    parts: list[Part] = [Text(note)]
    if any(charts):
        parts.append(Figure([chart for chart in charts if chart]))
    parts.append(Table(header, rows, "Figures", folded="open"))
    clips, *others = ({part: a.clips for part, a in s.by_part.items()} for s in sets.values())
    if clips and all(other == clips for other in others):  # two runs may be of different clips
        by_part = [
            [part, str(count), *(_both_rates(s.by_part[part]) for s in sets.values())]
            for part, count in clips.items()
        ]
        header = ["group or language", "clips", *sets]
        parts.append(
            Table(header, by_part, "By group or language, CER / WER in %", folded="closed")
        )
    return ReportSection(title, parts)


def percent(rate: Rate) -> str:
    """Write a rate with its interval."""
    if rate.percent is None or rate.low is None or rate.high is None:
        return "no text"
    return f"{rate.percent:.2f} % [{rate.low:.2f}, {rate.high:.2f}]"


def _both_rates(accuracy: Accuracy) -> str:
    rates = (accuracy.cer.percent, accuracy.wer.percent)
    return " / ".join("none" if rate is None else f"{rate:.2f}" for rate in rates)


def _speed_parts(report: Report) -> list[Part]:
    """Return the charts and the table of speed and memory."""
    run, systems = report.run, {score.facts.name: score for score in report.systems}
    many = f"{run.settings.concurrency} at a time"
    one_clip = "one clip" if run.one_clip_s is None else f"{run.one_clip_s:.1f} s clip"
    speeds = {name: score.speed for name, score in systems.items() if score.speed}
    rows = []
    for name, score in systems.items():
        cells = [""] * 5
        if speed := score.speed:
            clip_ms = "none" if speed.one_clip_s is None else f"{1e3 * speed.one_clip_s:.0f}"
            cells = [clip_ms, _percentiles(speed.alone), _percentiles(speed.loaded)]
            cells += [f"{speed.rtfx_alone:.1f}", f"{speed.rtfx_loaded:.1f}"]
        memory = f"{score.facts.peak_memory_bytes / 2**20:.0f}"
        rows.append([name, *cells, memory, f"{score.facts.start_s:.1f}"])
    header = ["system", f"{one_clip}, ms", "alone p50/p95/p99, ms"]
    header += [f"{many} p50/p95/p99, ms", "RTFx alone", f"RTFx {many}"]
    header += ["peak memory, MiB", "start, s"]
    note, figures = "No system of this run was timed.", list[Part]()
    if speeds:
        timed = next(iter(speeds.values()))
        note = f"Percentiles are over {timed.alone.calls} calls alone, "
        note += f"{timed.loaded.calls} under load."
        alone = {name: speed.alone for name, speed in speeds.items()}
        loaded = {name: speed.loaded for name, speed in speeds.items()}
        charts = [
            latency_chart("One call at a time", alone),
            latency_chart(f"{run.settings.concurrency} calls at a time", loaded),
        ]
        bands = (
            "The gap in each bar is the median; the bar's shades cover the middle 50, 90 and 98 %"
        )
        figures = [Figure(charts, note=f"{bands} of calls.")]
    if run.one_clip is not None:
        note += f" The {one_clip} is `{run.one_clip}`; its time is the median, one call at a time."
    return [*figures, Table(header, rows, "Figures", note, folded="open")]


def _percentiles(latency: Latency) -> str:
    return " / ".join(f"{1e3 * s:.0f}" for s in (latency.p50_s, latency.p95_s, latency.p99_s))


# ---------------------------------------------------------------- worst clips


def worst_clips(report: Report, calls: CallsBySystem, normalize: Normalize) -> list[Part]:
    """Show the clips with the most character errors of the configured system, or the first one."""
    scores = {score.facts.name: score for score in report.systems}
    configured = f"earshot-{report.run.precision}"
    name = configured if configured in scores else next(iter(scores))
    ranked = sorted(
        (-counts.errors, clip_set, file, counts)
        for clip_set, score in scores[name].sets.items()
        for file, counts in score.by_clip.items()
        if counts.errors
    )
    parts: list[Part] = [Text(f"What `{name}` misheard worst; texts as they were compared.")]
    for _, clip_set, file, counts in ranked[:MAX_CLIPS]:
        answers = {
            system: call
            for system, system_calls in calls.items()
            for call in system_calls
            if (call.phase, call.clip_set, call.file) == ("accuracy", clip_set, file)
        }
        call = next(iter(answers.values()))
        rate = f", CER {100 * counts.errors / counts.length:.0f} %" if counts.length else ""
        about = (
            f"{TITLES[clip_set]}; {call.language or 'language unknown'}; "
            f"{call.duration_s:.1f} s; {counts.errors} character errors{rate}"
        )
        transcripts = _transcripts(answers, name, normalize)
        parts.append(ReportClip(file, about, call.reference, transcripts, *_player(call.path)))
    return parts


def _transcripts(
    calls: Mapping[str, TimedCall], chooser: str, normalize: Normalize
) -> tuple[SharedTranscript, ...]:
    """Return each text once; that of the system that chose the clip first, right ones last."""
    alike: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for name, call in calls.items():
        texts = compared_texts(call, normalize)
        alike.setdefault((*texts, call.language, call.error), []).append(name)
    transcripts = [
        SharedTranscript(tuple(names), differences(reference, text, language), error)
        for (reference, text, language, error), names in alike.items()
    ]
    return tuple(sorted(transcripts, key=lambda same: (chooser not in same.systems, same.right)))


def differences(reference: str, hypothesis: str, language: str | None) -> list[tuple[str, str]]:
    """Align two texts by words, or by characters where a language writes no spaces."""
    by_character = language in _WITHOUT_SPACES
    align = jiwer.process_characters if by_character else jiwer.process_words
    out, joint = align([reference], [hypothesis]), "" if by_character else " "
    return [
        (
            joint.join(out.references[0][part.ref_start_idx : part.ref_end_idx]),
            joint.join(out.hypotheses[0][part.hyp_start_idx : part.hyp_end_idx]),
        )
        for part in out.alignments[0]
    ]


def _player(path: str | None) -> tuple[str | None, str | None]:
    """Return a data: address of the audio, or the reason why there is none."""
    kind = _MIME.get(Path(path or "").suffix.casefold())
    if path is None or kind is None:
        return None, f"browsers do not play this file: {path}"
    try:
        data = read_bytes(path)
    except FileError as error:
        return None, str(error)
    if len(data) > MAX_BYTES_PER_CLIP:
        return None, f"not embedded, for it has {len(data) / 1e6:.1f} MB: {path}"
    return f"data:audio/{kind};base64,{base64.b64encode(data).decode()}", None


# ---------------------------------------------------------------- two runs


def compare_runs(a: Report, b: Report) -> Result:
    """Show two runs side by side, for each system that both have.

    Raises:
        ConfigError: they share no system.
    """
    scores_a, scores_b = ({score.facts.name: score for score in r.systems} for r in (a, b))
    names = [name for name in scores_a if name in scores_b]
    if not names:
        raise ConfigError(
            f"the runs share no system: {', '.join(scores_a) or 'none'} and "
            f"{', '.join(scores_b) or 'none'}; expected at least one that both ran"
        )
    renamed = [
        dataclasses.replace(score, facts=dataclasses.replace(score.facts, name=f"{run}: {name}"))
        for name in names
        for run, score in (("A", scores_a[name]), ("B", scores_b[name]))
    ]
    both = dataclasses.replace(b, systems=tuple(renamed))
    # The largest change of a clip's character errors comes first.
    changed = [
        (name, file, in_a.errors, in_b.errors)
        for name in names
        for (_, file), (in_a, in_b) in common_clips(scores_a[name], scores_b[name]).items()
        if in_a.errors != in_b.errors
    ]
    changed.sort(key=lambda change: (-abs(change[3] - change[2]), change[0], change[1]))
    rows = [
        (name, file, str(in_a), str(in_b), f"{in_b - in_a:+d}")
        for name, file, in_a, in_b in changed[:_MAX_CHANGED]
    ]
    note = f"Character errors, the greatest changes first; {len(changed)} in all."
    table = Table(["system", "clip", "A", "B", "B - A"], rows, note=note)
    about = [f"{r.run.config_name}, {r.run.started}, {verdict(r.gates)}" for r in (a, b)]
    conditions_a, conditions_b = (
        {**vars(r.run.settings), "clips": r.run.sources, "machine": r.run.machine} for r in (a, b)
    )
    differing = [
        f"{name} differs: {value} and {conditions_b[name]}"
        for name, value in conditions_a.items()
        if value != conditions_b[name]
    ]
    machines = [facts("A", a.run.machine), facts("B", b.run.machine)]
    return Result(
        title="Two runs, compared",
        about=f"A: {about[0]}. B: {about[1]}.",
        sections=(
            ReportSection("Conditions that differ", [Text("; ".join(differing) or "None.")]),
            *(_accuracy(clip_set, both) for clip_set in a.run.clips if clip_set in b.run.clips),
            ReportSection("Speed", _speed_parts(both)),
            ReportSection("Clips", [table], False),
            ReportSection(CONDITIONS, machines, False),
        ),
    )
