"""Which transcripts to trust: those that two passes agree on, or of which one pass is sure. Pure.

Two texts differ by their edits of characters, in percent of the longer one, so it does not matter
which of them comes first, and 100 is the most: it is the CER between them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from build.clips import Clip
from eval.accuracy.normalize import Normalize
from eval.accuracy.report import percent
from eval.accuracy.score import Counts, Rate, char_counts, rate
from eval.figures import line_chart
from eval.record import Check, Figure, Part, Section, Table, Text
from serve.contract.messages import Transcript

THRESHOLDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
EVERY = 100.0  # the threshold that selects all


@dataclasses.dataclass(frozen=True)
class Pair:
    """What two passes heard of a clip; all but `other_text` and `difference` is of the first."""

    file: str  # path of its audio
    text: str
    other_text: str
    language: str | None  # the reference's, or as it was heard
    duration: float  # s
    difference: float  # %, between the texts
    silence: bool  # neither heard a word
    avg_logprob: float | None  # of all its tokens; None: there are none
    confidence: float | None  # mean of its words; None: there are none, or the engine has none
    edits: Counts | None  # of characters, to the reference; None: there is no reference


@dataclasses.dataclass(frozen=True)
class Whole:
    """All clips that were to be heard, those that failed among them."""

    clips: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Point:
    """What one way of selecting as many transcripts as agree within a threshold comes to."""

    threshold: float  # %
    by: str  # of `WAYS`
    clips: int  # selected
    clips_percent: float  # of all
    seconds_percent: float
    cer: Rate | None  # of the selected; None: there are no references
    exact_percent: float | None  # of the selected, how many have no error


def _falling(value: float | None) -> float:
    """Put higher values first, and what has none last."""
    return float("inf") if value is None else -value


WAYS: Mapping[str, Callable[[Pair], float]] = {
    "agreement": lambda pair: pair.difference,
    "avg_logprob": lambda pair: _falling(pair.avg_logprob),
    "confidence": lambda pair: _falling(pair.confidence),
}
"""Ways of selecting; transcripts with the lowest number come first."""


def pair_of(
    clip: Clip, first: Transcript, second: Transcript, *, references: bool, normalize: Normalize
) -> Pair:
    """Hold two transcripts of a clip together, and the first against the reference."""
    language = clip.language or first.language
    text, other = (normalize(one.text, language) for one in (first, second))
    errors = char_counts(text, other).errors
    return Pair(
        file=str(clip.path.resolve()),
        text=first.text.strip(),
        other_text=second.text.strip(),
        language=language,
        duration=clip.duration_s,
        difference=round(100 * errors / max(1, len(text), len(other)), 2),
        silence=not text and not other,
        avg_logprob=_avg_logprob(first),
        confidence=_confidence(first),
        edits=char_counts(normalize(clip.text, language), text) if references else None,
    )


def _avg_logprob(transcript: Transcript) -> float | None:
    known = [
        (segment.avg_logprob, len(segment.tokens))
        for segment in transcript.segments
        if segment.avg_logprob is not None
    ]
    tokens = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / tokens if tokens else None


def _confidence(transcript: Transcript) -> float | None:
    words = [word for segment in transcript.segments for word in segment.words or ()]
    known = [word.confidence for word in words if word.confidence is not None]
    return sum(known) / len(known) if known else None


def is_trusted(pair: Pair, threshold: float) -> bool:
    """Tell whether texts agree; where neither has a word, they agree on silence alone."""
    return pair.difference <= threshold and not pair.silence


def ways_of(pairs: Sequence[Pair]) -> list[str]:
    """Return the ways that there is something to select by: without references, agreement alone."""
    if all(pair.edits is None for pair in pairs):
        return ["agreement"]
    sure = any(pair.confidence is not None for pair in pairs)
    return [way for way in WAYS if sure or way != "confidence"]


def curve(pairs: Sequence[Pair], whole: Whole, threshold: float) -> list[Point]:
    """Select by each threshold, the given one among them; by other ways as many of the surest."""
    points = list[Point]()
    for limit in sorted({*THRESHOLDS, threshold, EVERY}):
        count = sum(is_trusted(pair, limit) for pair in pairs)
        for way in ways_of(pairs):
            points.append(_point(limit, way, _ranked(pairs, way)[:count], whole))
    return points


def _ranked(pairs: Sequence[Pair], way: str) -> list[Pair]:
    return sorted((pair for pair in pairs if not pair.silence), key=WAYS[way])


def _point(threshold: float, way: str, chosen: Sequence[Pair], whole: Whole) -> Point:
    # In one order, for the interval's draws depend on it.
    by_file = sorted(chosen, key=lambda pair: pair.file)
    edits = [pair.edits for pair in by_file if pair.edits is not None]
    return Point(
        threshold=threshold,
        by=way,
        clips=len(chosen),
        clips_percent=100 * len(chosen) / whole.clips,
        seconds_percent=100 * sum(pair.duration for pair in chosen) / whole.seconds,
        cer=rate(edits) if edits else None,
        exact_percent=100 * sum(not one.errors for one in edits) / len(edits) if edits else None,
    )


def steps(pairs: Sequence[Pair], whole: Whole, way: str) -> list[tuple[float, float]]:
    """Return yield and CER, both in percent, after each transcript by which a selection grows.

    Those that a way does not tell apart come together.
    """
    found, clips, edits = list[tuple[float, float]](), 0, Counts()
    for _, alike in itertools.groupby(_ranked(pairs, way), WAYS[way]):
        for pair in alike:
            clips, edits = clips + 1, edits + (pair.edits or Counts())
        if edits.length:
            found.append((100 * clips / whole.clips, 100 * edits.errors / edits.length))
    return found


def checks_of(pairs: Sequence[Pair], threshold: float) -> tuple[Check, ...]:
    """Check that what is trusted has fewer errors than the rest; nothing without references."""
    known = [(pair.edits, is_trusted(pair, threshold)) for pair in pairs if pair.edits]
    if not known:
        return ()
    trusted, rest = (
        rate([edits for edits, selected in known if selected == wanted]) for wanted in (True, False)
    )
    return (_fewer_errors(trusted, rest),)


def _fewer_errors(trusted: Rate, rest: Rate) -> Check:
    """Hold two rates against each other; where their intervals overlap, nothing is decided."""
    name = "transcripts that are trusted have a lower CER than the others"
    if trusted.percent is None or rest.percent is None:
        return Check(name, None, "none are trusted, or all, or nobody speaks in them")
    found = f"{trusted.percent:.2f} % and {rest.percent:.2f} %"
    if trusted.percent >= rest.percent:
        return Check(name, False, found)
    apart = (trusted.high or 0.0) < (rest.low or 0.0)
    return Check(name, True if apart else None, found)


# ---------------------------------------------------------------- figures and their report


@dataclasses.dataclass(frozen=True)
class AgreementResult:
    """All that was found."""

    whole: Whole
    failed: int  # clips
    trusted: int
    silences: int  # clips in which neither pass heard a word
    silences_right: int | None  # in which nobody speaks; None: there are no references
    points: tuple[Point, ...]


def line_of(pair: Pair, threshold: float) -> dict[str, object]:
    """Return the keys of a manifest's line, and what says whether to trust it."""
    line = dataclasses.asdict(pair)
    del line["edits"]
    return {**line, "trusted": is_trusted(pair, threshold)}


def figures_of(
    pairs: Sequence[Pair], failed: int, whole: Whole, threshold: float
) -> AgreementResult:
    """Count what is trusted, and draw the curve."""
    silent = [pair for pair in pairs if pair.silence]
    said = [pair.edits.length for pair in silent if pair.edits]
    known = any(pair.edits for pair in pairs)
    return AgreementResult(
        whole=whole,
        failed=failed,
        trusted=sum(is_trusted(pair, threshold) for pair in pairs),
        silences=len(silent),
        silences_right=said.count(0) if known else None,
        points=tuple(curve(pairs, whole, threshold)),
    )


def _tables(figures: AgreementResult, threshold: float) -> tuple[Table, Text]:
    """Tabulate the figures by threshold, and count what is trusted."""
    by_threshold: dict[float, list[Point]] = {}
    for point in figures.points:
        by_threshold.setdefault(point.threshold, []).append(point)
    ways = [point.by for point in by_threshold[EVERY] if point.cer]
    header = ["texts differ by at most", "clips", "seconds"]
    header += [title for way in ways for title in (f"CER by {way}", "exact")]
    rows = [
        [
            "all" if limit == EVERY else f"{limit:g} %",
            f"{points[0].clips_percent:.0f} %",
            f"{points[0].seconds_percent:.0f} %",
            *(cell for point in points for cell in _rightness(point) if ways),
        ]
        for limit, points in by_threshold.items()
    ]
    right = figures.silences_right
    of_them = "" if right is None else f", rightly in {right}"
    counts = (
        f"trusted at {threshold:g} %: {figures.trusted} of {figures.whole.clips} clips; agreed on "
        f"silence: {figures.silences}{of_them}; failed: {figures.failed}"
    )
    return Table(header, rows), Text(counts)


def _rightness(point: Point) -> tuple[str, str]:
    exact = "" if point.exact_percent is None else f"{point.exact_percent:.0f} %"
    return (percent(point.cer) if point.cer else "none"), exact


def section_of(
    pairs: Sequence[Pair], whole: Whole, figures: AgreementResult, threshold: float
) -> Section:
    """Return the section of the report, with a chart if there are references."""
    parts: list[Part] = list(_tables(figures, threshold))
    if any(pair.edits for pair in pairs):
        curves = {way: steps(pairs, whole, way) for way in ways_of(pairs)}
        label = "CER of the selected transcripts over their share of the clips"
        chart = line_chart("CER of the selected, %", label, "selected, % of the clips", curves)
        parts.insert(0, Figure([chart], legend=False))
    return Section("Transcripts", parts)
