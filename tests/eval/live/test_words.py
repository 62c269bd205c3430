"""When words of a stream became final, held against when they were said."""

from eval.accuracy.normalize import DEFAULT, normalizer
from eval.live.run import Final, Spoken, final_words, latencies


def test_a_word_is_there_with_its_last_letter_and_a_mark_may_follow():
    deltas = [(1.0, "Where is"), (2.0, " the key"), (3.0, "? It"), (4.0, " is")]
    assert final_words(deltas) == [
        Final("Where", 1.0),
        Final("is", 1.0),
        Final("the", 2.0),
        Final("key?", 2.0),
        Final("It", 3.0),
        Final("is", 4.0),
    ]


def test_words_that_were_misheard_tell_nothing():
    final = [Final("Where", 1.0), Final("is,", 1.5), Final("tea", 2.0), Final("here", 2.5)]
    spoken = [Spoken("where", 0.5), Spoken("is", 0.75), Spoken("the", 1.0), Spoken("here", 1.75)]
    assert latencies(final, spoken, normalizer(DEFAULT), "en") == [0.5, 0.75, 0.75]
