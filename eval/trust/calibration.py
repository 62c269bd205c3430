"""Fit the confidence of words, and measure whether words are right as often as it says.

A word is right where jiwer's alignment finds it in the reference. A logistic of its `probability`
and its segment's `avg_logprob` is fitted to the words of one half of the clips, `choose`. All
figures are of the other half, `report`.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jiwer
import numpy as np
import numpy.typing as npt

from build.clips import Clip
from eval.record import Check, ReportSection, Table, Text
from serve.contract.errors import EarshotError
from serve.contract.manifest import Confidence
from serve.contract.messages import Transcript
from serve.speech.judging import confidence_of, log_odds
from serve.speech.text import normalize_text
from serve.speech.words import SPACELESS

HALVES = ("choose", "report")
MAX_ECE = 0.05  # of words that were not fitted to
MIN_DECIDING = 1_000  # words; with fewer the measures are a matter of chance
BINS = 15
MIN_FIT_WORDS = 30  # the fewest right words, and wrong words, for a fit
_RIDGE = 1e-3  # keeps weights finite where words could be separated without error
_MAX_STEPS = 100
_MIN_STEP = 1e-9  # the fit ends at a smaller step

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The reliability of a figure over the words of one search."""

    beam_size: int
    figure: str
    words: int
    right: float  # share
    said: float  # mean of the figure
    ece: float  # expected calibration error, `BINS` bins of equal width
    brier: float  # mean squared distance from 1 where a word is right, and from 0 where it is not
    auroc: float | None  # P(figure of a right word > that of a wrong one); None: one kind


def reliability(
    figures: Floats, right: npt.NDArray[np.bool_], beam_size: int = 0, figure: str = ""
) -> Reliability:
    """Compare a figure of words, 0 to 1, at least one, with whether they are right."""
    bins = np.minimum((figures * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, figures - right)  # summed by bin
    auroc, wrong = None, np.sort(figures[~right])
    if 0 < len(wrong) < len(right):
        # Ties count half.
        sides = [np.searchsorted(wrong, figures[right], side) for side in ("left", "right")]
        auroc = float(np.mean(sides) / len(wrong))
    return Reliability(
        beam_size=beam_size,
        figure=figure,
        words=len(right),
        right=float(right.mean()),
        said=float(figures.mean()),
        ece=float(np.abs(gaps).sum() / len(right)),
        brier=float(np.mean((figures - right) ** 2)),
        auroc=auroc,
    )


# ---------------------------------------------------------------- words


@dataclasses.dataclass(frozen=True)
class HeardWord:
    """A word of a transcript."""

    file: str
    half: str
    language: str  # of the reference; "" = unknown
    probability: float
    avg_logprob: float  # of the segment
    confidence: float | None  # of the engine, if it has a fit
    right: bool


def judge_words(
    clips: Sequence[Clip], answers: Sequence[Transcript | EarshotError]
) -> list[HeardWord]:
    """Return the words of answers, and whether each is right; punctuation alone is no word.

    Clips without a half go to both halves in turn.
    """
    judged = list[HeardWord]()
    for number, (clip, answer) in enumerate(zip(clips, answers, strict=True)):
        if isinstance(answer, EarshotError):
            continue
        words = [(word, segment) for segment in answer.segments for word in segment.words or ()]
        verdicts = right_words(clip.text, [word.word for word, _ in words], clip.language)
        judged += [
            HeardWord(
                file=clip.file,
                half=clip.half or HALVES[number % 2],
                language=clip.language or "",
                probability=word.probability,
                avg_logprob=segment.avg_logprob,
                confidence=word.confidence,
                right=right,
            )
            for (word, segment), right in zip(words, verdicts, strict=True)
            if right is not None and segment.avg_logprob is not None
        ]
    return judged


def right_words(reference: str, words: Sequence[str], language: str | None) -> list[bool | None]:
    """Tell which words match the aligned reference; None: the word is punctuation alone.

    Every word of either is normalised by itself; where a language has no spaces its characters are
    compared. A word that becomes several is right where all of them are.
    """

    def parts(word: str) -> list[str]:
        text = normalize_text(word)
        return list(text.replace(" ", "")) if language in SPACELESS else text.split()

    spoken = [part for word in reference.split() for part in parts(word)]
    word_parts = [parts(word) for word in words]
    text = " ".join(itertools.chain(*word_parts))
    matched = {
        index
        for chunk in jiwer.process_words([" ".join(spoken)], [text]).alignments[0]
        if chunk.type == "equal"
        for index in range(chunk.hyp_start_idx, chunk.hyp_end_idx)
    }
    indices = itertools.count()
    return [all([next(indices) in matched for _ in own]) if own else None for own in word_parts]


# ---------------------------------------------------------------- fit


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """The fit, and the reliability of every figure."""

    fit: Confidence
    rows: tuple[Reliability, ...]


def fit_confidence(words: Sequence[HeardWord], source: str) -> Confidence:
    """Fit a logistic regression to words by maximum likelihood.

    Weights are not negative: without a positive weight of avg_logprob, probability counts alone.

    Raises:
        EarshotError: too few words are right or wrong, or right words have no higher probability.
    """
    right = np.array([word.right for word in words], np.float64)
    right_count, wrong_count = int(right.sum()), int((1 - right).sum())
    if min(right_count, wrong_count) < MIN_FIT_WORDS:
        raise EarshotError(
            f"{right_count} words are right and {wrong_count} wrong; expected at least "
            f"{MIN_FIT_WORDS} of each: add clips with speech"
        )
    rows = np.array([(1.0, log_odds(word.probability), word.avg_logprob) for word in words])
    weights = _newton(rows, right)
    if min(weights[1:]) < 0:
        weights = np.append(_newton(rows[:, :2], right), 0.0)
    if weights[1] < 0:
        raise EarshotError(
            "words of more probability are not more often right; nothing can be fitted"
        )
    intercept, probability, avg_logprob = (round(float(weight), 4) for weight in weights)
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


def _newton(rows: Floats, truth: Floats) -> Floats:
    weights = np.zeros(rows.shape[1])
    ridge = np.full(rows.shape[1], _RIDGE)
    ridge[0] = 0.0  # of the intercept
    for _ in range(_MAX_STEPS):
        estimates = (1 + np.tanh(rows @ weights / 2)) / 2
        slope = rows.T @ (estimates - truth) / len(truth) + ridge * weights
        spread = (rows.T * (estimates * (1 - estimates))) @ rows / len(truth) + np.diag(ridge)
        step = np.linalg.solve(spread, slope)
        weights = weights - step
        if np.abs(step).max() < _MIN_STEP:
            break
    return weights


def figures_of(words: dict[int, list[HeardWord]], source: str) -> CalibrationResult:
    """Fit to the words of one half, from all beams; judge by the other half.

    Args:
        words: the words of both halves, by beam.
        source: id of the checkpoint that transcribed them.

    Raises:
        EarshotError: as `fit_confidence`; or the other half has no word.
    """
    chosen = [word for some in words.values() for word in some if word.half == "choose"]
    fit, rows = fit_confidence(chosen, source), list[Reliability]()
    for beam, beam_words in words.items():
        reported = [word for word in beam_words if word.half == "report"]
        if not reported:
            raise EarshotError("the half 'report' has no word; expected clips with speech in it")
        right = np.array([word.right for word in reported])
        figures: dict[str, list[float | None]] = {
            "probability": [word.probability for word in reported],
            "confidence": [word.confidence for word in reported],
            "fitted": [confidence_of(fit, w.probability, w.avg_logprob) for w in reported],
        }
        if None in figures["confidence"]:
            del figures["confidence"]
        for name, values in figures.items():
            rows.append(reliability(np.array(values, np.float64), right, beam, name))
    return CalibrationResult(fit, tuple(rows))


def checks_of(figures: CalibrationResult) -> tuple[Check, ...]:
    """Check the fit on the words of the other half; few words decide nothing."""
    checks = list[Check]()
    rows = {(row.beam_size, row.figure): row for row in figures.rows}
    for beam in dict.fromkeys(row.beam_size for row in figures.rows):
        before, after = rows[beam, "probability"], rows[beam, "fitted"]
        enough = after.words >= MIN_DECIDING
        near = f"with a beam of {beam} confidence is within {MAX_ECE} of the truth"
        better = f"with a beam of {beam} confidence has a smaller Brier score than probability"
        calibrated, sharper = after.ece <= MAX_ECE, after.brier < before.brier
        eces = f"{before.ece:.3f} before, {after.ece:.3f} after"
        briers = f"{before.brier:.4f} before, {after.brier:.4f} after"
        checks.append(Check(near, calibrated if enough else None, eces))
        checks.append(Check(better, sharper if enough else None, briers))
    return tuple(checks)


def section_of(figures: CalibrationResult) -> ReportSection:
    """Return the fit and the figures."""
    fit = figures.fit
    summary = (
        f"fit: {fit.intercept:+.3f} {fit.probability:+.3f} log-odds of the probability "
        f"{fit.avg_logprob:+.3f} avg_logprob; {fit.words} words of {fit.clips} clips, "
        f"{', '.join(fit.languages)}"
    )
    header = ("beam, figure", "words", "right", "says", "ECE", "Brier", "AUROC")
    rows = list[list[str]]()
    for row in figures.rows:
        measures = [f"{share:.3f}" for share in (row.right, row.said, row.ece)]
        auroc = "" if row.auroc is None else f"{row.auroc:.3f}"
        name = f"{row.beam_size}, {row.figure}"
        rows.append([name, str(row.words), *measures, f"{row.brier:.4f}", auroc])
    return ReportSection("Words", [Text(summary), Table(header, rows)])
