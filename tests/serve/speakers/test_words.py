"""Words have the speakers of the turns they are said in, and segments break where these change."""

import dataclasses

import pytest

from serve.contract.messages import Segment, Word
from serve.speakers.diarize import SpeakerTurn
from serve.speakers.words import label, letter_speakers, split


def spoken(text, start=0.0, each=0.5):
    return tuple(
        Word(start + i * each, start + (i + 1) * each, f" {word}", 0.9)
        for i, word in enumerate(text.split())
    )


def segment(words):
    text = "".join(word.word for word in words)
    return Segment(words[0].start, words[-1].end, text, (1, 2), -0.1, 0.0, 0.0, 1.0, words)


def turns(*said):
    return [SpeakerTurn(*one) for one in said]


def test_a_word_is_said_by_who_speaks_for_most_of_it():
    told = label(spoken("Yes. No. Why?"), turns((0.0, 0.7, "A"), (0.7, 2.0, "B")))
    assert told == ["A", "B", "B"]


def test_outside_of_turns_the_nearest_speaks():
    words = spoken("one two three four")
    assert label(words, turns((0.5, 0.8, "A"), (1.6, 3.0, "B"))) == ["A", "A", "B", "B"]
    assert label(words, []) == [None] * 4


def test_where_two_speak_who_spoke_before_goes_on():
    words = spoken("one two three four")
    overlapping = turns((0.0, 2.0, "B"), (0.5, 2.0, "A"))
    assert label(words, overlapping) == ["B"] * 4


def test_a_long_turn_before_short_ones_is_not_forgotten():
    words = spoken("one two three four", start=8.0)
    assert label(words, turns((0.0, 10.0, "A"), (1.0, 2.0, "B"), (3.0, 4.0, "B"))) == ["A"] * 4


@pytest.mark.parametrize("alone", [0, 2, 5])
def test_a_single_word_in_a_sentence_is_not_somebody_elses(alone):
    words = spoken("one two three four five six.")
    begin = words[alone].start
    told = turns((0.0, begin, "A"), (begin, begin + 0.5, "B"), (begin + 0.5, 3.0, "A"))
    assert label(words, [turn for turn in told if turn.end_s > turn.start_s]) == ["A"] * 6


def test_a_sentence_of_one_word_may_be():
    told = turns((0.0, 1.0, "A"), (1.0, 1.5, "B"), (1.5, 2.5, "A"))
    assert label(spoken("Is it? Yes. I see."), told) == ["A", "A", "B", "A", "A"]


def decode(tokens):
    """Each token is a letter, of which words have as many as they are long."""
    return "".join(map(chr, tokens))


def parts(segments, said):
    return list(split(segments, said, decode))


def test_segments_break_where_the_speaker_changes():
    words = spoken("How are you? I am well.")
    one = dataclasses.replace(segment(words), tokens=tuple(map(ord, segment(words).text)))
    question, answer = parts([one], turns((0.0, 1.5, "A"), (1.5, 3.0, "B")))
    assert (question.speaker, question.text) == ("A", " How are you?")
    assert (question.start, question.end) == (0.0, 1.5)
    assert (answer.speaker, answer.text) == ("B", " I am well.")
    assert (answer.start, answer.end) == (1.5, 3.0)
    assert question.words + answer.words == one.words
    assert [decode(part.tokens) for part in (question, answer)] == [question.text, answer.text]


def test_a_segment_of_one_speaker_stays_as_it_is():
    one, other = segment(spoken("Good day.")), segment(spoken("And you?", start=1.0))
    said = turns((0.0, 1.0, "A"), (1.0, 2.0, "B"))
    assert parts([one, other], said) == [
        dataclasses.replace(one, speaker="A"),
        dataclasses.replace(other, speaker="B"),
    ]
    assert parts([one], []) == [one]


def test_a_segment_without_words_is_its_main_speakers():
    one = Segment(0.0, 4.0, "Good day. And you?", (1,), None, None, 0.0, 1.0)
    said = turns((0.0, 1.0, "A"), (1.0, 4.0, "B"))
    assert parts([one], said) == [dataclasses.replace(one, speaker="B")]


def test_letters_come_in_the_order_of_the_answer():
    said = [dataclasses.replace(segment(spoken("Yes.")), speaker=one) for one in "CACDB"]
    assert [one.speaker for one in letter_speakers(said, ())] == ["A", "B", "A", "C", "D"]
    assert [one.speaker for one in letter_speakers(said, ("B", "D"))] == ["A", "C", "A", "D", "B"]
    nobody = dataclasses.replace(said[0], speaker=None)
    assert letter_speakers([nobody], ()) == [nobody]
