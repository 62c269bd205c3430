"""How likely words are right: the logistic, and the marks of those that are doubtful."""

import dataclasses
import math

import pytest

from serve.contract.messages import Segment, Word
from serve.speech.judging import confidence_of, with_confidence
from tests.fakes import CONFIDENCE

SEGMENT = Segment(0.0, 1.0, " so it is", (1, 2, 3), -0.5, 0.0, 0.0, 1.0)
SAID = dataclasses.replace(SEGMENT, words=(Word(0.0, 0.5, " so", 0.9), Word(0.5, 1.0, " it", 0.1)))


def test_confidence_is_the_logistic_of_what_the_answer_tells():
    z = 1.0 + 0.5 * math.log(0.9 / 0.1) + 2.0 * -0.5
    assert confidence_of(CONFIDENCE, 0.9, -0.5) == pytest.approx(1 / (1 + math.exp(-z)))


def test_it_rises_with_both_and_stays_within_0_and_1():
    figures = [confidence_of(CONFIDENCE, p, -0.5) for p in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert figures == sorted(set(figures))
    figures = [confidence_of(CONFIDENCE, 0.5, mean) for mean in (-1e9, -2.0, -0.5, 0.0)]
    assert figures == sorted(set(figures)) and figures[0] == 0.0 and figures[-1] < 1.0


def test_words_below_the_threshold_are_marked():
    (told,) = with_confidence([SAID], CONFIDENCE, 0.5)
    sure, doubtful = told.words
    assert sure == Word(0.0, 0.5, " so", 0.9, confidence=0.75)
    assert doubtful == Word(0.5, 1.0, " it", 0.1, confidence=0.25, low_confidence=True)
    (unmarked,) = with_confidence([SAID], CONFIDENCE, None)
    assert [word.low_confidence for word in unmarked.words] == [None, None]


def test_segments_of_which_nothing_can_be_said_stay_as_they_are():
    unknown = dataclasses.replace(SAID, avg_logprob=None)
    assert with_confidence([SEGMENT, unknown], CONFIDENCE, 0.5) == [SEGMENT, unknown]
    assert with_confidence([SAID], None, None) == [SAID]
