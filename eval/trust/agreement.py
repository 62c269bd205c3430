"""Which transcripts to trust: the ones that two passes agree on.

Two texts differ by their edits of characters, in percent of the longer one, so it does not matter
which of them comes first, and 100 is the most: it is the CER between them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from build.clips import Clip
from eval.accuracy.normalize import Normalize
from eval.accuracy.report import percent
from eval.accuracy.score import Counts, Rate, char_counts, rate
from eval.figures import line_chart
from eval.record import Check, Figure, Part, ReportSection, Table, Text
from serve.contract.messages import Transcript

THRESHOLDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
EVERY = 100.0  # the threshold that selects all


@dataclasses.dataclass(frozen=True)
class TranscriptPair:
    """Two transcripts of a clip; `other_text` and `difference` describe the second."""

    file: str  # the audio's path
    text: str
    other_text: str
    language: str | None  # the reference's, or as it was heard
    duration: float  # s
    difference: float  # %, between the texts
    silence: bool  # neither pass heard a word
    avg_logprob: float | None  # of all its tokens; None: there are none
    confidence: float | None  # the words' mean; None: there are none, or the engine has none
    edits: Counts | None  # of characters, to the reference; None: there is no reference


@dataclasses.dataclass(frozen=True)
class Selection:
    """The best transcripts by one ranking: as many as agree within a threshold."""

    threshold: float  # %
    by: str  # of `RANKINGS`
    clips: int  # selected
    clips_percent: float  # of all
    seconds_percent: float
    cer: Rate | None  # of the selected; None: there are no references
    exact_percent: float | None  # of the selected, without an error


@dataclasses.dataclass(frozen=True)
class AgreementResult:
    """The figures of all clips."""

    clips: int  # failed ones included
    seconds: float  # of these
    failed: int
    trusted: int
    silences: int  # clips in which neither pass heard a word
    silences_right: int | None  # without speech; None: there are no references
    points: tuple[Selection, ...]


RANKINGS: Mapping[str, Callable[[TranscriptPair], float]] = {
    "agreement": lambda pair: pair.difference,
    "avg_logprob": lambda pair: float("inf") if pair.avg_logprob is None else -pair.avg_logprob,
}
"""Rankings by which transcripts are selected; the lowest numbers come first."""


def pair_of(
    clip: Clip, first: Transcript, second: Transcript, *, references: bool, normalize: Normalize
) -> TranscriptPair:
    """Compare two transcripts of a clip, and the first with the reference."""
    language = clip.language or first.language
    text, other = (normalize(transcript.text, language) for transcript in (first, second))
    words = [word for segment in first.segments for word in segment.words or ()]
    return TranscriptPair(
        file=str(clip.path.resolve()),
        text=first.text.strip(),
        other_text=second.text.strip(),
        language=language,
        duration=clip.duration_s,
        difference=round(100 * char_counts(text, other).errors / max(1, len(text), len(other)), 2),
        silence=not text and not other,
        avg_logprob=_mean((s.avg_logprob, len(s.tokens)) for s in first.segments),
        confidence=_mean((w.confidence, 1) for w in words),
        edits=char_counts(normalize(clip.text, language), text) if references else None,
    )


def _mean(weighted: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of weighted values; None without any weight."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def is_trusted(pair: TranscriptPair, threshold: float) -> bool:
    """Return whether texts agree; two passes without a word agree on silence alone."""
    return pair.difference <= threshold and not pair.silence


def figures_of(
    pairs: Sequence[TranscriptPair], *, failed: int, clips: int, seconds: float, threshold: float
) -> AgreementResult:
    """Count the trusted transcripts, and select by each threshold.

    Args:
        pairs: one for each clip that both passes transcribed.
        failed: number of clips without a pair.
        clips: number of all clips.
        seconds: the length of all clips.
        threshold: % in which two trusted texts may differ.
    """
    references = any(pair.edits for pair in pairs)
    silent = [pair for pair in pairs if pair.silence]
    points = list[Selection]()
    for limit in sorted({*THRESHOLDS, threshold, EVERY}):
        count = sum(is_trusted(pair, limit) for pair in pairs)
        for ranking in RANKINGS if references else ["agreement"]:
            # In a fixed order, because the interval's draws depend on it.
            chosen = sorted(_ranked(pairs, ranking)[:count], key=lambda pair: pair.file)
            edits = [pair.edits for pair in chosen if pair.edits]
            exact = sum(not counts.errors for counts in edits)
            point = Selection(
                threshold=limit,
                by=ranking,
                clips=count,
                clips_percent=100 * count / clips,
                seconds_percent=100 * sum(pair.duration for pair in chosen) / seconds,
                cer=rate(edits) if edits else None,
                exact_percent=100 * exact / len(edits) if edits else None,
            )
            points.append(point)
    return AgreementResult(
        clips=clips,
        seconds=seconds,
        failed=failed,
        trusted=sum(is_trusted(pair, threshold) for pair in pairs),
        silences=len(silent),
        silences_right=(
            sum(pair.edits is not None and not pair.edits.length for pair in silent)
            if references
            else None
        ),
        points=tuple(points),
    )


def _ranked(pairs: Sequence[TranscriptPair], ranking: str) -> list[TranscriptPair]:
    return sorted((pair for pair in pairs if not pair.silence), key=RANKINGS[ranking])


def steps(pairs: Sequence[TranscriptPair], clips: int, ranking: str) -> list[tuple[float, float]]:
    """Return yield and CER, both in percent, for growing selections.

    Transcripts of equal rank come together.
    """
    points, count, edits = list[tuple[float, float]](), 0, Counts()
    for _, group in itertools.groupby(_ranked(pairs, ranking), RANKINGS[ranking]):
        for pair in group:
            count, edits = count + 1, edits + (pair.edits or Counts())
        if edits.length:
            points.append((100 * count / clips, 100 * edits.errors / edits.length))
    return points


def checks_of(pairs: Sequence[TranscriptPair], threshold: float) -> tuple[Check, ...]:
    """Check that trusted transcripts have a lower CER than the others.

    Where the intervals overlap nothing is decided. Without references there is no check.
    """
    by_trust: dict[bool, list[Counts]] = {True: [], False: []}
    for pair in pairs:
        if pair.edits:
            by_trust[is_trusted(pair, threshold)].append(pair.edits)
    if not any(by_trust.values()):
        return ()
    name = "transcripts that are trusted have a lower CER than the others"
    trusted, rest = map(rate, by_trust.values())
    if trusted.percent is None or rest.percent is None:
        return (Check(name, None, "none are trusted, or all, or nobody speaks in them"),)
    passed = True if (trusted.high or 0.0) < (rest.low or 0.0) else None
    if trusted.percent >= rest.percent:
        passed = False
    return (Check(name, passed, f"{trusted.percent:.2f} % and {rest.percent:.2f} %"),)


# ---------------------------------------------------------------- report


def line_of(pair: TranscriptPair, threshold: float) -> dict[str, object]:
    """Return the keys of a manifest's line, and whether to trust it."""
    line = dataclasses.asdict(pair)
    del line["edits"]
    return {**line, "trusted": is_trusted(pair, threshold)}


def section_of(
    pairs: Sequence[TranscriptPair], figures: AgreementResult, threshold: float
) -> ReportSection:
    """Return the section of the report, with a chart if there are references."""
    references = figures.silences_right is not None
    header = ["texts differ by at most", "clips", "seconds"]
    header += [title for name in RANKINGS if references for title in (f"CER by {name}", "exact")]
    rows: dict[float, list[str]] = {}
    for point in figures.points:
        limit = "all" if point.threshold == EVERY else f"{point.threshold:g} %"
        shares = [f"{point.clips_percent:.0f} %", f"{point.seconds_percent:.0f} %"]
        row = rows.setdefault(point.threshold, [limit, *shares])
        if references:
            exact = "" if point.exact_percent is None else f"{point.exact_percent:.0f} %"
            row += [percent(point.cer) if point.cer else "none", exact]
    right = f", rightly in {figures.silences_right}" if references else ""
    counts = (
        f"trusted at {threshold:g} %: {figures.trusted} of {figures.clips} clips; agreed on "
        f"silence: {figures.silences}{right}; failed: {figures.failed}"
    )
    parts: list[Part] = [Table(header, list(rows.values())), Text(counts)]
    if references:
        curves = {name: steps(pairs, figures.clips, name) for name in RANKINGS}
        label = "CER of the selected transcripts over their share of the clips"
        chart = line_chart("CER of the selected, %", label, "selected, % of the clips", curves)
        parts.insert(0, Figure([chart], legend=False))
    return ReportSection("Transcripts", parts)
