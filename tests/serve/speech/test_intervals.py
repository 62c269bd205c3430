"""Stretches of a recording: nothing else is decoded, none meets another, times are the whole's."""

import math

import numpy as np
import pytest

from serve.speech.cutting import cut, cut_stretches
from serve.speech.features import SAMPLE_RATE

WHOLE_S = 100
# Each sample is its own place in the recording, so that windows tell where they are from.
RAMP = np.arange(WHOLE_S * SAMPLE_RATE, dtype=np.float32)


def in_blocks(samples, size):
    return (samples[i : i + size] for i in range(0, len(samples), size))


def windows_of(stretches, samples=RAMP, size=65_537):
    return list(cut_stretches(in_blocks(samples, size), stretches, cut))


@pytest.mark.parametrize("size", [1_000, 65_537, 10**7])
def test_each_stretch_is_cut_by_itself_and_keeps_its_place(size):
    stretches = [(0.0, 2.5), (2.5, 3.0), (10.0, 75.00003), (90.0, math.inf)]
    windows = windows_of(stretches, size=size)
    found = []
    for start_s, end_s in stretches:
        mine = [w for w in windows if start_s <= w.start_s < end_s]
        samples = np.concatenate([window.samples for window in mine])
        end = WHOLE_S * SAMPLE_RATE if math.isinf(end_s) else round(end_s * SAMPLE_RATE)
        assert np.array_equal(samples, RAMP[round(start_s * SAMPLE_RATE) : end])
        assert [w.start_s * SAMPLE_RATE for w in mine] == [w.samples[0] for w in mine]
        found.append(len(mine))
    assert found[0] == found[1] == found[3] == 1 and found[2] >= 3
    assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
    assert sum(w.duration_s + w.left_out_s for w in windows) == WHOLE_S


def test_what_follows_the_last_stretch_is_not_asked_for():
    blocks = in_blocks(RAMP, SAMPLE_RATE)
    windows = list(cut_stretches(blocks, [(1.0, 2.0), (4.0, 5.5)], cut))
    assert [(w.start_s, w.duration_s, w.left_out_s) for w in windows] == [(1, 1, 1), (4, 1.5, 2)]
    assert next(blocks)[0] == 6 * SAMPLE_RATE


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ([(99.0, 200.0)], [(99.0, 1.0)]),
        ([(1.0, 2.0), (100.0, 200.0), (300.0, math.inf)], [(1.0, 1.0), (100.0, 0.0)]),
        ([(500.0, 600.0)], [(100.0, 0.0)]),
    ],
)
def test_beyond_the_end_there_is_nothing(stretches, expected):
    windows = [window for window in windows_of(stretches) if window is not None]
    assert [(w.start_s, w.duration_s) for w in windows] == expected
    assert windows[-1].last
    assert sum(w.duration_s + w.left_out_s for w in windows) == WHOLE_S
