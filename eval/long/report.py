"""`python -m eval long`: recordings are heard and scored; the report, and its page."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from eval.accuracy.normalize import DEFAULT, Spelling, descriptions, normalizer
from eval.accuracy.page.page import PAGE, render
from eval.accuracy.page.plots import rates_plot
from eval.accuracy.report import gates_text, head_of, percent, settings_text
from eval.accuracy.score import Counts, Rate
from eval.files import write_text
from eval.long.align import NEAR_CUT_S, RUN, TOUCH_S
from eval.long.gates import long_gates
from eval.long.plan import NAMES
from eval.long.run import Loaded, LongRun, load_long, run_long
from eval.long.score import BLOCK_S, Figures, LongScore, score_long
from eval.long.truth import KINDS, UNSPOKEN, Recording, What
from eval.measurement import Check, Result, Run, table, verdict

_SHOWN: tuple[What, ...] = ("speech", *UNSPOKEN)
_TEMPLATES = Path(__file__).parent / "templates"

RULES = (
    "Every system gets a recording's bytes and returns the whole text, one recording at a time, "
    "alone in its own process, on the same CPU cores. None is told the language.",
    "Words and characters: the whole recording's words are aligned at once (jiwer); the characters "
    "of a sentence are then compared with the words that fell to it. Rates are all edits / the "
    f"length of all references; intervals 95 %, bootstrap over minutes ({BLOCK_S:.0f} s).",
    f"Lost are words without a counterpart, in stretches if {RUN} and more in a row. Added words "
    f"in stretches of {RUN} and more are repeated if they stand in the text once more near by, "
    "else made up.",
    "Characters where nobody speaks: of segments that share no more than "
    f"{TOUCH_S:g} s with any sentence. Systems that are not asked for timestamps have no times but "
    "those of their windows, which hardly ever do.",
    f"Beside a cut are sentences within {NEAR_CUT_S:g} s of where one window's segments end and "
    "the next one's begin.",
    "RTFx: seconds of audio / seconds from the bytes to the whole text, one recording at a time.",
)


@dataclasses.dataclass(frozen=True)
class LongReport:
    """A scored run."""

    run: LongRun
    recordings: tuple[Recording, ...]
    systems: tuple[LongScore, ...]
    unfinished: tuple[str, ...]
    gates: tuple[Check, ...]


def long(
    run: Run,
    *,
    systems: tuple[str, ...] | None,
    minutes: float | None,
    seed: int,
    again: bool,
) -> Result:
    """Let systems hear recordings, score all that the folder holds and report on it.

    Args:
        run: its folder gets the reports; its config says what the gates allow.
        systems: their names; None is all.
        minutes, seed, again: as of `run_long`.

    Raises:
        EarshotError: a system, or something that it needs, is missing or failed.
        ConfigError: the folder holds a run of other recordings or settings.
        FileError: a report cannot be written.
    """
    run_long(run, systems or NAMES, minutes=minutes, seed=seed, again=again)
    folder = run.folder
    report = _scored(load_long(folder), run.config.eval.max_cer_gap_faster_whisper)
    markdown = to_markdown(report)
    write_text(folder / "report.md", markdown)
    write_text(folder / PAGE, _page(report))
    scores = [{**vars(score), "blocks": None, "sentences": None} for score in report.systems]
    figures = {"run": report.run, "systems": scores, "unfinished": report.unfinished}
    text = f"{head_of(markdown)}\n\nThe whole report: {folder / 'report.md'} and .html"
    return Result(figures, report.gates, text)


def _scored(loaded: Loaded, max_cer_gap: float) -> LongReport:
    normalize = normalizer(DEFAULT)
    scores = tuple(
        score_long(system.facts, system.calls, loaded.recordings, normalize)
        for system in loaded.systems
    )
    gates = tuple(long_gates(scores, max_cer_gap))
    return LongReport(loaded.run, loaded.recordings, scores, loaded.unfinished, gates)


def to_markdown(report: LongReport) -> str:
    """Return the text of report.md."""
    run = report.run
    parts = [
        f"# Long recordings: {run.config_name}",
        f"{run.started}; {contents(report.recordings)}; {run.threads} CPU threads for every "
        f"system; normaliser `{DEFAULT}`: {descriptions(Spelling())[DEFAULT]}.",
        gates_text(report.gates),
        *(f"`{name}` has not heard everything yet; run again." for name in report.unfinished),
        *(
            f"## {part.title}\n\n{part.note}\n\n{table(part.header, part.rows)}"
            for part in parts_of(report)
        ),
        "## Rules",
        "\n".join(f"- {rule}" for rule in RULES),
        "## Recordings",
        table(*recordings_table(report.recordings)),
        "## Machine",
        "\n".join(f"- {key}: {value}" for key, value in run.machine.items()),
        "## Settings",
        *(settings_text(score.facts) for score in report.systems),
    ]
    return "\n\n".join(parts) + "\n"


def contents(recordings: Sequence[Recording]) -> str:
    """Say what the recordings hold, in a line."""
    total_s = sum(recording.duration for recording in recordings)
    spoken_s = sum(s.end_s - s.start_s for recording in recordings for s in recording.sentences)
    words = sum(len(recording.text.split()) for recording in recordings)
    return (
        f"{len(recordings)} recordings, {total_s / 60:.1f} minutes, of which {spoken_s / 60:.1f} "
        f"are speech ({words:,} words)"
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """A table with a row a system."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def parts_of(report: LongReport) -> list[Part]:
    """Return the tables on what was heard."""

    def part(title: str, note: str, columns: dict[str, Callable[[Figures], str]]) -> Part:
        rows = tuple(
            (score.name, *(cell(score.overall) for cell in columns.values()))
            for score in report.systems
        )
        return Part(title, note, ("system", *columns), rows)

    return [
        part(
            "Accuracy",
            "Counts are words, of all that were said.",
            {
                "CER [95 %]": lambda f: percent(f.cer),
                "WER [95 %]": lambda f: percent(f.wer),
                "lost": lambda f: str(f.wer.counts.deletions),
                "in stretches": lambda f: str(f.lost_in_stretches),
                "added": lambda f: str(f.wer.counts.insertions),
                "repeated": lambda f: str(f.repeated),
                "made up": lambda f: str(f.made_up),
                "RTFx": lambda f: f"{f.rtfx:.1f}",
            },
        ),
        _by_kind(report),
        part(
            "Text where nobody speaks",
            "Characters, by what there is instead of speech.",
            {what: lambda f, what=what: str(f.unspoken[what]) for what in UNSPOKEN},  # type: ignore[misc]
        ),
        part(
            "Beside cuts",
            "Lost and added words of sentences beside a cut, and of all others.",
            {
                "cuts": lambda f: "not known" if f.cuts is None else str(f.cuts),
                "lost": lambda f: _share(f.at_cuts.deletions, f.at_cuts),
                "added": lambda f: _share(f.at_cuts.insertions, f.at_cuts),
                "lost elsewhere": lambda f: _share(f.elsewhere.deletions, f.elsewhere),
                "added elsewhere": lambda f: _share(f.elsewhere.insertions, f.elsewhere),
            },
        ),
        _languages(report),
    ]


def _share(count: int, of: Counts) -> str:
    return f"{count} of {of.length} ({100 * count / of.length:.2f} %)" if of.length else "none"


def _by_kind(report: LongReport) -> Part:
    kinds = list(dict.fromkeys(recording.kind for recording in report.recordings))
    rows = tuple(
        (score.name, *(percent(score.by_kind[kind].cer) for kind in kinds))
        for score in report.systems
    )
    note = "CER. " + "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + "."
    return Part("By kind of recording", note, ("system", *kinds), rows)


def _languages(report: LongReport) -> Part:
    rows = []
    for score in report.systems:
        right = sum(first == answer for first, answer in score.languages)
        mixed = score.by_kind.get("languages")
        empty = Rate(None, None, None, Counts())
        rows.append(
            (
                score.name,
                f"{right} of {len(score.languages)}",
                percent(mixed.first_language if mixed else empty),
                percent(mixed.other_languages if mixed else empty),
            )
        )
    note = (
        "Recordings whose language was answered as that of their first sentence; and CER of "
        "sentences in recordings that change it."
    )
    header = ("system", "answered", "CER, first language", "CER, the other")
    return Part("Languages", note, header, tuple(rows))


def recordings_table(recordings: Sequence[Recording]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: how long each recording is, and what is in it."""
    rows = []
    for recording in recordings:
        seconds: dict[What, float] = collections.defaultdict(float)
        for stretch in recording.stretches:
            seconds[stretch.what] += stretch.end_s - stretch.start_s
        rows.append(
            [
                recording.file,
                f"{recording.duration / 60:.1f}",
                str(len(recording.sentences)),
                *(f"{seconds[what]:.0f}" for what in _SHOWN),
            ]
        )
    return ["recording", "minutes", "sentences", *(f"{what}, s" for what in _SHOWN)], rows


def _page(report: LongReport) -> str:
    """Return the text of report.html."""
    rates = {
        title: {score.name: [getattr(score.overall, name)] for score in report.systems}
        for title, name in (("CER, %", "cer"), ("WER, %", "wer"))
    }
    header, rows = recordings_table(report.recordings)
    return render(
        "long.html",
        _TEMPLATES,
        report=report,
        verdict=verdict(report.gates),
        contents=contents(report.recordings),
        accuracy=rates_plot(rates, "accuracy") if report.systems else None,
        parts=parts_of(report),
        recordings=Part("Recordings", "", tuple(header), tuple(map(tuple, rows))),
        rules=RULES,
    )
