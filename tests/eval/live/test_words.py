"""When words of a stream became final, held against when they were said."""

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.live import final_words, latencies


def test_a_word_is_there_with_its_last_letter_and_a_mark_may_follow():
    deltas = [(1.0, "Where is"), (2.0, " the key"), (3.0, "? It"), (4.0, " is")]
    assert final_words(deltas) == [
        ("Where", 1.0),
        ("is", 1.0),
        ("the", 2.0),
        ("key?", 2.0),
        ("It", 3.0),
        ("is", 4.0),
    ]


def test_words_that_were_misheard_tell_nothing():
    final = [("Where", 1.0), ("is,", 1.5), ("tea", 2.0), ("here", 2.5)]
    spoken = [("where", 0.5), ("is", 0.75), ("the", 1.0), ("here", 1.75)]
    assert latencies(final, spoken, normalizer(DEFAULT), "en") == [0.5, 0.75, 0.75]
