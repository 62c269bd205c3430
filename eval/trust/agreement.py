"""Which transcripts to trust: the ones that two passes agree on.

Two texts differ by their edits of characters, in percent of the longer one, so it does not matter
which of them comes first, and 100 is the most: it is the CER between them.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from build.clips import Clip
from eval.accuracy.report import percent
from eval.accuracy.score import Counts, Rate, char_counts, rate
from eval.record import Check, ReportSection, Table, Text
from serve.contract.messages import Transcript
from serve.speech.text import normalize_text

EVERY = 100.0  # the threshold that selects all
THRESHOLDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, EVERY)


@dataclasses.dataclass(frozen=True)
class TranscriptPair:
    """Two transcripts of a clip; `other_text` and `difference` describe the second."""

    file: str  # the audio's path
    text: str
    other_text: str
    language: str | None  # the reference's, or the detected one
    duration: float  # s
    difference: float  # %, between the texts
    silence: bool  # neither pass has a word
    avg_logprob: float | None  # of all its tokens; None: there are none
    confidence: float | None  # the words' mean; None: there are none, or the engine has none
    edits: Counts | None  # of characters, to the reference; None: there is no reference

    def is_trusted(self, threshold: float) -> bool:
        """Return whether the texts agree; two passes without a word agree on silence alone."""
        return self.difference <= threshold and not self.silence


@dataclasses.dataclass(frozen=True)
class Selection:
    """The transcripts that agree within a threshold."""

    threshold: float  # %
    clips: int  # selected
    clips_percent: float  # of all
    seconds_percent: float
    cer: Rate | None  # of the selected; None: there are no references


@dataclasses.dataclass(frozen=True)
class AgreementResult:
    """The figures of all clips."""

    clips: int  # failed ones included
    seconds: float  # of these
    failed: int
    trusted: int
    silences: int  # clips in which neither pass has a word
    points: tuple[Selection, ...]


def pair_of(
    clip: Clip, first: Transcript, second: Transcript, *, references: bool
) -> TranscriptPair:
    """Compare two transcripts of a clip, and the first with the reference."""
    text, other = normalize_text(first.text), normalize_text(second.text)
    words = [word for segment in first.segments for word in segment.words or ()]
    return TranscriptPair(
        file=str(clip.path.resolve()),
        text=first.text.strip(),
        other_text=second.text.strip(),
        language=clip.language or first.language,
        duration=clip.duration_s,
        difference=round(100 * char_counts(text, other).errors / max(1, len(text), len(other)), 2),
        silence=not text and not other,
        avg_logprob=_mean((s.avg_logprob, len(s.tokens)) for s in first.segments),
        confidence=_mean((w.confidence, 1) for w in words),
        edits=char_counts(normalize_text(clip.text), text) if references else None,
    )


def _mean(weighted: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of weighted values; None without any weight."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def figures_of(
    pairs: Sequence[TranscriptPair], failed: int, seconds: float, threshold: float
) -> AgreementResult:
    """Count the trusted transcripts, and select by each threshold.

    Args:
        pairs: one for each clip that both passes transcribed.
        failed: number of clips without a pair.
        seconds: the length of all clips.
        threshold: % in which two trusted texts may differ.
    """
    clips, points = len(pairs) + failed, list[Selection]()
    references = any(pair.edits for pair in pairs)
    for limit in sorted({*THRESHOLDS, threshold}):
        # In a fixed order, because the interval's draws depend on it.
        selected = sorted((p for p in pairs if p.is_trusted(limit)), key=lambda pair: pair.file)
        edits = [pair.edits for pair in selected if pair.edits]
        point = Selection(
            threshold=limit,
            clips=len(selected),
            clips_percent=100 * len(selected) / clips,
            seconds_percent=100 * sum(pair.duration for pair in selected) / seconds,
            cer=rate(edits) if references else None,
        )
        points.append(point)
    trusted = sum(pair.is_trusted(threshold) for pair in pairs)
    silences = sum(pair.silence for pair in pairs)
    return AgreementResult(clips, seconds, failed, trusted, silences, tuple(points))


def checks_of(pairs: Sequence[TranscriptPair], threshold: float) -> tuple[Check, ...]:
    """Check that trusted transcripts have a lower CER than the others.

    Where the intervals overlap nothing is decided. Without references there is no check.
    """
    by_trust: dict[bool, list[Counts]] = {True: [], False: []}
    for pair in pairs:
        if pair.edits:
            by_trust[pair.is_trusted(threshold)].append(pair.edits)
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


def section_of(figures: AgreementResult, threshold: float) -> ReportSection:
    """Return the section of the report."""
    header, rows = ["texts differ by at most", "clips", "seconds"], list[list[str]]()
    for point in figures.points:
        limit = "all" if point.threshold == EVERY else f"{point.threshold:g} %"
        rows.append([limit, f"{point.clips_percent:.0f} %", f"{point.seconds_percent:.0f} %"])
        if point.cer:
            rows[-1].append(percent(point.cer))
    if len(rows[0]) > len(header):  # there are references
        header.append("CER")
    counts = (
        f"trusted at {threshold:g} %: {figures.trusted} of {figures.clips} clips; agreed on "
        f"silence: {figures.silences}; failed: {figures.failed}"
    )
    return ReportSection("Transcripts", [Table(header, rows), Text(counts)])
