"""Which segments are hallucinations: by their words, and by the silence around them.

How likely words are right: the logistic, and the marks of those that are doubtful.
"""

import dataclasses
import math

import pytest

from serve.contract.messages import Segment, Word
from serve.speech.judging import (
    confidence_of,
    is_anomalous,
    with_confidence,
    without_hallucinations,
)
from serve.speech.windows import Attempt, DecodedWindow, Pause, WindowTimeline
from tests.fakes import CONFIDENCE

LIKELY, UNLIKELY = 0.9, 0.1


def segment(start_s, *words):
    """Words of (duration, probability), one behind the other; a third entry is a word's text."""
    said, at = [], start_s
    for duration_s, probability, *text in words:
        said.append(Word(at, at + duration_s, *(text or [" word"]), probability))
        at += duration_s
    return Segment(start_s, at, "words", (1,), None, None, 0.0, 1.0, tuple(said))


def plain(start_s):
    return segment(start_s, (0.4, LIKELY), (0.6, LIKELY))


def odd(start_s):
    return segment(start_s, (0.4, UNLIKELY), (0.6, UNLIKELY))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(0.4, UNLIKELY)], True),
        ([(0.4, UNLIKELY), (0.4, LIKELY)], False),
        ([(0.066, LIKELY)] * 2, True),  # 1.005 each
        ([(0.068, LIKELY)] * 2, False),  # 0.975 each
        ([(3.0, LIKELY)], True),
        ([(0.4, UNLIKELY)] * 3 + [(0.4, LIKELY)] * 9, True),
        ([(0.4, LIKELY)] * 8 + [(0.4, UNLIKELY)] * 9, False),  # too late
        ([(0.4, UNLIKELY), (0.4, LIKELY, ".")], True),  # punctuation does not count
        ([(0.4, LIKELY, "...")], False),  # is none
    ],
)
def test_words_are_odd_that_are_unlikely_or_too_short_or_long(words, expected):
    assert is_anomalous(segment(1.0, *words)) == expected


def window(duration_s=30.0, timeline=None):
    attempt = Attempt((), None, None, 0.0, 1.0)
    return DecodedWindow(timeline or WindowTimeline(60.0), duration_s, attempt, ())


@pytest.mark.parametrize(
    ("segments", "left_out"),
    [
        ([plain(61.0), odd(70.0), plain(80.0)], [1]),  # silence on both sides
        ([plain(61.0), odd(70.0), plain(72.0)], []),  # none behind
        ([odd(61.5), plain(80.0)], [0]),  # the window's beginning
        ([odd(62.5), plain(80.0)], [0]),  # silence since the window before
        ([plain(85.0), odd(88.1)], [1]),  # the window's end
        ([plain(61.0), odd(66.0), odd(68.0), odd(70.0), plain(72.0)], [1, 2]),
    ],
)
def test_odd_segments_need_silence_on_both_sides_or_odd_ones_behind_them(segments, left_out):
    kept = without_hallucinations(segments, window(), 60.0, threshold_s=2.0)
    assert [i for i, one in enumerate(segments) if one not in kept] == left_out


def test_the_end_of_a_short_window_is_no_silence_but_what_is_left_of_it_may_be():
    for end_s, kept in ((3.0, [odd(1.5)]), (4.5, [])):
        found = without_hallucinations([odd(1.5)], window(end_s, WindowTimeline(0.0)), 0.0, 1.9)
        assert found == kept


def test_a_pause_that_was_cut_out_is_silence():
    segments = [plain(61.0), odd(73.0)]
    cut = WindowTimeline(60.0, [Pause(5.0, 5.0), Pause(13.0, 9.0)])
    assert without_hallucinations(segments, window(14.5, cut), 60.0, 2.0) == segments[:1]
    assert without_hallucinations(segments, window(14.5), 60.0, 2.0) == segments


def test_what_was_said_last_is_what_was_kept():
    """The second has only what was left out close before it."""
    segments = [odd(61.0), odd(63.0), plain(80.0)]
    assert without_hallucinations(segments, window(), 60.0, 2.0) == segments[2:]


def test_segments_without_words_stay():
    silent = Segment(61.0, 62.0, "…", (), None, None, 0.0, 1.0, ())
    assert without_hallucinations([silent], window(), 0.0, 2.0) == [silent]


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
