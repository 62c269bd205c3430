"""Cutting, splitting, judging and stitching: properties and worked examples.

Times are found again after pauses were cut out.

What a window's text leaves untold, and the windows that are decoded for it.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.contract.config import TranscriberConfig
from serve.contract.messages import Segment, Word
from serve.speech import audio
from serve.speech.cutting import cut as cut_blocks
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.judging import (
    AttemptDecision,
    best_attempt,
    compression_ratio,
    decide,
    loop_tokens,
)
from serve.speech.meter import AudioLimits
from serve.speech.windows import (
    TIMESTAMP_STEP_S,
    Attempt,
    AudioWindow,
    DecodedWindow,
    Pause,
    WindowSegment,
    WindowTimeline,
    find_uncovered,
    is_sparse,
    join_text,
    split_segments,
    spoken,
    stitch,
    sub_window,
    uncovered_s,
)

EOT, SOT, TIMES = 100, 101, 110
FACTS = SimpleNamespace(eot=EOT, timestamp_begin=TIMES)
CONFIG = TranscriberConfig()
DATA = Path(__file__).parents[2] / "data"
FIXED = settings(derandomize=True, deadline=None, database=None)
FEW = settings(FIXED, max_examples=12)
EDGE = 1 / 16  # s; a cut may be this far outside a pause, through smoothing and frames


def at(time_s: float) -> int:
    """The timestamp token."""
    return TIMES + round(time_s / TIMESTAMP_STEP_S)


def cut(samples: np.ndarray) -> list[AudioWindow]:
    """Windows of audio that is there as a whole."""
    return list(cut_blocks([samples]))


def noise(seconds: float, level: float = 0.1, seed: int = 0) -> np.ndarray:
    count = round(seconds * SAMPLE_RATE)
    return np.random.default_rng(seed).normal(0, level, count).astype(np.float32)


def with_pauses(seconds: float, pauses: list[tuple[float, float]], floor: float) -> np.ndarray:
    """Noise at level 0.1 as speech, pauses (begin, end) at level `floor`."""
    samples = noise(seconds)
    for begin, end in pauses:
        samples[round(begin * SAMPLE_RATE) : round(end * SAMPLE_RATE)] *= floor / 0.1
    return samples


# --- cut


@FEW
@given(
    count=st.integers(1, 130 * SAMPLE_RATE),
    pauses=st.lists(st.tuples(st.floats(0, 130), st.floats(0.01, 20)), max_size=8),
    floor=st.sampled_from([0.0, 1e-4, 0.01, 0.05]),
)
def test_windows_join_up_to_the_whole(count: int, pauses: list[tuple[float, float]], floor: float):
    samples = with_pauses(130, [(begin, begin + length) for begin, length in pauses], floor)[:count]
    windows = cut(samples)
    np.testing.assert_array_equal(np.concatenate([w.samples for w in windows]), samples)
    position = 0
    for window in windows:
        assert window.start_s == position / SAMPLE_RATE
        assert 0 < len(window.samples) <= WINDOW_SAMPLES
        position += len(window.samples)
    for window in windows[:-1]:
        assert len(window.samples) >= WINDOW_SAMPLES // 2
    if len(windows) > 1:
        assert len(windows[-1].samples) >= SAMPLE_RATE


@FEW
@given(
    count=st.one_of(
        st.integers(0, 100 * SAMPLE_RATE),
        st.integers(-2, 2).map(lambda off: WINDOW_SAMPLES + off),
        st.integers(-2, 2).map(lambda off: WINDOW_SAMPLES + SAMPLE_RATE + off),
    ),
    sizes=st.lists(st.integers(1, 40 * SAMPLE_RATE), min_size=1, max_size=5),
    pauses=st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 20)), max_size=8),
    floor=st.sampled_from([0.0, 1e-4, 0.05]),
)
def test_cuts_of_a_stream_are_those_of_the_whole(
    count: int, sizes: list[int], pauses: list[tuple[float, float]], floor: float
):
    samples = with_pauses(100, [(begin, begin + length) for begin, length in pauses], floor)[:count]

    def blocks() -> Iterator[np.ndarray]:
        at = 0
        for size in itertools.cycle(sizes):
            if at >= count:
                return
            yield samples[at : at + size]
            at += size

    windows = list(cut_blocks(blocks()))
    if count:
        for window, expected in zip(windows, cut(samples), strict=True):
            np.testing.assert_array_equal(window.samples, expected.samples)
    assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]


def test_a_window_does_not_wait_for_what_cannot_move_its_end():
    samples = noise(200)
    taken = []

    def blocks() -> Iterator[np.ndarray]:
        for second in range(200):
            taken.append(second)
            yield samples[second * SAMPLE_RATE : (second + 1) * SAMPLE_RATE]

    windows = cut_blocks(blocks())
    first = next(windows)
    assert len(taken) == 31, "30 s, and one more, which is never cut off alone"
    assert first.samples.base is None, "a window keeps no other audio in memory"
    second = next(windows)
    assert len(taken) == 31 + math.ceil(first.duration_s)
    assert second.start_s == first.duration_s


@pytest.mark.parametrize("floor", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("begin", [15.2, 19.0, 24.7, 28.5])
def test_the_cut_is_in_the_pause(begin: float, floor: float):
    samples = with_pauses(45, [(begin, begin + 0.6)], floor)
    first, _ = cut(samples)
    assert begin + 0.2 < first.duration_s < begin + 0.4


GAPS = [(15 + 0.4 * i, 15.06 + 0.4 * i) for i in range(36)]


@pytest.mark.parametrize(
    ("pauses", "end_s", "within_s"),
    [
        ([(18, 18.9), (26, 26.4)], 18.45, EDGE),  # the longer one, even if it is earlier
        ([(17, 17.6), (21, 21.6), (25, 25.6)], 25.3, EDGE),  # of equal ones the last
        ([(16, 20), (24, 26)], 25.5, 0.2),  # long ones are equal, and end with the next speech
        ([*GAPS, (20.2, 20.8)], 20.5, 0.2),  # gaps between words are none
    ],
)
def test_the_best_pause_is_cut_in(pauses, end_s, within_s):
    samples = with_pauses(45, pauses, 0.001)
    assert cut(samples)[0].duration_s == pytest.approx(end_s, abs=within_s)


def test_digital_silence_does_not_beat_a_pause_with_room_noise():
    samples = with_pauses(45, [(26, 26.8)], 0.0005)
    samples[17 * SAMPLE_RATE : round(17.4 * SAMPLE_RATE)] = 0
    assert cut(samples)[0].duration_s == pytest.approx(26.4, abs=EDGE)


def test_speech_without_a_pause_is_cut_at_its_quietest_place():
    samples = noise(45)
    dip = slice(22 * SAMPLE_RATE, round(22.4 * SAMPLE_RATE))
    samples[dip] *= 0.6
    assert 22 <= cut(samples)[0].duration_s <= 22.4


def test_sound_below_the_last_bit_of_24_is_silence():
    """Where nothing can be heard, a gap is no pause: the cut is as late as it may be."""
    samples = noise(45, level=3e-7)
    samples[17 * SAMPLE_RATE : 18 * SAMPLE_RATE] = 0
    assert cut(samples)[0].duration_s == 29.5
    assert cut(samples * 100)[0].duration_s == pytest.approx(17.5, abs=EDGE)


@pytest.mark.parametrize("file", ["en_long.mp3", "es_long.mp3"])
def test_long_clips_are_cut_between_sentences(file: str):
    lines = (DATA / "manifest.jsonl").read_text("utf-8").splitlines()
    clip = next(clip for clip in map(json.loads, lines) if clip["file"] == file)
    windows = cut(audio.join_blocks(audio.decode((DATA / file).read_bytes(), AudioLimits(120.0))))
    assert len(windows) > 1
    for window in windows[1:]:
        inside = [s for s in clip["segments"] if s["start"] < window.start_s < s["end"]]
        assert not inside


# --- split_segments


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([at(0), 1, 2, at(2)], [(0, 2, (1, 2))]),
        ([at(0), 1, at(2), at(2), 2, at(4.5)], [(0, 2, (1,)), (2, 4.5, (2,))]),
        ([at(0.5), 1, at(2), at(3), 2, at(4.5)], [(0.5, 2, (1,)), (3, 4.5, (2,))]),
        # the end of the last piece is missing: text is kept to the window's end
        ([at(0), 1, at(2), at(3), 2, 3], [(0, 2, (1,)), (3, 10, (2, 3))]),
        # no timestamps: one piece over the window
        ([1, 2, 3], [(0, 10, (1, 2, 3))]),
        # text before the first timestamp begins with the window
        ([1, at(2), at(2), 2, at(4)], [(0, 2, (1,)), (2, 4, (2,))]),
        # a pair without text between, and timestamps alone
        ([at(0), at(0), 1, at(2)], [(0, 2, (1,))]),
        ([at(5)], []),
        # a lone timestamp between texts ends one and begins the other
        ([at(0), 1, at(2), 2, at(4)], [(0, 2, (1,)), (2, 4, (2,))]),
        # an end that is not after its start tells nothing
        ([at(0), 1, at(0)], [(0, 10, (1,))]),
        ([at(2), 1, at(2), at(3), 2, at(4)], [(2, 3, (1,)), (3, 4, (2,))]),
        # times that run backwards are lifted
        ([at(4), 1, at(2), at(3), 2, at(6)], [(4, 4, (1,)), (4, 6, (2,))]),
        # beyond the audio: clamped
        ([at(0), 1, at(28)], [(0, 10, (1,))]),
        # other special tokens are not text
        ([SOT, at(0), 1, at(2), EOT], [(0, 2, (1,))]),
    ],
)
def test_split(tokens: list[int], expected: list[tuple[float, float, tuple[int, ...]]]):
    pieces = split_segments(tokens, FACTS, 10.0)
    assert pieces == [WindowSegment(*row) for row in expected]


TOKENS = st.lists(st.one_of(st.integers(0, EOT - 1), st.integers(TIMES, TIMES + 1500)), max_size=60)


@FIXED
@given(tokens=TOKENS, duration_s=st.floats(0.01, 30))
def test_split_loses_no_text_and_times_are_in_order(tokens: list[int], duration_s: float):
    pieces = split_segments(tokens, FACTS, duration_s)
    assert [t for piece in pieces for t in piece.tokens] == [t for t in tokens if t < EOT]
    times = [time for piece in pieces for time in (piece.start_s, piece.end_s)]
    assert times == sorted(times)
    assert all(0 <= time <= duration_s for time in times)
    assert all(piece.tokens for piece in pieces)


# --- judge


def attempt(
    logprob: float | None = -0.3,
    no_speech: float | None = 0.01,
    ratio: float = 1.5,
    temperature: float = 0.0,
) -> Attempt:
    return Attempt((1, 2), logprob, no_speech, temperature, ratio)


@pytest.mark.parametrize(
    ("scores", "outcome", "temperature"),
    [
        ({}, "accept", None),
        ({"ratio": 2.5}, "retry", 0.2),
        ({"logprob": -1.1}, "retry", 0.2),
        ({"logprob": -1.1, "temperature": 1.0}, "give up", None),
        # silence: no speech likely, and the model unsure of the words
        ({"no_speech": 0.7, "logprob": -1.1}, "silence", None),
        ({"no_speech": 0.7, "logprob": -0.5}, "accept", None),
        ({"no_speech": 0.7, "logprob": -0.5, "ratio": 9.0}, "retry", 0.2),
        ({"no_speech": 0.6, "logprob": -1.1}, "retry", 0.2),
        # what the runtime cannot measure is not checked
        ({"logprob": None}, "accept", None),
        ({"no_speech": 0.7, "logprob": None}, "silence", None),
    ],
)
def test_judge(scores: dict[str, float], outcome: str, temperature: float | None):
    verdict = decide(attempt(**scores), CONFIG, fixed_temperature=False)
    assert verdict.outcome == outcome
    assert verdict.temperature == temperature


@pytest.mark.parametrize(
    ("scores", "voice_s", "outcome"),
    [
        ({"no_speech": 0.7, "logprob": -0.5}, 0.3, "silence"),
        ({"no_speech": 0.7, "logprob": -0.5}, 0.6, "accept"),
        ({"no_speech": 0.7, "logprob": -0.5}, None, "accept"),  # no VAD ran
        ({"no_speech": 0.5, "logprob": -0.5}, 0.3, "accept"),  # a word can be short
        ({"no_speech": 0.7, "logprob": -1.1}, 9.0, "silence"),
    ],
)
def test_where_hardly_a_voice_is_heard_the_model_need_not_be_unsure(scores, voice_s, outcome):
    for fixed in (False, True):
        assert decide(attempt(**scores), CONFIG, fixed, voice_s).outcome == outcome


def test_a_loop_counts_only_where_the_text_compresses_as_one():
    for fixed in (False, True):
        goes_on = AttemptDecision("retry", 0.4)
        unsure = {"no_speech": 0.9, "logprob": -3.0, "temperature": 0.4}
        assert decide(dataclasses.replace(attempt(**unsure), looped=True), CONFIG, fixed) == goes_on
        looped = dataclasses.replace(attempt(ratio=2.5), looped=True)
        assert decide(looped, CONFIG, fixed) == decide(attempt(ratio=2.5), CONFIG, fixed)


def test_the_more_repetition_passes_the_longer_a_loop_has_to_be():
    found = [loop_tokens(224, 30.0, threshold) for threshold in (-1.0, 1.0, 2.4, 5.0, 30.0, 1e9)]
    assert found[:3] == [16, 16, 94] and 94 < found[3] < 224 and found[4:] == [0, 0]
    assert loop_tokens(24, 30.0, 2.4) == 0, "what is short is never cut"
    assert [loop_tokens(224, s, 2.4) for s in (25.0, 10.0, 2.0)] == [92, 50, 27]


def test_temperatures_that_are_repeated_come_to_an_end():
    config = TranscriberConfig(temperatures=(0.5, 0.0, 0.5))
    assert decide(attempt(ratio=9.0, temperature=0.5), config, False).outcome == "give up"


@pytest.mark.parametrize(
    ("attempts", "best"),
    [
        ([(-2.0, 1.5), (-1.5, 1.5), (-3.0, 1.5)], 1),
        ([(-2.0, 1.5), (-0.1, 2.5), (-3.0, 2.4)], 0),  # the likeliest repeats itself
        ([(-2.0, 1.5), (-2.0, 1.5)], 0),
        ([(None, 9.0), (None, 8.0)], 0),  # not told
    ],
)
def test_best_attempt(attempts: list[tuple[float | None, float]], best: int):
    made = [attempt(logprob=logprob, ratio=ratio) for logprob, ratio in attempts]
    assert best_attempt(made, CONFIG) is made[best]


def test_compression_ratio():
    assert compression_ratio("") == 0
    plain = "the quick brown fox jumps over the lazy dog near the old river bank at dawn"
    assert 0.5 < compression_ratio(plain) < 1.5
    assert compression_ratio("no no no " * 40) > CONFIG.compression_ratio_threshold
    assert compression_ratio("你好" * 100) > CONFIG.compression_ratio_threshold


# --- stitch


def decode(tokens) -> str:
    return "".join(f" w{token}" if token else " " for token in tokens)


def test_stitch_leaves_out_blank_text():
    pieces = (WindowSegment(0, 1, (0,)), WindowSegment(1, 2, (1,)))
    whole = DecodedWindow(WindowTimeline(0.0), 5.0, attempt(), pieces)
    assert [s.text for s in spoken(stitch(whole, decode))] == [" w1"]
    assert join_text([]) == ""


FIFTY = settings(FIXED, max_examples=50)
SEGMENT = Segment(0.0, 1.0, " a", (1,), None, None, 0.0, 1.0)


@st.composite
def timelines(draw):
    places = sorted(draw(st.lists(st.floats(0.0, 30.0), max_size=6, unique=True)))
    pauses = tuple(Pause(at, draw(st.floats(0.01, 1000.0))) for at in places)
    return WindowTimeline(
        draw(st.floats(0.0, 3600.0)), pauses, draw(st.sampled_from([0.0, 0.4, 2.0]))
    )


MOMENTS = st.lists(st.floats(0.0, 30.0), min_size=2, max_size=8).map(sorted)


@FIFTY
@given(timelines(), MOMENTS)
def test_what_comes_later_never_begins_before_the_end_of_what_was_before(timeline, times):
    segments = [
        dataclasses.replace(SEGMENT, start=timeline.start_s + a, end=timeline.start_s + b)
        for a, b in itertools.pairwise(times)
    ]
    found = [time for s in timeline.restore(segments) for time in (s.start, s.end)]
    assert all(a <= b + 2e-3 for a, b in itertools.pairwise(found))


@FIFTY
@given(timelines(), MOMENTS)
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


NOISE = np.random.default_rng(0).standard_normal(30 * SAMPLE_RATE).astype(np.float32)


def window(seconds, *voice, **rest):
    samples = NOISE[: round(seconds * SAMPLE_RATE)].copy()
    return AudioWindow(100.0, samples, last=True, voice=voice, **rest)


def piece(start_s, end_s, tokens=30):
    return WindowSegment(start_s, end_s, tuple(range(tokens)))


def test_a_window_that_is_told_is_done():
    whole = window(28, (0.1, 9.9), (10.5, 27.3))
    assert find_uncovered(whole, [piece(0, 10), piece(10, 27.0)]) == (2, [])
    assert uncovered_s(whole, [piece(0, 10), piece(10, 27.0)]) == pytest.approx(0.1)


def test_where_nobody_listened_nothing_is_known_to_be_untold():
    silent = AudioWindow(0.0, NOISE, voice=None)
    assert find_uncovered(silent, [piece(0, 2)]) == (1, [])
    assert uncovered_s(silent, [piece(0, 2)]) == 0


def test_voice_behind_the_last_timestamp_is_decoded_from_there():
    whole = window(28, (0.1, 24.0), (25.0, 27.5))
    kept, (rest,) = find_uncovered(whole, [piece(0, 12), piece(12, 24.2)])
    assert kept == 2 and rest.start_s == pytest.approx(124.8, abs=0.06)
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
    assert kept == 1
    assert [one.start_s for one in halves] == pytest.approx([105.0, 115.0], abs=0.06)
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
