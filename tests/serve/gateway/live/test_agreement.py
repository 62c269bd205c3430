"""Which words become final, as hypotheses come one after another."""

import hypothesis
import pytest
from hypothesis import strategies

from serve.contract.messages import Word
from serve.gateway.live.agreement import LocalAgreement


def heard(text, begin_s=0.0):
    """A hypothesis: its words take half a second each."""
    return [
        Word(begin_s + i / 2, begin_s + i / 2 + 0.4, f" {word}", 0.9)
        for i, word in enumerate(text.split())
    ]


def run(*texts):
    """What each hypothesis makes final, and what the end does."""
    agreement = LocalAgreement()
    return [*(agreement.update(heard(text)) for text in texts), agreement.finish()]


def test_what_two_in_a_row_agree_on_becomes_final():
    assert run("where is", "where is the quay", "where is the key to", "where is the key to") == [
        *("", " where is", " the", " key"),
        " to",
    ]


def test_the_last_word_waits_for_it_may_be_the_beginning_of_another():
    assert run("we desire and", "we desire and", "we desire increase") == [
        *("", " we desire", ""),
        " increase",
    ]


def test_case_and_marks_do_not_keep_words_apart_and_the_later_ones_stand():
    assert run("the gate. But", "The gate, but it") == ["", " The gate, but", " it"]


def test_the_mark_behind_the_last_final_word_waits_for_the_next_word():
    assert run("Hello. It", "Hello. It", "Hello, world is", "Hello, world! It") == [
        *("", " Hello", "", ", world"),
        "! It",
    ]


def test_words_are_found_by_their_text_where_times_slip():
    agreement = LocalAgreement()
    agreement.update(heard("we meet at the old bridge"))
    assert agreement.update(heard("we meet at the old bridge a")) == " we meet at the old bridge"
    agreement.update(heard("we meet at the old bridge at noon sharp", begin_s=0.3))
    slipped = heard("we meet at the old bridge at noon sharp", begin_s=-0.3)
    assert agreement.update(slipped) == " at noon"


def test_a_word_that_turns_out_to_be_longer_is_not_said_twice():
    found = run(
        "the co founders", "the co founders", "the co-founders said", "the co-founders said"
    )
    assert "".join(found) == " the co-founders said"
    assert "".join(
        run("a rock and", "a rock and", "a rock-and-roll band", "a rock-and-roll band")
    ) in (" a rock-and-roll band", " a rock and-roll band")


def test_words_that_did_not_stay_are_counted():
    agreement = LocalAgreement()
    for text in ("a quay in", "a key to the", "a key to the gate"):
        agreement.update(heard(text))
    assert agreement.changed == 2


def test_audio_is_cut_behind_a_sentence_or_in_the_longest_pause():
    agreement = LocalAgreement()
    assert agreement.cut(0.0) is None
    for _ in "ab":
        agreement.update(heard("It rains. We stay here and"))
    assert agreement.cut(0.0) == pytest.approx(0.95)
    assert agreement.cut(1.0) > 1.0, "a cut that frees little is none"
    assert agreement.drop(0.95) == " It rains."
    agreement.words[2] = Word(2.5, 2.9, " here", 0.9)
    assert agreement.cut(0.0) == pytest.approx(2.2)
    assert agreement.drop(9.0) == " We stay here" and agreement.cut(0.0) is None


def test_words_of_one_character_and_marks_alone_are_words():
    assert "".join(run("好 。", "好 。 吗", "好 。 吗")).split() == ["好", "。", "吗"]
    assert "".join(run("कि", "का")).split() == ["का"]


words = strategies.lists(strategies.sampled_from(["a", "b,", "C", "d.", "-"]), max_size=8)


@hypothesis.settings(derandomize=True, deadline=None, database=None)
@hypothesis.given(strategies.lists(words, max_size=6))
def test_what_is_final_is_told_once_and_in_order(hypotheses):
    agreement = LocalAgreement()
    told = "".join(agreement.update(heard(" ".join(words))) for words in hypotheses)
    told += agreement.finish()
    final = "".join(word.word for word in agreement.words)
    assert told.startswith(final) and not told[len(final) :].strip(".,")
    assert agreement.finish() == ""


def test_a_word_goes_on_at_the_mark_to_which_it_is_final():
    agreement = LocalAgreement([Word(2.3, 3.0, " a", 0.9)])
    agreement.update([Word(1.0, 4.0, " a-a", 0.9), Word(4.2, 4.6, " now", 0.9)])
    rest = agreement.pending[0]
    assert (rest.word, rest.start, rest.end) == ("-a", 2.5, 4.0)
