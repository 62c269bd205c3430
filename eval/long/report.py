"""`python -m eval long`: let systems hear long recordings, score the answers, and report."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from eval.accuracy.normalize import DEFAULT, Spelling, descriptions, normalizer
from eval.accuracy.report import percent
from eval.accuracy.score import Counts, Rate
from eval.figures import rate_chart
from eval.long.align import NEAR_CUT_S, RUN, TOUCH_S
from eval.long.gates import long_gates
from eval.long.invented import invented
from eval.long.plan import NAMES
from eval.long.run import Loaded, load_long, run_long
from eval.long.score import BLOCK_S, Figures, LongScore, score_long
from eval.long.truth import KINDS, UNSPOKEN, Recording, What
from eval.record import CONDITIONS, Figure, Result, Run, Section, Table, Text, facts

_SHOWN: tuple[What, ...] = ("speech", *UNSPOKEN)

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


def long(
    run: Run,
    *,
    systems: tuple[str, ...] | None,
    minutes: float | None,
    seed: int,
    again: bool,
    without_speech: bool,
) -> Result:
    """Let systems hear recordings, and score all answers that the folder holds.

    Args:
        run: its config says the limits of the gates.
        systems: their names; None is all.
        minutes, seed, again: as of `run_long`.
        without_speech: whether they hear short clips in which nobody speaks instead.

    Raises:
        EarshotError: a system, or something that it needs, is missing or failed.
        ConfigError: the folder holds a run of other recordings or settings.
    """
    if without_speech:
        return invented(run, systems=systems, seed=seed)
    run_long(run, systems or NAMES, minutes=minutes, seed=seed, again=again)
    loaded, normalize = load_long(run.folder), normalizer(DEFAULT)
    scores = tuple(
        score_long(system.facts, system.calls, loaded.recordings, normalize)
        for system in loaded.systems
    )
    return result_of(loaded, scores, run.config.eval.max_cer_gap_faster_whisper)


def result_of(loaded: Loaded, scores: Sequence[LongScore], max_cer_gap: float) -> Result:
    """Return the result of scored recordings."""
    run, kept = loaded.run, [{**vars(s), "blocks": None, "sentences": None} for s in scores]
    notes = [f"`{name}` has not heard everything yet; run again." for name in loaded.unfinished]
    recordings = Section("Recordings", [_recordings(loaded.recordings)], printed=False)
    settings = [
        dataclasses.replace(facts(score.name, score.facts.settings), folded="closed")
        for score in scores
    ]
    conditions = [facts("Machine", run.machine), Text("", "Rules", RULES), *settings]
    return Result(
        {"run": run, "systems": kept, "unfinished": loaded.unfinished},
        tuple(long_gates(scores, max_cer_gap)),
        (*_sections(loaded, scores), recordings, Section(CONDITIONS, conditions, printed=False)),
        f"Long recordings: {run.config_name}",
        f"{run.started}; {contents(loaded.recordings)}; {run.threads} CPU threads for every "
        f"system; normaliser `{DEFAULT}`: {descriptions(Spelling())[DEFAULT]}.",
        notes=(Text("", items=notes),) if notes else (),
    )


def contents(recordings: Sequence[Recording]) -> str:
    """Say what the recordings hold, in a line."""
    total_s = sum(recording.duration for recording in recordings)
    spoken_s = sum(s.end_s - s.start_s for recording in recordings for s in recording.sentences)
    words = sum(len(recording.text.split()) for recording in recordings)
    return (
        f"{len(recordings)} recordings, {total_s / 60:.1f} minutes, of which {spoken_s / 60:.1f} "
        f"are speech ({words:,} words)"
    )


def _sections(loaded: Loaded, scores: Sequence[LongScore]) -> list[Section]:
    """Return the sections on the answers, each with a row for each system."""

    def section(title: str, note: str, columns: dict[str, Callable[[Figures], str]]) -> Section:
        rows = [
            (score.name, *(cell(score.overall) for cell in columns.values())) for score in scores
        ]
        return Section(title, [Table(("system", *columns), rows, note=note)])

    rates = {
        title: {score.name: [getattr(score.overall, name)] for score in scores}
        for title, name in (("CER, %", "cer"), ("WER, %", "wer"))
    }
    charts = [chart for title, of in rates.items() if (chart := rate_chart(title, of))]
    accuracy = section(
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
    )
    return [
        Section("Accuracy", [*([Figure(charts)] if charts else []), *accuracy.parts]),
        _by_kind(loaded.recordings, scores),
        section(
            "Text where nobody speaks",
            "Characters, by what there is instead of speech.",
            {what: lambda f, what=what: str(f.unspoken[what]) for what in UNSPOKEN},  # type: ignore[misc]
        ),
        section(
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
        _languages(scores),
    ]


def _share(count: int, of: Counts) -> str:
    return f"{count} of {of.length} ({100 * count / of.length:.2f} %)" if of.length else "none"


def _by_kind(recordings: Sequence[Recording], scores: Sequence[LongScore]) -> Section:
    kinds = list(dict.fromkeys(recording.kind for recording in recordings))
    rows = [(score.name, *(percent(score.by_kind[kind].cer) for kind in kinds)) for score in scores]
    note = "CER. " + "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds) + "."
    return Section("By kind of recording", [Table(("system", *kinds), rows, note=note)])


def _languages(scores: Sequence[LongScore]) -> Section:
    rows = []
    for score in scores:
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
    return Section("Languages", [Table(header, rows, note=note)])


def _recordings(recordings: Sequence[Recording]) -> Table:
    """Tabulate the length and the content of each recording."""
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
    header = ["recording", "minutes", "sentences", *(f"{what}, s" for what in _SHOWN)]
    return Table(header, rows)
