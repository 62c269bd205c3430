"""How late words of a stream are, by its decodings, and how many streams are found to be held."""

import pytest

from eval.bench.live import Search, Utterance


def test_a_word_waits_for_the_second_decoding_that_has_it_or_for_the_end():
    utterance = Utterance(10.0, 2.0)  # words end at 10.4, 10.8, 11.2, 11.6 and 12.0
    final = {}
    for heard_s, now_s in [(0.7, 10.8), (1.1, 11.3), (1.9, 12.1), (2.2, 12.4)]:
        final |= {word.said_s: at_s for word, at_s in utterance.decoded(heard_s, now_s)}
    assert final == pytest.approx({10.4: 11.3, 10.8: 12.1, 11.2: 12.4, 11.6: 12.4, 12.0: 12.5})
    assert utterance.whole and not utterance.words


def test_a_late_last_decoding_is_the_end():
    utterance = Utterance(0.0, 0.8)
    assert [at_s for _, at_s in utterance.decoded(1.0, 3.0)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("capacity", "tried", "found"),
    [
        (170, [150, 226, 188, 169, 178], 169),
        (40, [150, 75, 37, 56, 46], 37),
        (2000, [150, 226, 340, 511, 767], 767),
        (0, [150, 75, 37, 18, 9], 0),
    ],
)
def test_the_search_closes_in_on_what_is_held(capacity, tried, found):
    search, seen = Search(150, 5), []
    for count in search.counts():
        seen.append(count)
        search.note(count, count <= capacity)
    assert (seen, search.held) == (tried, found)
