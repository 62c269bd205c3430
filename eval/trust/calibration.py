"""Calibration: how often words are right of which a figure says how likely that is, and its fit.

A word is right where jiwer's alignment finds it in the reference. A logistic of its `probability`
and its segment's `avg_logprob` is fitted to the words of one half of the clips, `choose`. All
figures are of the other half, `report`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import jiwer
import numpy as np
import numpy.typing as npt

from build.clips import Clip
from eval.accuracy.normalize import Normalize
from eval.record import Check, Part, Section, Table, Text
from serve.contract.engine import Confidence
from serve.contract.errors import EarshotError
from serve.contract.messages import Transcript
from serve.speech.confidence import confidence_of, log_odds
from serve.speech.word_parts import SPACELESS

HALVES = ("choose", "report")
EVERY = "all"
MOST_ECE = 0.05  # of words that were not fitted to
DECIDING = 1_000  # words; of fewer the measures are a matter of chance
_FEWEST = 50  # words of a language that has a row


BINS = 15
LEAST_WORDS = 30  # right ones, and wrong ones, that a fit needs of each
_RIDGE = 1e-3  # keeps weights finite where words could be told apart without error
_STEPS = 100
_ENOUGH = 1e-9  # a step that is no longer ends the fit

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Bin:
    """Words of which a figure says much the same."""

    low: float
    high: float
    words: int
    said: float  # mean of the figure
    right: float  # share of the words


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The reliability of a figure over some words."""

    words: int
    right: float  # share
    said: float  # mean of the figure
    ece: float  # expected calibration error, bins of equal width
    adaptive_ece: float  # the same, bins of equally many words
    brier: float  # mean squared distance from 1 where a word is right, and from 0 where it is not
    auroc: float | None  # how often a right word has more than a wrong one; None: all are alike


def reliability(values: Sequence[float], right: Sequence[bool]) -> Reliability:
    """Hold a figure of words, at least one, against whether they are right."""
    figures, truth = np.asarray(values, np.float64), np.asarray(right, np.float64)
    ranked = np.array_split(np.argsort(figures, kind="stable"), BINS)
    return Reliability(
        words=len(truth),
        right=float(truth.mean()),
        said=float(figures.mean()),
        ece=_gap(figures, truth, [places for _, places in _equal_bins(figures)]),
        adaptive_ece=_gap(figures, truth, [places for places in ranked if places.size]),
        brier=float(np.mean((figures - truth) ** 2)),
        auroc=_auroc(figures, truth > 0),
    )


def bins(values: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    """Return the bins of equal width that hold a word, lowest first."""
    figures, truth = np.asarray(values, np.float64), np.asarray(right, np.float64)
    return [
        Bin(
            low=number / BINS,
            high=(number + 1) / BINS,
            words=places.size,
            said=float(figures[places].mean()),
            right=float(truth[places].mean()),
        )
        for number, places in _equal_bins(figures)
    ]


def _equal_bins(figures: Floats) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield number and places of each bin of equal width that is not empty."""
    numbers = np.minimum((figures * BINS).astype(np.int64), BINS - 1)
    for number in np.unique(numbers):
        yield int(number), np.flatnonzero(numbers == number)


def _gap(figures: Floats, truth: Floats, parts: Sequence[npt.NDArray[np.int64]]) -> float:
    """Return the mean over words of how far their bin's figure is from its share of right ones."""
    gaps = [abs(figures[places].mean() - truth[places].mean()) * places.size for places in parts]
    return float(sum(gaps) / len(truth))


def _auroc(figures: Floats, right: npt.NDArray[np.bool_]) -> float | None:
    _, place, counts = np.unique(figures, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal ones share theirs
    positive, negative = int(right.sum()), int((~right).sum())
    if not positive or not negative:
        return None
    beaten = ranks[right].sum() - positive * (positive + 1) / 2
    return float(beaten / (positive * negative))


def fit_logistic(features: Floats, right: Sequence[bool]) -> list[float]:
    """Fit the logistic by which words are likeliest as right and wrong as they are.

    It rises with every feature: one that would have it fall counts for nothing.

    Args:
        features: float64 (words, k), the most telling first.
        right: of each word.

    Returns:
        The intercept, and a weight of each feature, none below 0.

    Raises:
        EarshotError: too few words are right or wrong, or the first feature tells nothing.
    """
    truth = np.asarray(right, np.float64)
    of_each = int(truth.sum()), int((1 - truth).sum())
    if min(of_each) < LEAST_WORDS:
        raise EarshotError(
            f"{of_each[0]} words are right and {of_each[1]} wrong; expected at least {LEAST_WORDS} "
            "of each: let more speech be heard"
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
    """A word that was heard."""

    file: str
    half: str
    language: str  # of the reference; "" = unknown
    word: str
    probability: float
    avg_logprob: float  # of its segment
    confidence: float | None  # as the engine says, if it does
    right: bool


@dataclasses.dataclass(frozen=True)
class CalibrationRow:
    """One figure of the words of a language, or of all."""

    beam_size: int
    figure: str
    language: str
    reliability: Reliability


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """All that was found."""

    fit: Confidence
    rows: tuple[CalibrationRow, ...]
    bins: dict[str, dict[str, list[Bin]]]  # by beam, and by figure


def judged(heard: Iterable[tuple[Clip, Transcript]], normalize: Normalize) -> Iterable[HeardWord]:
    """Yield the words of answers, and whether each is right; what is but marks is no word.

    Clips that are of no half are of both in turn.
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
    """Tell which words stand in a reference where they were heard; None: there is nothing in it.

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
    """Return the places of a hypothesis that stand where they were said."""
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
    """Fit how likely words are right to some.

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
    """Fit to the words of one half that were heard by any beam, and judge by the other.

    Args:
        words: of both halves, by beam.
        source: id of the checkpoint that heard them.

    Raises:
        EarshotError: as `fit_logistic`; or no word of the other half was heard.
    """
    chosen = [word for some in words.values() for word in some if word.half == "choose"]
    fit = fitted(chosen, source)
    fits = {"fitted": fit}
    most, _ = collections.Counter(word.language for word in chosen).most_common(1)[0]
    if len(fit.languages) > 1:
        alone = [word for word in chosen if word.language == most]
        fits[f"fitted to {most or 'unknown'}"] = fitted(alone, source)
    rows, by_bin = list[CalibrationRow](), dict[str, dict[str, list[Bin]]]()
    for beam, every in words.items():
        some = [word for word in every if word.half == "report"]
        if not some:
            raise EarshotError("no word of the half 'report' was heard; expected speech in it")
        figures = _figures(some, fits)
        rows += _rows(beam, some, figures)
        right = [word.right for word in some]
        by_bin[str(beam)] = {name: bins(values, right) for name, values in figures.items()}
    return CalibrationResult(fit, tuple(rows), by_bin)


def _figures(words: Sequence[HeardWord], fits: dict[str, Confidence]) -> dict[str, list[float]]:
    """Return each figure of all words, by its name."""
    figures = {"probability": [word.probability for word in words]}
    own = [word.confidence for word in words if word.confidence is not None]
    if len(own) == len(words):
        figures["confidence"] = own
    for name, fit in fits.items():
        figures[name] = [confidence_of(fit, word.probability, word.avg_logprob) for word in words]
    return figures


def _rows(
    beam: int, words: Sequence[HeardWord], figures: dict[str, list[float]]
) -> list[CalibrationRow]:
    counts = collections.Counter(word.language for word in words)
    languages = [name for name in sorted(counts) if name and counts[name] >= _FEWEST]
    rows = list[CalibrationRow]()
    for language in [EVERY, *languages]:
        places = [i for i, word in enumerate(words) if language in (EVERY, word.language)]
        right = [words[i].right for i in places]
        rows += [
            CalibrationRow(beam, name, language, reliability([values[i] for i in places], right))
            for name, values in figures.items()
        ]
    return rows


def checks_of(figures: CalibrationResult) -> tuple[Check, ...]:
    """Check what must hold of all words that were not fitted to; few decide nothing."""
    whole = {(row.beam_size, row.figure): row for row in figures.rows if row.language == EVERY}
    checks = list[Check]()
    for beam in dict.fromkeys(beam for beam, _ in whole):
        after = whole[beam, "fitted"].reliability
        before = whole[beam, "probability"].reliability
        detail = f"{before.ece:.3f} before, {after.ece:.3f} after"
        near = f"with a beam of {beam} confidence is within {MOST_ECE} of the truth"
        enough = after.words >= DECIDING
        checks.append(Check(near, after.ece <= MOST_ECE if enough else None, detail))
        better = f"with a beam of {beam} confidence has a smaller Brier score than probability"
        detail = f"{before.brier:.4f} before, {after.brier:.4f} after"
        checks.append(Check(better, after.brier < before.brier if enough else None, detail))
    return tuple(checks)


def section_of(figures: CalibrationResult) -> Section:
    """Return the fit, the figures, and how many words are right of those that say as much."""
    parts: list[Part] = [Text(f"fit: {_fit(figures.fit)}")]
    parts.append(Table(_HEADER, [_cells(row) for row in figures.rows]))
    for beam, by_figure in figures.bins.items():
        for name in ("probability", "fitted"):
            rows = [
                [f"{group.low:.2f} to {group.high:.2f}", str(group.words)]
                + [f"{share:.3f}" for share in (group.said, group.right)]
                for group in by_figure[name]
            ]
            header = [f"beam {beam}, {name}", "words", "says", "are right"]
            parts.append(Table(header, rows, f"Beam {beam}, {name}"))
    return Section("Words", parts)


def _fit(fit: Confidence) -> str:
    return (
        f"{fit.intercept:+.3f} {fit.probability:+.3f} log-odds of the probability "
        f"{fit.avg_logprob:+.3f} avg_logprob; {fit.words} words of {fit.clips} clips, "
        f"{', '.join(fit.languages)}"
    )


_HEADER = ("beam, words, figure", "words", "right", "says", "ECE", "adaptive", "Brier", "AUROC")


def _cells(row: CalibrationRow) -> list[str]:
    figures = row.reliability
    shares = (figures.right, figures.said, figures.ece, figures.adaptive_ece)
    return [
        f"{row.beam_size}, {row.language}, {row.figure}",
        str(figures.words),
        *(f"{share:.3f}" for share in shares),
        f"{figures.brier:.4f}",
        "" if figures.auroc is None else f"{figures.auroc:.3f}",
    ]
