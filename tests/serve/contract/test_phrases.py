"""What a trie of phrases lets sequences earn."""

import itertools
import tracemalloc

import pytest

from serve.contract.phrases import MAX_NODES, build_trie


def earned(trie, tokens):
    """What each token earns, one after another, and what is taken back behind the last."""
    edges = {
        edge: (target, gain)
        for *edge, target, gain in zip(
            trie.nodes.tolist(),
            trie.tokens.tolist(),
            trie.targets.tolist(),
            trie.gains.tolist(),
            strict=True,
        )
        for edge in [tuple(edge)]
    }
    node, gains = 0, []
    for token in tokens:
        refund = float(trie.refunds[node])
        if (node, token) in edges:
            node, gain = edges[node, token]
        elif (0, token) in edges:
            node, gain = edges[0, token]
            gain += refund
        else:
            node, gain = 0, refund
        gains.append(gain)
    return [*gains, float(trie.refunds[node])]


def test_a_phrase_earns_its_boost_token_by_token_and_keeps_it():
    trie = build_trie([((1, 2, 3), 6.0)])
    assert earned(trie, [9, 1, 2, 3, 9]) == [0, 2, 2, 2, 0, 0]


def test_a_match_that_breaks_off_gives_back_what_it_earned():
    trie = build_trie([((1, 2, 3), 6.0)])
    assert earned(trie, [1, 2, 9]) == [2, 2, -4, 0]
    assert earned(trie, [1, 2]) == [2, 2, -4]  # and so does one that the text's end breaks off
    assert earned(trie, [1, 1, 2, 3]) == [2, 0, 2, 2, 0]  # what breaks it off may begin another


def test_a_phrase_within_one_that_breaks_off_is_found():
    trie = build_trie([((1, 2, 3, 4), 4.0), ((2, 3, 5), 6.0), ((3, 6), 2.0)])
    assert earned(trie, [1, 2, 3, 5]) == [1, 1, 1, 3, 0]  # -3, and 6 in all
    assert earned(trie, [1, 2, 3, 6]) == [1, 1, 1, -1, 0]  # -3, and 2 in all


def test_where_a_phrase_begins_another_its_boost_is_kept():
    trie = build_trie([((1, 2), 4.0), ((1, 2, 3, 4), 6.0)])
    assert earned(trie, [1, 2, 9]) == [2, 2, 0, 0]
    assert sum(earned(trie, [1, 2, 3, 4])) == 6
    assert sum(earned(trie, [1, 2, 3])) == 4


def test_too_many_phrases_are_refused():
    fits = [((token,), 1.0) for token in range(MAX_NODES - 1)]
    assert len(build_trie(fits).tokens) == MAX_NODES - 1
    with pytest.raises(ValueError, match="more than 32768"):
        build_trie([*fits, ((1, 2), 1.0), ((1, 3), 1.0)])


def test_a_list_that_would_be_huge_is_refused_before_it_is():
    """900 phrases begin with token 1, and 5,000 nodes of others hold it, each with their edges."""
    begins = [((1, 2 + i), 1.0) for i in range(900)]
    holds = [
        (tuple(itertools.chain(*((1000 + 50 * i + j, 1) for j in range(50)))), 1.0)
        for i in range(100)
    ]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 32768"):
            build_trie(begins + holds)
        assert tracemalloc.get_traced_memory()[1] < 30e6  # bytes
    finally:
        tracemalloc.stop()


def test_no_phrase_is_read_beyond_the_limit():
    rest = iter([((token,), 1.0) for token in range(MAX_NODES + 10)])
    with pytest.raises(ValueError, match="more than 32768"):
        build_trie(rest)
    assert len(list(rest)) == 10
