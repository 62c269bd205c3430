"""Times are found again after pauses were cut out."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.messages import Segment, Word
from serve.speech.windows import Pause, WindowTimeline

FIXED = settings(max_examples=50, derandomize=True, deadline=None, database=None)
SEGMENT = Segment(0.0, 1.0, " a", (1,), None, None, 0.0, 1.0)


@st.composite
def timelines(draw):
    places = sorted(draw(st.lists(st.floats(0.0, 30.0), max_size=6, unique=True)))
    pauses = tuple(Pause(at, draw(st.floats(0.01, 1000.0))) for at in places)
    return WindowTimeline(
        draw(st.floats(0.0, 3600.0)), pauses, draw(st.sampled_from([0.0, 0.4, 2.0]))
    )


TIMES = st.lists(st.floats(0.0, 30.0), min_size=2, max_size=8).map(sorted)


@FIXED
@given(timelines(), TIMES)
def test_what_comes_later_never_begins_before_the_end_of_what_was_before(timeline, times):
    segments = [
        dataclasses.replace(SEGMENT, start=timeline.start_s + a, end=timeline.start_s + b)
        for a, b in itertools.pairwise(times)
    ]
    found = [time for s in timeline.restore(segments) for time in (s.start, s.end)]
    assert all(a <= b + 2e-3 for a, b in itertools.pairwise(found))


@FIXED
@given(timelines(), TIMES)
def test_words_keep_their_order_and_never_last_longer(timeline, times):
    pairs = list(itertools.pairwise(times))
    words = [timeline.word(a, b) for a, b in pairs]
    flat = [time for word in words for time in word]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(flat))
    for (a, b), (start, end) in zip(pairs, words, strict=True):
        assert end - start <= b - a + 1e-6


TALK = WindowTimeline(100.0, (Pause(5.0, 60.0), Pause(10.0, 7.0)), 0.4)


@pytest.mark.parametrize(
    ("time_s", "start", "end"),
    [
        (4.5, 104.5, 104.5),
        (4.7, 165.0, 104.7),  # no speech from here on, so what begins does so after the pause
        (5.0, 165.0, 105.0),
        (5.3, 165.3, 105.0),
    ],
)
def test_margins_belong_to_the_pause(time_s, start, end):
    assert TALK.start(time_s) == pytest.approx(start)
    assert TALK.end(time_s) == pytest.approx(end)


def test_a_word_across_a_pause_is_on_the_side_of_its_middle():
    assert TALK.word(4.6, 5.2) == pytest.approx((104.6, 105.0))
    assert TALK.word(4.9, 5.6) == pytest.approx((165.0, 165.6))


def test_segments_begin_and_end_with_their_words():
    words = (Word(104.0, 104.65, " b", 0.5), Word(104.9, 105.6, " c", 0.5))
    segment = dataclasses.replace(SEGMENT, start=104.0, end=105.6, words=words)
    (found,) = TALK.restore([segment])
    assert [(w.start, w.end) for w in found.words] == [(104.0, 104.65), (165.0, 165.6)]
    assert (found.start, found.end) == (104.0, 165.6)
