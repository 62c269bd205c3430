"""Compute the confidence of words with the calibration in an engine's manifest."""

import dataclasses
import math
from collections.abc import Sequence

from serve.contract.manifest import Confidence
from serve.contract.messages import Segment, Word

_LEAST = 1e-3  # probabilities are clipped to [_LEAST, 1 - _LEAST]


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)) of a probability, clipped away from 0 and 1."""
    inside = min(max(probability, _LEAST), 1 - _LEAST)
    return math.log(inside / (1 - inside))


def confidence_of(fit: Confidence, probability: float, avg_logprob: float) -> float:
    """Return the probability, from 0 to 1, that a word is correct.

    Args:
        fit: the engine's calibration.
        probability: the word's probability, as in the answer.
        avg_logprob: the segment's average log-probability.
    """
    of_word = fit.probability * log_odds(probability)
    return (1 + math.tanh((fit.intercept + of_word + fit.avg_logprob * avg_logprob) / 2)) / 2


def with_confidence(
    segments: Sequence[Segment], fit: Confidence | None, low: float | None
) -> list[Segment]:
    """Return segments with the words' confidence; words below `low` are marked.

    Without a calibration, words or `avg_logprob`, segments are returned unchanged.
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
