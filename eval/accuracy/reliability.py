"""The reliability of figures that claim how likely words are right, and a fit of such a figure.

Of words that were heard it is known which are right. Where those of which a figure says 0.8 are
right in 80 of 100, the figure is calibrated.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from serve.contract.errors import EarshotError

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
