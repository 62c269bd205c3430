"""Calibration: whether words are right as often as a figure says, and the fit of confidence.

A word is right where jiwer's alignment finds it in the reference. A logistic of its `probability`
and its segment's `avg_logprob` is fitted to the words of one half of the clips, `choose`. All
figures are of the other half, `report`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jiwer
import numpy as np
import numpy.typing as npt

from build.clips import Clip
from eval.accuracy.normalize import Normalize
from eval.record import Check, Part, ReportSection, Table, Text
from serve.contract.engine import Confidence
from serve.contract.errors import EarshotError
from serve.contract.messages import Transcript
from serve.speech.judging import confidence_of, log_odds
from serve.speech.words import SPACELESS

HALVES = ("choose", "report")
EVERY = "all"
MAX_ECE = 0.05  # of words that were not fitted to
MIN_DECIDING = 1_000  # words; with fewer the measures are a matter of chance
_MIN_ROW_WORDS = 50  # words of a language that has a row


BINS = 15
MIN_FIT_WORDS = 30  # the fewest right words, and wrong words, for a fit
_RIDGE = 1e-3  # keeps weights finite where words could be told apart without error
_STEPS = 100
_ENOUGH = 1e-9  # the fit ends at a smaller step

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Bin:
    """Words with nearly the same figure."""

    low: float
    high: float
    words: int
    said: float  # mean of the figure
    right: float  # share of the words


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The reliability of a figure over the words of one search."""

    beam_size: int
    figure: str
    language: str  # of the words; `EVERY` = all
    words: int
    right: float  # share
    said: float  # mean of the figure
    ece: float  # expected calibration error, bins of equal width
    brier: float  # mean squared distance from 1 where a word is right, and from 0 where it is not
    auroc: float | None  # P(figure of a right word > that of a wrong one); None: one kind
    bins: tuple[Bin, ...]  # that hold a word, lowest first


def reliability(
    values: Sequence[float] | Floats,
    right: Sequence[bool] | Floats,
    beam_size: int = 0,
    figure: str = "",
    language: str = "",
) -> Reliability:
    """Compare a figure of words, at least one, with whether they are right.

    Args:
        values: the figure of each word, 0 to 1.
        right: whether each word is right.
        beam_size, figure, language: as in `Reliability`.
    """
    figures, truth = np.asarray(values, np.float64), np.asarray(right, np.float64)
    numbers, bins = np.minimum((figures * BINS).astype(np.int64), BINS - 1), list[Bin]()
    for number in np.unique(numbers).tolist():
        inside = numbers == number
        said, share = float(figures[inside].mean()), float(truth[inside].mean())
        bins.append(Bin(number / BINS, (number + 1) / BINS, int(inside.sum()), said, share))
    return Reliability(
        beam_size=beam_size,
        figure=figure,
        language=language,
        words=len(truth),
        right=float(truth.mean()),
        said=float(figures.mean()),
        ece=sum(abs(one.said - one.right) * one.words for one in bins) / len(truth),
        brier=float(np.mean((figures - truth) ** 2)),
        auroc=_auroc(figures, truth > 0),
        bins=tuple(bins),
    )


def _auroc(figures: Floats, right: npt.NDArray[np.bool_]) -> float | None:
    """Return the probability that a right word has a higher figure; ties count half."""
    wrong = np.sort(figures[~right])
    if not len(wrong) or right.sum() == 0:
        return None
    sides = [np.searchsorted(wrong, figures[right], side) for side in ("left", "right")]
    return float(np.mean(sides) / len(wrong))


def fit_logistic(features: Floats, right: Sequence[bool]) -> list[float]:
    """Fit a logistic regression by maximum likelihood.

    Weights are not negative: a feature with a negative weight is dropped.

    Args:
        features: float64 (words, k), the most telling first.
        right: whether each word is right.

    Returns:
        The intercept, and a weight of each feature, none below 0.

    Raises:
        EarshotError: too few words are right or wrong, or the first feature tells nothing.
    """
    truth = np.asarray(right, np.float64)
    of_each = int(truth.sum()), int((1 - truth).sum())
    if min(of_each) < MIN_FIT_WORDS:
        raise EarshotError(
            f"{of_each[0]} words are right and {of_each[1]} wrong; expected at least "
            f"{MIN_FIT_WORDS} of each: let more speech be heard"
        )
    for count in range(features.shape[1], 0, -1):
        weights = _newton(np.insert(features[:, :count], 0, 1.0, axis=1), truth)
        if min(weights[1:]) >= 0:
            return [float(weight) for weight in weights] + [0.0] * (features.shape[1] - count)
    raise EarshotError("words of more probability are not more often right; nothing can be fitted")


def _newton(rows: Floats, truth: Floats) -> Floats:
    weights = np.zeros(rows.shape[1])
    ridge = np.full(rows.shape[1], _RIDGE)
    ridge[0] = 0.0  # of the intercept
    for _ in range(_STEPS):
        estimates = (1 + np.tanh(rows @ weights / 2)) / 2
        slope = rows.T @ (estimates - truth) / len(truth) + ridge * weights
        spread = (rows.T * (estimates * (1 - estimates))) @ rows / len(truth) + np.diag(ridge)
        step = np.linalg.solve(spread, slope)
        weights = weights - step
        if np.abs(step).max() < _ENOUGH:
            break
    return weights


# ---------------------------------------------------------------- words


@dataclasses.dataclass(frozen=True)
class HeardWord:
    """A word of a transcript."""

    file: str
    half: str
    language: str  # of the reference; "" = unknown
    word: str
    probability: float
    avg_logprob: float  # of the segment
    confidence: float | None  # as the engine says, if it does
    right: bool


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """The fit, and the reliability of every figure."""

    fit: Confidence
    rows: tuple[Reliability, ...]


def judged(heard: Iterable[tuple[Clip, Transcript]], normalize: Normalize) -> Iterable[HeardWord]:
    """Yield the words of answers, and whether each is right; punctuation alone is no word.

    Clips without a half go to both halves in turn.
    """
    for number, (clip, answer) in enumerate(heard):
        heard_words = [
            (word, segment) for segment in answer.segments for word in segment.words or ()
        ]
        texts = [word.word for word, _ in heard_words]
        verdicts = right_words(clip.text, texts, clip.language, normalize)
        for (word, segment), right in zip(heard_words, verdicts, strict=True):
            if right is not None and segment.avg_logprob is not None:
                yield HeardWord(
                    file=clip.file,
                    half=clip.half or HALVES[number % 2],
                    language=clip.language or "",
                    word=word.word,
                    probability=word.probability,
                    avg_logprob=segment.avg_logprob,
                    confidence=word.confidence,
                    right=right,
                )


def right_words(
    reference: str, words: Sequence[str], language: str | None, normalize: Normalize
) -> list[bool | None]:
    """Tell which words match the aligned reference; None: the word is punctuation alone.

    Every word of either is normalised by itself; where a language has no spaces its characters are
    compared. A word that becomes several is right where all of them are.
    """

    def parts(word: str) -> list[str]:
        text = normalize(word, language)
        return list(text.replace(" ", "")) if language in SPACELESS else text.split()

    hypothesis = [(part, number) for number, word in enumerate(words) for part in parts(word)]
    reference_parts = [part for word in reference.split() for part in parts(word)]
    verdicts: list[bool | None] = [None] * len(words)
    for _, number in hypothesis:
        verdicts[number] = True
    hits = _hits(reference_parts, [part for part, _ in hypothesis])
    for place, (_, number) in enumerate(hypothesis):
        verdicts[number] = bool(verdicts[number]) and place in hits
    return verdicts


def _hits(reference: Sequence[str], hypothesis: Sequence[str]) -> set[int]:
    """Return the positions in a hypothesis that match the aligned reference."""
    if not reference or not hypothesis:
        return set()
    aligned = jiwer.process_words([" ".join(reference)], [" ".join(hypothesis)]).alignments[0]
    return {
        place
        for part in aligned
        if part.type == "equal"
        for place in range(part.hyp_start_idx, part.hyp_end_idx)
    }


def fitted(words: Sequence[HeardWord], source: str) -> Confidence:
    """Fit the confidence of words.

    Raises:
        EarshotError: as `fit_logistic`.
    """
    features = np.array([(log_odds(word.probability), word.avg_logprob) for word in words])
    weights = fit_logistic(features.reshape(-1, 2), [word.right for word in words])
    intercept, probability, avg_logprob = (round(weight, 4) for weight in weights)
    return Confidence(
        fit="logistic",
        intercept=intercept,
        probability=probability,
        avg_logprob=avg_logprob,
        source=source,
        clips=len({word.file for word in words}),
        words=len(words),
        languages=tuple(sorted({word.language for word in words if word.language})),
    )


def figures_of(words: dict[int, list[HeardWord]], source: str) -> CalibrationResult:
    """Fit to the words of one half, from all beams; judge by the other half.

    Args:
        words: the words of both halves, by beam.
        source: id of the checkpoint that heard them.

    Raises:
        EarshotError: as `fit_logistic`; or no word of the other half was heard.
    """
    chosen = [word for some in words.values() for word in some if word.half == "choose"]
    fit, rows = fitted(chosen, source), list[Reliability]()
    for beam, every in words.items():
        some = [word for word in every if word.half == "report"]
        if not some:
            raise EarshotError("no word of the half 'report' was heard; expected speech in it")
        figures = {"probability": [word.probability for word in some]}
        own = [word.confidence for word in some if word.confidence is not None]
        if len(own) == len(some):
            figures["confidence"] = own
        figures["fitted"] = [confidence_of(fit, w.probability, w.avg_logprob) for w in some]
        right = np.array([word.right for word in some])
        spoken = np.array([word.language for word in some])
        counts = collections.Counter(spoken.tolist())
        rows += [reliability(values, right, beam, name, EVERY) for name, values in figures.items()]
        for language in sorted(name for name in counts if name):
            if counts[language] >= _MIN_ROW_WORDS:
                own_words = spoken == language
                rows += [
                    reliability(np.array(values)[own_words], right[own_words], beam, name, language)
                    for name, values in figures.items()
                ]
    return CalibrationResult(fit, tuple(rows))


def checks_of(figures: CalibrationResult) -> tuple[Check, ...]:
    """Check the fit on the words of the other half; few words decide nothing."""
    whole = {(row.beam_size, row.figure): row for row in figures.rows if row.language == EVERY}
    checks = list[Check]()
    for beam in dict.fromkeys(beam for beam, _ in whole):
        after, before = whole[beam, "fitted"], whole[beam, "probability"]
        enough = after.words >= MIN_DECIDING
        near = f"with a beam of {beam} confidence is within {MAX_ECE} of the truth"
        detail = f"{before.ece:.3f} before, {after.ece:.3f} after"
        checks.append(Check(near, after.ece <= MAX_ECE if enough else None, detail))
        better = f"with a beam of {beam} confidence has a smaller Brier score than probability"
        detail = f"{before.brier:.4f} before, {after.brier:.4f} after"
        checks.append(Check(better, after.brier < before.brier if enough else None, detail))
    return tuple(checks)


def section_of(figures: CalibrationResult) -> ReportSection:
    """Return the fit, the figures, and the reliability by bins."""
    fit = figures.fit
    told = (
        f"fit: {fit.intercept:+.3f} {fit.probability:+.3f} log-odds of the probability "
        f"{fit.avg_logprob:+.3f} avg_logprob; {fit.words} words of {fit.clips} clips, "
        f"{', '.join(fit.languages)}"
    )
    header = ("beam, words, figure", "words", "right", "says", "ECE", "Brier", "AUROC")
    parts: list[Part] = [Text(told), Table(header, [_cells(row) for row in figures.rows])]
    for row in figures.rows:
        if row.language == EVERY and row.figure != "confidence":
            name = f"beam {row.beam_size}, {row.figure}"
            rows = [
                [f"{one.low:.2f} to {one.high:.2f}", str(one.words)]
                + [f"{share:.3f}" for share in (one.said, one.right)]
                for one in row.bins
            ]
            parts.append(Table((name, "words", "says", "are right"), rows, name.capitalize()))
    return ReportSection("Words", parts)


def _cells(row: Reliability) -> list[str]:
    return [
        f"{row.beam_size}, {row.language}, {row.figure}",
        str(row.words),
        *(f"{share:.3f}" for share in (row.right, row.said, row.ece)),
        f"{row.brier:.4f}",
        "" if row.auroc is None else f"{row.auroc:.3f}",
    ]
