"""Vectors that are alike become one voice, as many as are allowed."""

import dataclasses

import numpy as np
import pytest

from serve.speakers.diarize import ClusteringSettings, assign, centroids
from serve.speakers.inference import unit

RULES = ClusteringSettings(min_cosine=0.5, min_voice_s=3.0, min_distinct_s=100.0)


def voices(*counts, spread=0.03):
    """So many vectors near each of some directions that have nothing in common."""
    rng = np.random.default_rng(0)
    size = max(16, len(counts))
    near = np.repeat(np.eye(size)[: len(counts)], counts, axis=0)
    return unit((near + rng.normal(0, spread, near.shape)).astype(np.float32))


def found(vectors, seconds=2.0, least=1, most=100, rules=RULES):
    lengths = np.broadcast_to(np.float32(seconds), len(vectors)).astype(np.float32)
    return centroids(vectors, lengths, least, most, rules)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_each_voice_is_found(count):
    told = found(voices(*[4] * count))
    assert len(told) == count
    np.testing.assert_allclose(np.sort(told.max(1)), np.ones(count), atol=0.02)


def test_what_is_little_joins_what_it_is_most_like():
    assert len(found(voices(5, 5, 1))) == 2
    assert len(found(voices(5, 5, 2))) == 3


def test_what_is_little_is_a_voice_where_it_is_like_none():
    rules = dataclasses.replace(RULES, min_distinct_s=1.5, max_distinct_cosine=0.3)
    vectors = voices(5, 5, 1)
    assert len(found(vectors, rules=rules)) == 3
    assert len(found(vectors, rules=rules, most=2)) == 2
    vectors[-1] = unit(vectors[-1] + 0.45 * vectors[0])
    assert len(found(vectors, rules=rules)) == 2
    too_little = np.float32([2.0] * 10 + [1.0])
    assert len(found(voices(5, 5, 1), seconds=too_little, rules=rules)) == 2


def test_what_has_less_than_a_hundredth_of_the_speech_is_no_voice():
    vectors, least = voices(40, 40, 2), dataclasses.replace(RULES, min_distinct_s=1.5)
    assert len(found(vectors, rules=least)) == 3
    seconds = np.float32([10.0] * 80 + [3.0, 3.0])
    assert len(found(vectors, seconds=seconds, rules=least)) == 2


def test_a_voice_is_found_however_little_it_says_where_nobody_says_more():
    assert len(found(voices(1))) == 1
    assert len(found(voices(1, 1), seconds=0.4)) == 2


@pytest.mark.parametrize(("least", "most", "told"), [(1, 2, 2), (3, 3, 3), (5, 9, 5), (1, 1, 1)])
def test_numbers_of_voices_are_honoured(least, most, told):
    assert len(found(voices(6, 5, 4), least=least, most=most)) == told


def test_there_are_no_more_voices_than_vectors():
    assert len(found(voices(2), least=4, most=4)) == 2


def test_who_speaks_at_once_is_not_one():
    likeness = np.array([[0.9, 0.2], [0.8, 0.1], [0.7, 0.6]])
    assert assign(likeness, []).tolist() == [0, 0, 0]
    assert assign(likeness, [[0, 1], [2]]).tolist() == [0, 1, 0]
    assert assign(likeness, [[0, 1, 2]]).tolist() == [0, 0, 1], "the third finds no other voice"
