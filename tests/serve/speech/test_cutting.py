"""Windows of speech: everything that is said is in them, and they know where it was.

Stretches of a recording: nothing else is decoded, none meets another, times are the whole's.

Sound that is too low for speech is told apart from speech.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.messages import SpeechOptions
from serve.speech.cutting import NEW_WINDOW_PAUSE_S, Bandwidth, cut, cut_intervals, cut_long, pack
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.vad import FRAME, SpeechFilter
from tests.serve.speech.sounds import RATE, Ear, decode, encode, tone

SECOND = SAMPLE_RATE // FRAME * FRAME
MIN_SILENCE = round(SpeechOptions.vad_min_silence_s * SAMPLE_RATE)


def blocks(samples, size=30_000):
    return (samples[i : i + size] for i in range(0, len(samples), size))


def listener():
    return SpeechFilter(SpeechOptions(), Ear())


def numbered(parts):
    """Audio of (seconds, whether it is speech); each spoken sample tells its place."""
    spoken = np.concatenate([np.full(round(s * SECOND), on, bool) for s, on in parts])
    return np.where(spoken, np.arange(1, len(spoken) + 1), 0).astype(np.float32)


def packed(samples, size=30_000):
    return [window for window in pack(blocks(samples, size), listener()) if window is not None]


def short(samples, **options):
    return list(cut_long(blocks(samples), listener(), **options))


def assert_voice_is_where_somebody_speaks(window):
    """It holds all that is spoken; it begins and ends with it, or almost."""
    heard = np.zeros(len(window.samples), bool)
    for start_s, end_s in window.voice:
        start, end = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
        assert not heard[max(0, start - 1) : end].any(), "stretches are apart from each other"
        # What is cut may be cut in a pause that is too short to be one.
        begun = start + FRAME + (0 if start else MIN_SILENCE)
        assert window.samples[start:begun].any()
        assert window.samples[max(0, end - MIN_SILENCE - FRAME) : end].any()
        heard[start:end] = True
    assert heard[window.samples > 0].all()


PARTS = st.lists(st.tuples(st.floats(0.1, 50.0), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(PARTS, st.sampled_from([7_777, 30_000, 10**8]))
def test_all_speech_is_in_windows_that_know_where_it_was(parts, size):
    samples = numbered(parts)
    windows = packed(samples, size)
    joined = np.concatenate([window.samples for window in windows])
    np.testing.assert_array_equal(joined[joined > 0], samples[samples > 0])
    for window in windows:
        assert len(window.samples) <= WINDOW_SAMPLES
        assert all(pause.length_s < NEW_WINDOW_PAUSE_S for pause in window.pauses)
        assert_voice_is_where_somebody_speaks(window)
        for i in np.flatnonzero(window.samples)[::997]:
            time_s, expected = i / SAMPLE_RATE, (window.samples[i] - 1) / SAMPLE_RATE
            # Sample numbers are whole in float32 up to 2 ** 24, which is beyond this audio.
            assert window.timeline.start(time_s) == pytest.approx(expected, abs=1e-6)
            step_s = 1 / SAMPLE_RATE  # what ends where speech begins, ends before the pause
            end_s = window.timeline.end(time_s + step_s)
            assert end_s == pytest.approx(expected + step_s, abs=1e-6)
    assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
    whole_s = sum(window.duration_s + window.left_out_s for window in windows)
    assert whole_s == pytest.approx(len(samples) / SAMPLE_RATE, abs=1e-6)


def test_where_all_is_speech_windows_are_those_without():
    samples = np.random.default_rng(0).normal(0, 0.1, 100 * SAMPLE_RATE).astype(np.float32)
    for window, expected in zip(packed(samples), cut(blocks(samples)), strict=True):
        np.testing.assert_array_equal(window.samples, expected.samples)
        assert window.timeline == type(window.timeline)(expected.start_s, (), 0.4)
        assert (window.last, window.left_out_s) == (expected.last, 0.0)


def test_stretches_share_a_window_unless_a_long_pause_sets_them_apart():
    between = [(60, False), (5, True), (9, False), (8, True), (20, False), (5, True), (2, False)]
    one, two = packed(numbered(between))
    assert one.duration_s == pytest.approx(13, abs=2) and not one.last
    assert len(one.pauses) == 1 and one.start_s == pytest.approx(60, abs=2)
    assert two.duration_s == pytest.approx(5, abs=1) and not two.pauses and two.last
    assert two.start_s == pytest.approx(102, abs=2)


def test_stretches_of_audio_are_listened_to_one_by_one_and_silent_ones_give_nothing():
    samples = numbered([(20, False), (5, True), (20, False), (5, True)])
    stretches = [(1.0, 9.0), (18.0, 23.0), (23.0, 40.0), (41.0, 60.0), (70.0, 80.0)]
    found = cut_intervals(blocks(samples), stretches, lambda parts: pack(parts, listener()))
    *windows, rest = [window for window in found if window is not None]
    for window, begin in zip(windows, (20, 23, 45), strict=True):
        assert window.timeline.start(np.argmax(window.samples > 0) / SAMPLE_RATE) == pytest.approx(
            begin * SECOND / SAMPLE_RATE if begin != 23 else 23, abs=1e-3
        )
    assert rest.last and not len(rest.samples)
    whole_s = sum(window.duration_s + window.left_out_s for window in (*windows, rest))
    assert whole_s == pytest.approx(len(samples) / SAMPLE_RATE)


def test_without_speech_one_window_holds_nothing():
    samples = np.zeros(100 * SAMPLE_RATE, np.float32)
    found = list(pack(blocks(samples), listener()))
    assert found[0] is None  # others had their turn
    last = found[-1]
    assert last.last and not len(last.samples) and last.left_out_s == 100.0
    assert all(window is None for window in found[:-1])


def test_a_short_audio_is_one_window_that_tells_where_somebody_speaks():
    samples = numbered([(2, False), (3, True), (10, False), (1, True), (0.5, False)])
    (window,) = short(samples)
    np.testing.assert_array_equal(window.samples, samples)
    assert (window.start_s, window.last, window.left_out_s) == (0.0, True, 0.0)
    assert_voice_is_where_somebody_speaks(window)
    assert len(window.voice) == 2
    (nothing,) = short(samples[:0])
    assert (len(nothing.samples), nothing.voice) == (0, ())
    (unheard,) = cut(blocks(samples))
    assert unheard.voice is None


@pytest.mark.parametrize("seconds", [0.05, 1.0, 30.0])
def test_of_a_short_audio_in_which_nobody_speaks_nothing_is_left(seconds):
    samples = np.zeros(round(seconds * SAMPLE_RATE), np.float32)
    for early in (False, True):
        (window,) = short(samples, early=early)
        assert (len(window.samples), window.last, window.voice) == (0, True, ())
        assert window.left_out_s == seconds
        *_, kept = short(samples, keep_silence=True, early=early)
        assert (kept.duration_s, kept.voice, kept.left_out_s) == (seconds, (), 0.0)


@pytest.mark.parametrize("silence_s", [0.0, 0.9, 7.0])
def test_a_short_audio_is_told_at_its_first_speech_and_again_with_all_of_it(silence_s):
    samples = numbered([(silence_s, False), (3, True), (5, False), (2, True)])
    first, second = short(samples, early=True)
    assert (first.voice_pending, first.last, first.voice) == (True, True, None)
    np.testing.assert_array_equal(first.samples, samples)
    (whole,) = short(samples)
    assert vars(second) | {"samples": None} == vars(whole) | {"samples": None}


WHOLE_S = 100
# Each sample is its own place in the recording, so that windows tell where they are from.
RAMP = np.arange(WHOLE_S * SAMPLE_RATE, dtype=np.float32)


def windows_of(stretches, samples=RAMP, size=65_537):
    return list(cut_intervals(blocks(samples, size), stretches, cut))


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
    seconds = blocks(RAMP, SAMPLE_RATE)
    windows = list(cut_intervals(seconds, [(1.0, 2.0), (4.0, 5.5)], cut))
    assert [(w.start_s, w.duration_s, w.left_out_s) for w in windows] == [(1, 1, 1), (4, 1.5, 2)]
    assert next(seconds)[0] == 6 * SAMPLE_RATE


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


DATA = Path(__file__).parents[2] / "data"
CLIPS = [json.loads(line) for line in (DATA / "manifest.jsonl").read_text("utf-8").splitlines()]


def heard(samples: np.ndarray) -> Bandwidth:
    bandwidth = Bandwidth()
    blocks = list(bandwidth.watch(np.array_split(samples, 7)))
    np.testing.assert_array_equal(np.concatenate(blocks), samples)
    return bandwidth


@pytest.fixture(scope="module")
def voice() -> np.ndarray:
    return decode((DATA / "en_two.wav").read_bytes())[0]


@pytest.mark.parametrize("clip", CLIPS[::4], ids=lambda clip: clip["file"])
def test_speech_is_wide(clip: dict):
    bandwidth = heard(decode((DATA / clip["file"]).read_bytes(), 200.0)[0])
    assert not bandwidth.narrow
    assert bandwidth.warning() == ""


@pytest.mark.parametrize(("rate", "highest_hz"), [(1_000, 500), (2_000, 1_000)])
def test_low_rates(voice, rate: int, highest_hz: int):
    low = soxr.resample(voice, RATE, rate)
    decoded, _ = decode(encode(low, "WAV", "PCM_16", rate))
    for samples in (decoded, soxr.resample(low, rate, RATE)):
        bandwidth = heard(samples)
        assert bandwidth.narrow
        assert f"no frequencies above {highest_hz} Hz" in bandwidth.warning()


def test_a_tone_is_narrow_until_something_else_is_heard(voice):
    assert heard(tone()).narrow
    assert not heard(np.concatenate([tone(), 0.1 * voice])).narrow


def test_hum_under_speech_does_not_hide_it(voice):
    time_s = np.arange(len(voice)) / RATE
    hum = 0.5 * np.sin(2 * np.pi * 50 * time_s) + 0.3
    assert not heard((hum + 0.02 * voice).astype(np.float32)).narrow


def test_silence_is_neither():
    assert not heard(np.zeros(RATE, np.float32)).narrow
