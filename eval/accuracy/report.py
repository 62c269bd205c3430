"""The report of a run: report.json holds the scores, and sections show them.

The rules of comparison stand in the report, beside the numbers that follow them. The audio of the
clips with the most errors is embedded as it lies on the disk, up to a total size.
"""

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jiwer

from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import ClipSet, TimedCall
from eval.accuracy.run import RunFacts
from eval.accuracy.score import (
    BOOTSTRAP_SAMPLES,
    BOOTSTRAP_SEED,
    TITLES,
    Accuracy,
    Latency,
    Rate,
    SetScore,
    Speed,
    SystemScore,
    compared_texts,
)
from eval.figures import latency_chart, memory_chart, rate_chart
from eval.processes import SAMPLE_S
from eval.record import (
    CONDITIONS,
    AlignedText,
    Card,
    Check,
    Figure,
    Part,
    ReportClip,
    ReportSection,
    Result,
    SharedTranscript,
    Table,
    Text,
    Verdict,
    facts,
    verdict,
)
from serve.contract.codec import to_json
from serve.contract.errors import FileError
from serve.contract.files import read_bytes

FORMAT_VERSION = 5
GREEDY = "-greedy"  # ends the names of systems that search greedily
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
    "included; percentiles over all calls.",
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
    groups: tuple[str, ...] = ()  # of clips, which decide the gates; () = all

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of all gates."""
        return verdict(self.gates)


def report_to_json(report: Report) -> str:
    """Return the text of report.json."""
    fields = {"format_version": FORMAT_VERSION, "verdict": report.verdict, **vars(report)}
    return to_json(fields, indent=2) + "\n"


def rivals(ours: SystemScore, systems: Sequence[SystemScore]) -> list[SystemScore]:
    """Return the systems of faster-whisper that search as ours does: greedily, or not."""
    return [
        score
        for score in systems
        if score.facts.name.startswith("faster-whisper-")
        and score.facts.name.endswith(GREEDY) == ours.facts.name.endswith(GREEDY)
    ]


def chooser(report: Report) -> SystemScore | None:
    """Return the system for the worst clips: the configured one, else the first."""
    scores = {score.facts.name: score for score in report.systems if score.sets}
    return scores.get(f"earshot-{report.run.precision}") or next(iter(scores.values()), None)


# ---------------------------------------------------------------- sections


def result_of(
    report: Report, calls: Mapping[str, Sequence[TimedCall]], normalize: Normalize
) -> Result:
    """Return the result of a run.

    Args:
        report: the scores.
        calls: each system's calls, by name, for the worst clips.
        normalize: the normaliser that texts were compared under.
    """
    run, ours = report.run, chooser(report)
    name = ours.facts.name if ours else None
    sections = [
        *(_accuracy(clip_set, report) for clip_set in run.clips),
        _speed(report),
        ReportSection(
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
        about=f"{run.started}; {_clips(run)}; {_languages(run)}; {run.settings.threads} CPU "
        f"threads for every system, {run.settings.repeats} timed passes.",
        cards=tuple(_cards(ours, report)) if ours else (),
        notes=tuple(_notes(report, name)),
    )


def _clips(run: RunFacts) -> str:
    places: dict[ClipSet, str] = {"timed": run.settings.manifest, "heldout": run.settings.heldout}
    return "; ".join(
        f"{TITLES[name]}: {count} of `{places[name]}`, {run.audio_s[name]:.1f} s"
        + (f" ({run.sources[name]})" if name in run.sources else "")
        for name, count in run.clips.items()
    )


def _languages(run: RunFacts) -> str:
    told = "told to" if run.settings.tell_language else "found out by"
    return f"the language is {told} every system"


def _notes(report: Report, ours: str | None) -> list[Part]:
    notes: list[Part] = [Text(f"The figures at the top are of `{ours}`.")] if ours else []
    if report.groups:
        notes.append(Text(f"Decided on the clips of {', '.join(report.groups)}."))
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
    title = f"RTFx, {run.settings.concurrency} at a time"
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


def _accuracy(clip_set: ClipSet, report: Report) -> ReportSection:
    title = f"Accuracy on {TITLES[clip_set]}"
    sets = {s.facts.name: s.sets[clip_set] for s in report.systems if clip_set in s.sets}
    if not sets:
        return ReportSection(title, [Text("None of these systems heard them.")])
    note = f"Edits over the length of all references, with 95 % intervals; `{report.normalizer}`."
    return ReportSection(
        title,
        [
            Text(note),
            *accuracy_parts(sets),
            *_by("language", {name: of_set.by_language for name, of_set in sets.items()}),
            *_by("group", {name: of_set.by_group for name, of_set in sets.items()}),
            *_by("normaliser", {name: of_set.by_normalizer for name, of_set in sets.items()}),
        ],
    )


def accuracy_parts(sets: Mapping[str, SetScore]) -> list[Part]:
    """Return the charts and the table of CER and WER, by the systems' names."""
    charts = [
        rate_chart("CER, %", {name: of_set.overall.cer for name, of_set in sets.items()}),
        rate_chart("WER, %", {name: of_set.overall.wer for name, of_set in sets.items()}),
    ]
    known = [chart for chart in charts if chart is not None]
    return [*([Figure(known)] if known else []), _rates(sets)]


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
    rows = [
        [name, str(accuracy.clips), *(_both_rates(parts[name]) for parts in systems.values())]
        for name, accuracy in next(iter(systems.values())).items()
    ]
    title = f"By {what}, CER / WER in %"
    return [Table([what, "clips", *systems], rows, title, folded="closed")] if rows else []


def _both_rates(accuracy: Accuracy) -> str:
    rates = (accuracy.cer.percent, accuracy.wer.percent)
    return " / ".join("none" if rate is None else f"{rate:.2f}" for rate in rates)


def _speed(report: Report) -> ReportSection:
    by_name = {score.facts.name: score for score in report.systems}
    return ReportSection("Speed and memory", speed_parts(by_name, report.run))


def speed_parts(systems: Mapping[str, SystemScore], run: RunFacts) -> list[Part]:
    """Return the charts and the table of speed and memory.

    Args:
        systems: scores by the name that the report shows.
        run: names the clip and the number of calls at a time.
    """
    many = f"{run.settings.concurrency} at a time"
    columns: tuple[tuple[str, Callable[[Speed], str]], ...] = (
        (f"{run.one_clip_title}, ms", lambda speed: _milliseconds(speed.one_clip_s)),
        ("alone p50/p95/p99, ms", lambda speed: _percentiles(speed.alone)),
        (f"{many} p50/p95/p99, ms", lambda speed: _percentiles(speed.loaded)),
        ("RTFx alone", lambda speed: f"{speed.rtfx_alone:.1f}"),
        (f"RTFx {many}", lambda speed: f"{speed.rtfx_loaded:.1f}"),
    )
    rows = [
        [
            name,
            *("" if score.speed is None else cell(score.speed) for _, cell in columns),
            f"{score.facts.peak_memory_bytes / _MIB:.0f}",
            f"{score.facts.start_s:.1f}",
            str(len(score.unstable)),
            str(len(score.errors)),
        ]
        for name, score in systems.items()
    ]
    header = ["system", *(title for title, _ in columns), "peak memory, MiB", "start, s"]
    header += ["unstable", "failed calls"]
    note = ""
    if run.one_clip is not None:
        note = f"The {run.one_clip_title} is `{run.one_clip}`, one call at a time, median. "
    timed = [score.speed for score in systems.values() if score.speed is not None]
    calls = {(speed.alone.calls, speed.loaded.calls) for speed in timed}
    numbers = "; ".join(f"{alone} calls alone, {loaded} under load" for alone, loaded in calls)
    note += f"Percentiles are over {numbers or 'nothing: no system of this run was timed'}."
    figures = Table(header, rows, "Figures", note, folded="closed")
    return [*_speed_figures(systems, run.settings.concurrency), figures]


def _speed_figures(systems: Mapping[str, SystemScore], concurrency: int) -> list[Figure]:
    """Chart latencies, and throughput against memory; return nothing if no system was timed."""
    speeds = {name: score.speed for name, score in systems.items() if score.speed is not None}
    if not speeds:
        return []
    many = f"{concurrency} calls at a time"
    points = {
        name: (systems[name].facts.peak_memory_bytes / _MIB, speed.rtfx_loaded)
        for name, speed in speeds.items()
    }
    return [
        Figure(
            [
                latency_chart("One call at a time", {n: one.alone for n, one in speeds.items()}),
                latency_chart(many.capitalize(), {n: one.loaded for n, one in speeds.items()}),
            ],
            note="The gap in a bar is the median; its shades hold the middle 50, 90 and 98 % of "
            "the calls.",
        ),
        Figure(
            [memory_chart(f"RTFx, {many}", points)],
            note="Up and left is better: more audio in less memory.",
            legend=False,
        ),
    ]


def _milliseconds(*seconds: float | None) -> str:
    return " / ".join("none" if value is None else f"{1e3 * value:.0f}" for value in seconds)


def _percentiles(latency: Latency) -> str:
    return _milliseconds(latency.p50_s, latency.p95_s, latency.p99_s)


def _conditions(report: Report) -> ReportSection:
    run = report.run
    of_run = {
        "configuration": f"{run.config_name}, precision {run.precision}",
        "CPU threads for every system": run.settings.threads,
        "calls at a time under load": run.settings.concurrency,
        "timed passes": run.settings.repeats,
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
    return ReportSection(CONDITIONS, [*parts, rules, *settings], printed=False)


# ---------------------------------------------------------------- worst clips


MAX_CLIPS = 10
MAX_BYTES = 6_000_000  # of all embedded audio, before base64
MAX_BYTES_PER_CLIP = 1_500_000
_MIME = {
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".m4a": "audio/mp4",
    ".mp4": "audio/mp4",
    ".webm": "audio/webm",
}
_WITHOUT_SPACES = frozenset(("zh", "yue", "ja", "th", "lo", "my", "km", "bo"))


def worst_clips(
    score: SystemScore, calls: Mapping[str, Sequence[TimedCall]], normalize: Normalize
) -> list[ReportClip]:
    """Return the clips with the most character errors of one system, worst first.

    Args:
        score: that system's score.
        calls: each system's calls, by name.
        normalize: the normaliser that texts are compared under.
    """
    name = score.facts.name
    ranked = sorted(
        (-counts.errors, clip_set, file, counts)
        for clip_set, of_set in score.sets.items()
        for file, counts in of_set.by_clip.items()
        if counts.errors
    )
    all_calls = _by_clip(calls)
    clips, left = [], MAX_BYTES
    for _, clip_set, file, counts in ranked[:MAX_CLIPS]:
        answers = all_calls[clip_set, file]
        first = next(iter(answers.values()))
        audio, size, why = _audio(first.path, left)
        left -= size
        rate = f", CER {100 * counts.errors / counts.length:.0f} %" if counts.length else ""
        about = (
            f"{TITLES[clip_set]}; {first.language or 'language unknown'}; "
            f"{first.duration_s:.1f} s; "
            f"{counts.errors} character errors{rate}"
        )
        # The system that chose the clip first, systems without a mistake last.
        transcripts = sorted(
            _alike(answers, normalize), key=lambda same: (name not in same.systems, same.right)
        )
        clips.append(ReportClip(file, about, first.reference, tuple(transcripts), audio, why))
    return clips


def _by_clip(
    calls: Mapping[str, Sequence[TimedCall]],
) -> dict[tuple[ClipSet, str], dict[str, TimedCall]]:
    """Return the scored call of each system, by clip."""
    by_clip: dict[tuple[ClipSet, str], dict[str, TimedCall]] = {}
    for name, made in calls.items():
        for call in made:
            if call.phase == "accuracy":
                by_clip.setdefault((call.clip_set, call.file), {})[name] = call
    return by_clip


def _alike(calls: Mapping[str, TimedCall], normalize: Normalize) -> Iterator[SharedTranscript]:
    """Yield systems with equal texts together, in their order."""
    alike: dict[tuple[str, str, str | None], list[str]] = {}
    for name, call in calls.items():
        alike.setdefault((*compared_texts(call, normalize), call.error), []).append(name)
    language = next(iter(calls.values())).language
    for (reference, text, error), names in alike.items():
        yield SharedTranscript(tuple(names), tuple(differences(reference, text, language)), error)


def differences(reference: str, hypothesis: str, language: str | None) -> list[AlignedText]:
    """Align two texts by words, or by characters where a language writes no spaces."""
    by_character = language in _WITHOUT_SPACES
    align = jiwer.process_characters if by_character else jiwer.process_words
    out, joint = align([reference], [hypothesis]), "" if by_character else " "
    reference_parts, hypothesis_parts = out.references[0], out.hypotheses[0]
    return [
        AlignedText(
            joint.join(reference_parts[part.ref_start_idx : part.ref_end_idx]),
            joint.join(hypothesis_parts[part.hyp_start_idx : part.hyp_end_idx]),
        )
        for part in out.alignments[0]
    ]


def _audio(path: str | None, left: int) -> tuple[str | None, int, str | None]:
    """Return a data: address, its bytes of audio, and the reason why there is none."""
    if path is None:
        return None, 0, "these predictions do not say where the audio lies"
    kind = _MIME.get(Path(path).suffix.casefold())
    if kind is None:
        return None, 0, f"browsers do not play {Path(path).suffix or 'this'} files: {path}"
    try:
        size = Path(path).stat().st_size
        if size > min(left, MAX_BYTES_PER_CLIP):
            return None, 0, f"not embedded, for it has {size / 1e6:.1f} MB: {path}"
        data = read_bytes(path)
    except (OSError, FileError):
        return None, 0, f"the audio is not there any more: {path}"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}", size, None
