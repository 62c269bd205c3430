"""Whose words are right."""

import pytest

from eval.speakers.score import counts_as_one, cp_counts

SPOKEN = [("ann", "Good morning, Bob."), ("bob", "Morning!"), ("ann", "How are you?")]


def errors(counts):
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
    assert (errors(counts), counts.length) == (edits, 7)


def test_words_alone_do_not_tell_who_says_them():
    heard = [("A", "good morning bob morning"), ("C", "how are you all")]
    assert errors(counts_as_one(SPOKEN, heard)) == (0, 0, 1)


def test_characters_are_words_where_nobody_writes_spaces():
    assert cp_counts([("li", "你好嗎 Bob")], [("A", "你好 bob")]).length == 4
    assert errors(cp_counts([("li", "你好嗎")], [("A", "你好")])) == (0, 1, 0)


def test_nobody_says_nothing():
    assert cp_counts([], []).length == 0
