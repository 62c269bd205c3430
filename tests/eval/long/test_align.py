"""What became of each sentence, on texts with known mistakes."""

import dataclasses

import pytest

from eval.accuracy.predictions import TimedText
from eval.accuracy.score import Counts
from eval.long.compose import Stretch, recording
from eval.long.score import score_recording

SAID = (
    "The cat sat on the mat.",
    "My uncle sells old clocks.",
    "Rain fell all night long.",
    "Nobody answered the door bell.",
)


@pytest.fixture
def truth():
    """Four sentences of 2 s at 1, 5, 40 and 60 s; tones before the third, noise before the last."""
    stretches, end_s = [], 0.0
    for what, at_s, text in zip(
        ("silence", "silence", "tones", "noise"), (1, 5, 40, 60), SAID, strict=True
    ):
        stretches.append(Stretch(what, end_s, at_s))
        end_s = at_s + 2.0
        stretches.append(Stretch("speech", at_s, end_s, text, "en"))
    return recording("r.flac", "tones", [*stretches, Stretch("silence", end_s, 70.0)])


def segments(*texts, windows=(0, 0, 0, 0)):
    spans = ((1, 3), (5, 7), (40, 42), (60, 62))
    return [
        TimedText(*span, text, window)
        for span, text, window in zip(spans, texts, windows, strict=True)
        if text
    ]


def test_nothing_is_wrong_where_all_was_heard(truth):
    found = score_recording(truth, segments(*SAID))
    assert [sentence.words for sentence in found.sentences] == [
        Counts(hits=n) for n in (6, 5, 5, 5)
    ]
    assert all(sentence.characters.errors == 0 for sentence in found.sentences)
    assert (found.lost_in_stretches, found.repeated, found.made_up, found.unspoken) == (0, 0, 0, 0)
    assert not any(sentence.at_cut for sentence in found.sentences)


def test_a_lost_sentence_is_a_stretch_and_a_lost_word_is_not(truth):
    found = score_recording(truth, segments("The cat sat on a.", "", *SAID[2:]))
    assert [s.words.deletions for s in found.sentences] == [1, 5, 0, 0]
    assert found.sentences[0].words.substitutions == 1
    assert found.lost_in_stretches == 6  # the lost word stands before the lost sentence
    assert found.sentences[1].characters == Counts(deletions=25)


def test_what_is_said_twice_is_told_from_what_is_made_up(truth):
    twice = f"{SAID[1]} My uncle sold old clocks."
    found = score_recording(truth, segments(SAID[0], twice, *SAID[2:]))
    assert (found.repeated, found.made_up) == (5, 0)
    loop = f"{SAID[2]} {'night long ' * 8}"
    found = score_recording(truth, segments(*SAID[:2], loop, SAID[3]))
    assert (found.repeated, found.made_up) == (16, 0)
    found = score_recording(truth, segments(*SAID[:3], f"{SAID[3]} Thank you for watching."))
    assert (found.repeated, found.made_up) == (0, 4)
    assert found.sentences[3].words.insertions == 4


def test_text_where_nobody_speaks_is_counted(truth):
    extra = [
        TimedText(20.0, 30.0, " La la la.", 0),
        TimedText(62.5, 90.0, " Bye.", 0),
        TimedText(50.0, 60.2, " Hm", 0),
        TimedText(8.0, 41.0, " All.", 0),  # reaches into a sentence
    ]
    found = score_recording(truth, [*segments(*SAID), *extra])
    assert found.unspoken == 8 + 3 + 2


def test_where_all_is_speech_a_moment_that_touches_no_sentence_counts_for_nothing(truth):
    speech = tuple(stretch for stretch in truth.stretches if stretch.what == "speech")
    only = dataclasses.replace(truth, stretches=speech)
    found = score_recording(only, [*segments(*SAID), TimedText(50.0, 50.2, " Hm", 0)])
    assert found.unspoken == 0


def test_sentences_beside_a_cut_are_known_where_windows_are(truth):
    found = score_recording(truth, segments(*SAID, windows=(0, 0, 1, 1)))
    assert [s.at_cut for s in found.sentences] == [False, True, True, False]
    # What was lost between two windows was lost at a cut.
    found = score_recording(truth, segments(SAID[0], "", *SAID[2:], windows=(0, 0, 1, 1)))
    assert [s.at_cut for s in found.sentences] == [True, True, True, False]
    found = score_recording(truth, segments(*SAID, windows=(None,) * 4))
    assert not any(s.at_cut for s in found.sentences)


def test_a_system_that_says_nothing_lost_everything(truth):
    found = score_recording(truth, [])
    assert found.lost_in_stretches == 21
    assert all(s.words.hits == 0 for s in found.sentences)
