"""What a window's text leaves untold, and the windows that are decoded for it."""

import numpy as np
import pytest

from serve.speech.features import SAMPLE_RATE
from serve.speech.windows import (
    AudioWindow,
    Pause,
    WindowSegment,
    find_uncovered,
    is_sparse,
    sub_window,
    uncovered_s,
)

NOISE = np.random.default_rng(0).standard_normal(30 * SAMPLE_RATE).astype(np.float32)


def window(seconds, *voice, **rest):
    samples = NOISE[: round(seconds * SAMPLE_RATE)].copy()
    return AudioWindow(100.0, samples, last=True, voice=voice, **rest)


def piece(start_s, end_s, tokens=30):
    return WindowSegment(start_s, end_s, tuple(range(tokens)))


def starts(windows):
    return [pytest.approx(one.start_s, abs=0.06) for one in windows]


def test_a_window_that_is_told_is_done():
    whole = window(28, (0.1, 9.9), (10.5, 27.3))
    assert find_uncovered(whole, [piece(0, 10), piece(10, 27.0)]) == (2, [])
    assert uncovered_s(whole, [piece(0, 10), piece(10, 27.0)]) == pytest.approx(0.1)


def test_where_nobody_listened_nothing_is_known_to_be_untold():
    silent = AudioWindow(0.0, NOISE, voice=None)
    assert (
        find_uncovered(silent, [piece(0, 2)]) == (1, []) and uncovered_s(silent, [piece(0, 2)]) == 0
    )


def test_voice_behind_the_last_timestamp_is_decoded_from_there():
    whole = window(28, (0.1, 24.0), (25.0, 27.5))
    kept, (rest,) = find_uncovered(whole, [piece(0, 12), piece(12, 24.2)])
    assert kept == 2 and [rest.start_s] == starts([AudioWindow(124.8, NOISE)])
    assert not rest.last and rest.duration_s == pytest.approx(3.2)
    assert rest.voice == (pytest.approx((0.2, 2.7)),)


def test_a_rest_begins_between_two_words_where_the_voice_goes_on():
    whole = window(28, (0.1, 27.5))
    quiet = round(20.1 * SAMPLE_RATE)
    whole.samples[quiet - 800 : quiet + 800] *= 0.01
    kept, (rest,) = find_uncovered(whole, [piece(0, 10), piece(10, 20)])
    assert kept == 2 and rest.start_s == pytest.approx(120.1, abs=0.06)


@pytest.mark.parametrize("end_s", [0.0, 0.02, 0.1, 0.18])
def test_a_rest_begins_in_the_window_where_its_text_ends_at_once(end_s):
    kept, (rest,) = find_uncovered(window(28, (0.1, 27.5)), [piece(0, end_s)])
    assert kept == 1 and 100.0 < rest.start_s < 100.4


def test_a_gap_in_the_middle_drops_what_comes_after_it():
    whole = window(28, (0, 27.5))
    kept, (rest,) = find_uncovered(whole, [piece(0, 10), piece(13, 20), piece(20, 27.5)])
    assert kept == 1 and rest.start_s == pytest.approx(110, abs=0.25)


@pytest.mark.parametrize(("voice_s", "windows"), [(0.5, 0), (0.9, 1)])
def test_a_word_s_end_is_no_gap(voice_s, windows):
    whole = window(28, (0, 20), (20, 20 + voice_s))
    assert len(find_uncovered(whole, [piece(0, 20, 90)])[1]) == windows


def test_a_piece_that_says_too_little_is_decoded_in_two():
    whole = window(28, (0, 27.5))
    quiet = 15 * SAMPLE_RATE
    whole.samples[quiet - 800 : quiet + 800] *= 0.01
    kept, halves = find_uncovered(whole, [piece(0, 5), piece(5, 25, 9), piece(25, 27.5)])
    assert kept == 1 and [one.start_s for one in halves] == starts(
        [AudioWindow(105.0, NOISE), AudioWindow(115.0, NOISE)]
    )
    assert sum(len(one.samples) for one in halves) == 23 * SAMPLE_RATE
    assert not is_sparse(window(28, (0, 4.9)), piece(0, 28, 1)), "a laugh"
    assert not is_sparse(whole, piece(0, 28, 28)), "a slow speaker"


def test_a_part_keeps_what_was_cut_out_of_it():
    pauses = (Pause(5.0, 2.0), Pause(12.0, 3.0), Pause(20.0, 1.0))
    whole = window(28, (0, 4), (11, 27), pauses=pauses, margin_s=0.4, left_out_s=6.0)
    some = sub_window(whole, 10 * SAMPLE_RATE, 18 * SAMPLE_RATE)
    assert (some.start_s, some.pauses) == (112.0, (Pause(2.0, 3.0),))
    assert (some.voice, some.left_out_s) == (((1.0, 8.0),), 0.0)
    for time_s in (0.5, 1.9, 3.0, 7.0):  # are where they were
        assert some.timeline.start(time_s) == pytest.approx(whole.timeline.start(10 + time_s))
