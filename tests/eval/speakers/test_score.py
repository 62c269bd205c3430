"""The diarization error rate, its pairs of speakers, and the errors of each one's words."""

import itertools

import numpy as np
import pytest

from eval.speakers.run import best_pairs, counts_as_one, cp_counts, errors
from serve.speakers.diarize import SpeakerTurn


def turns(*said):
    return [SpeakerTurn(*one) for one in said]


RIGHT = turns((0.0, 4.0, "ann"), (4.0, 8.0, "bob"), (7.0, 10.0, "ann"))  # 11 s of speech


def test_names_do_not_matter():
    told = turns((0.0, 4.0, "B"), (4.0, 8.0, "A"), (7.0, 10.0, "B"))
    assert errors(RIGHT, told).rate == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("told", "missed", "invented", "confused"),
    [
        ([], 11.0, 0.0, 0.0),
        (turns((0.0, 10.0, "A")), 1.0, 0.0, 3.0),  # the second second of 7 to 8 is missed
        (turns((0.0, 4.0, "A"), (4.0, 8.0, "B"), (7.0, 12.0, "A")), 0.0, 2.0, 0.0),
        (turns((0.0, 4.0, "A"), (4.0, 8.0, "B"), (7.0, 10.0, "C")), 0.0, 0.0, 3.0),
    ],
)
def test_what_is_wrong_is_counted_once(told, missed, invented, confused):
    found = errors(RIGHT, told)
    assert found.speech_s == pytest.approx(11.0)
    parts = (found.missed_s, found.invented_s, found.confused_s)
    assert parts == pytest.approx((missed, invented, confused))
    assert found.rate == pytest.approx(100 * sum(parts) / 11.0)


def test_where_nobody_speaks_every_turn_is_wrong():
    assert errors([], []).rate == 0.0
    assert errors([], turns((0.0, 1.0, "A"))).rate == 100.0


def test_errors_of_recordings_add_up():
    both = errors(RIGHT, []) + errors(RIGHT, RIGHT)
    assert both.rate == pytest.approx(50.0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 5), (5, 3), (6, 6), (0, 3), (3, 0)])
def test_pairs_are_the_best_of_all(shape):
    rng = np.random.default_rng(7)
    for _ in range(20):
        gain = rng.integers(0, 9, shape).astype(float)
        pairs = best_pairs(gain)
        assert len(pairs) == min(shape)
        assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
        short = gain if shape[0] <= shape[1] else gain.T
        orders = itertools.permutations(range(short.shape[1]), short.shape[0])
        best = max(sum(short[i, j] for i, j in enumerate(order)) for order in orders)
        assert sum(gain[i, j] for i, j in pairs) == best


# ---------------------------------------------------------------- words


SPOKEN = [("ann", "Good morning, Bob."), ("bob", "Morning!"), ("ann", "How are you?")]


def edits_of(counts):
    return counts.substitutions, counts.deletions, counts.insertions


@pytest.mark.parametrize(
    ("heard", "edits"),
    [
        ([("B", "good morning bob how are you"), ("A", "morning")], (0, 0, 0)),
        ([("A", "good morning bob"), ("B", "morning how are you")], (0, 2, 2)),
        ([("A", "good morning bob morning how are you")], (0, 1, 1)),
        ([("A", "good morning bob how are you"), ("B", "morning"), ("C", "well")], (0, 0, 1)),
        ([], (0, 7, 0)),
    ],
)
def test_words_count_for_who_says_them(heard, edits):
    counts = cp_counts(SPOKEN, heard)
    assert (edits_of(counts), counts.length) == (edits, 7)


def test_words_alone_do_not_tell_who_says_them():
    heard = [("A", "good morning bob morning"), ("C", "how are you all")]
    assert edits_of(counts_as_one(SPOKEN, heard)) == (0, 0, 1)


def test_characters_are_words_where_nobody_writes_spaces():
    assert cp_counts([("li", "你好嗎 Bob")], [("A", "你好 bob")]).length == 4
    assert edits_of(cp_counts([("li", "你好嗎")], [("A", "你好")])) == (0, 1, 0)


def test_nobody_says_nothing():
    assert cp_counts([], []).length == 0
