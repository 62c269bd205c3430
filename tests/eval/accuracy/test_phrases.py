"""Lists of phrases, and what counts of what is heard."""

import dataclasses
from pathlib import Path

import pytest

from build.clips import Clip
from eval.accuracy.data import Prediction, TimedCall
from eval.accuracy.phrases import Score, checks_of, listed, rare_words, score, table_of
from eval.accuracy.score import Counts
from serve.speech.tokenizer import Tokenizer
from tests.fakes import fake_engine


def clip(file, text, language="en"):
    return Clip(file, Path(file), text, language, 1.0)


CLIPS = [
    clip("a", "Gregson said the fox had seen Whittemore."),
    clip("b", "GREGSON AND THE PROTESTANT"),
    clip("c", "Renko liegt am Ochsenweg", "de"),
    clip("d", "作出了贡献", "zh"),
    clip("e", "Gregson isn't in Ypsilanti"),
]


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    return rare_words(CLIPS, Tokenizer.open(fake_engine(tmp_path_factory.mktemp("engine"))))


def call(file, reference, text):
    return TimedCall(
        file=file,
        reference=reference,
        language="en",
        duration_s=1.0,
        clip_set="timed",
        phase="accuracy",
        concurrency=1,
        repeat=0,
        started_s=0.0,
        latency_s=0.1,
        prediction=Prediction(text, "en", ()),
    )


def test_rare_words_are_long_and_in_few_clips(rare):
    assert "Whittemore" in rare["a"] and "protestant" in rare["b"]
    assert "Gregson" not in rare["a"]  # three clips have it
    assert "fox" not in rare["a"] and "isn't" not in rare["e"]
    assert rare["d"] == ()


def test_a_list_holds_the_clips_own_words_and_then_others_of_its_language(rare):
    some = listed(CLIPS[1], CLIPS, rare, 3)
    assert len(some) == 3 and "protestant" in some
    assert not {"Renko", "Ochsenweg"} & set(some)
    everything = listed(CLIPS[1], CLIPS, rare, 100)
    assert {"Renko", "Ochsenweg", "Ypsilanti"} <= set(everything)
    assert everything == listed(CLIPS[1], CLIPS, rare, 100)


def test_listed_words_count_apart_from_all_others():
    lists = {"a": ("Whittemore", "Ypsilanti"), "b": ("Renko",)}
    calls = [
        call("a", "he saw Whittemore go", "he saw Whitmore go to Ypsilanti"),
        call("b", "Renko lies there", "Renko lies their"),
    ]
    found = score("phrases", 2, calls, lists)
    assert (found.said, found.found, found.heard, found.inserted) == (2, 1, 9, 1)
    # "he saw go" beside "he saw go to Ypsilanti", and "lies there" beside "lies their".
    assert (found.rest.length, found.rest.errors) == (9 + 10, 13 + 2)


def test_what_is_boosted_is_held_against_nothing():
    lists = {"a": ("Whittemore",)}
    plain = score("nothing", 1, [call("a", "saw Whittemore", "saw Whitmore")], lists)
    boosted = score("phrases", 1, [call("a", "saw Whittemore", "saw Whittemore")], lists)
    assert [check.passed for check in checks_of([plain, boosted])] == [True, True, True]
    useless = dataclasses.replace(plain, way="phrases")
    assert [check.passed for check in checks_of([plain, useless])] == [True, False, True]
    assert "100 %" in table_of([plain, boosted])


def test_false_inserts_count_that_boosting_adds():
    plain = Score("nothing", 10, 0, 0, 10_000, 15, Counts())
    boosted = dataclasses.replace(plain, way="phrases", inserted=25)
    check, *others = checks_of([plain, boosted])
    assert check.passed and check.detail == "+0.100 %" and not others
    (check,) = checks_of([plain, dataclasses.replace(boosted, inserted=26)])
    assert not check.passed
    assert "adds at most 0.1 % of the words" in check.name
    (undecided,) = checks_of([boosted])
    assert undecided.passed is None
