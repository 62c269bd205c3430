"""The comparison of words' times: what is matched, what espeak-ng says, what counts as good."""

import dataclasses

import pytest

from eval.accuracy.espeak import Espeak
from eval.accuracy.words import Found, Timed, _same, _within
from eval.measurement import verdict
from serve.contract.errors import UnavailableError

GOOD = Found(
    compared=200,
    within=0.97,
    longer=10,
    longer_within=0.5,
    truths=100,
    ours_s=0.02,
    theirs_s=0.021,
    throughput=0.95,
)


def test_words_that_both_say_are_matched_in_order():
    a, b = (
        [Timed(word, i, i + 1) for i, word in enumerate(text.split())]
        for text in ("the old cat sat", "an old cat there sat")
    )
    assert _same(a, b) == [(1, 1), (2, 2), (3, 4)]
    assert _within([0.0, 0.02, 0.03, 0.5]) == 0.5


@pytest.mark.parametrize(
    "worse", [{"within": 0.94}, {"ours_s": 0.07}, {"theirs_s": 0.01}, {"throughput": 0.85}]
)
def test_each_figure_must_be_as_wanted(worse):
    assert verdict(GOOD.checks) == "passed"
    assert verdict(dataclasses.replace(GOOD, **worse).checks) == "failed"
    assert str(GOOD).count("\n") == 2 and "97.0%" in str(GOOD).splitlines()[0]


def test_what_was_not_measured_is_said_and_fails_nothing():
    found = dataclasses.replace(GOOD, truths=0, ours_s=None, theirs_s=None)
    assert verdict(found.checks) == "not decided" and "not measured" in str(found)
    assert verdict(dataclasses.replace(found, within=0.5).checks) == "failed"


@pytest.mark.needs_program("espeak-ng")
def test_espeak_says_where_each_word_begins():
    espeak = Espeak()
    speech = espeak.speak("¿Dónde está la llave?", "es")
    assert [word for word, _ in speech.words] == ["Dónde", "está", "la", "llave"]
    begins = [begin for _, begin in speech.words]
    assert begins == sorted(begins) and begins[0] >= 0 and begins[-1] < len(speech.samples) / 22050
    with pytest.raises(UnavailableError, match="no voice 'nobody'"):
        espeak.speak("a", "nobody")
