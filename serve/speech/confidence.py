"""The confidence in words, by the fit that an engine's manifest holds."""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.manifest import Confidence
from serve.contract.messages import Segment, Word

_LEAST = 1e-3  # a probability is no nearer than this to 0 and to 1


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)) of a probability, which is kept from 0 and from 1."""
    inside = min(max(probability, _LEAST), 1 - _LEAST)
    return math.log(inside / (1 - inside))


def confidence_of(fit: Confidence, probability: float, avg_logprob: float) -> float:
    """Return how likely a word is right, from 0 to 1.

    Args:
        fit: the engine's.
        probability: of the word, as its answer tells it.
        avg_logprob: of its segment, likewise.
    """
    of_word = fit.probability * log_odds(probability)
    return (1 + math.tanh((fit.intercept + of_word + fit.avg_logprob * avg_logprob) / 2)) / 2


def with_confidence(
    segments: Sequence[Segment], fit: Confidence | None, low: float | None
) -> list[Segment]:
    """Give the words of segments their confidence; those below `low` are marked.

    Segments stay as they are without a fit, without words, and without `avg_logprob`.
    """
    return [_with_confidence(segment, fit, low) if fit else segment for segment in segments]


def _with_confidence(segment: Segment, fit: Confidence, low: float | None) -> Segment:
    words, avg_logprob = segment.words, segment.avg_logprob
    if words is None or avg_logprob is None:
        return segment
    judged = tuple(_judged(word, avg_logprob, fit, low) for word in words)
    return dataclasses.replace(segment, words=judged)


def _judged(word: Word, avg_logprob: float, fit: Confidence, low: float | None) -> Word:
    confidence = round(confidence_of(fit, word.probability, avg_logprob), 4)
    marked = True if low is not None and confidence < low else None
    return dataclasses.replace(word, confidence=confidence, low_confidence=marked)
