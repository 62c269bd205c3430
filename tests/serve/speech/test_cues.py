"""Where subtitles are split, and how long each cue is shown."""

import dataclasses
import itertools

import pytest

from serve.contract.errors import OptionError
from serve.contract.messages import Segment, Word
from serve.speech.cues import (
    DEFAULT,
    MAX_CUE_S,
    MIN_CUE_S,
    READING_SPEED,
    CueOptions,
    check_bounds,
    split,
    width_of,
)

LONG = (
    " It is a truth universally acknowledged, that a single man in possession of a good fortune,"
    " must be in want of a wife."
)


def segment(start, end, text, words=None):
    return Segment(start, end, text, (), None, None, 0.0, 1.0, words=words)


def spoken(*words):
    """A segment of words, each a text with its start and end."""
    said = tuple(Word(start, end, text, 1.0) for text, start, end in words)
    return segment(said[0].start, said[-1].end, "".join(word.word for word in said), said)


def evenly(text, start=0.0, each_s=0.3):
    """A segment in which each word takes as long."""
    words = text.split()
    times = [start + number * each_s for number in range(len(words) + 1)]
    return spoken(*((f" {word}", *times[i : i + 2]) for i, word in enumerate(words)))


def texts(cues):
    """Each cue's lines."""
    return [
        ["".join(" " * one.space + one.text for one in line).strip() for line in cue.lines]
        for cue in cues
    ]


def cut(*segments, duration=3600.0, **options):
    return split(segments, CueOptions(**options), duration)


def test_no_segments_have_no_cues():
    assert cut() == [] == cut(segment(0.0, 1.0, "  "))


def test_a_short_segment_is_a_cue_of_its_own_times():
    (cue,) = cut(segment(1.0, 2.5, " Hello & goodbye."))
    assert (cue.start, cue.end) == (1.0, 2.5) and texts([cue]) == [["Hello & goodbye."]]


@pytest.mark.parametrize("one", [segment(0.0, 10.0, LONG), evenly(LONG)], ids=["time", "words"])
def test_long_text_is_split_at_clauses_into_two_lines_of_42(one):
    assert texts(cut(one)) == [
        ["It is a truth universally acknowledged,"],
        ["that a single man in possession of a", "good fortune, must be in want of a wife."],
    ]


def test_a_segments_time_is_shared_out_by_width():
    first, second = cut(
        segment(10.0, 20.0, " One two three four, five six seven."),
        max_line_width=20,
        max_line_count=1,
    )
    assert texts([first, second]) == [["One two three four,"], ["five six seven."]]
    assert first.start == 10.0 and first.end == second.start and second.end == 20.0
    assert first.end == pytest.approx(10 + 10 * 20 / 36)


def test_little_text_does_not_fill_a_long_segment():
    (cue,) = cut(segment(0.0, 30.0, " Thank you."))
    assert cue.start == 0.0 and 1.0 < cue.end < 4.0


def test_a_cue_ends_where_somebody_pauses():
    words = evenly("we went to the house"), evenly("and nobody was there", start=3.5)
    assert texts(cut(*words)) == [["we went to the house"], ["and nobody was there"]]
    together = evenly("we went to the house and nobody was there")
    assert texts(cut(together)) == [["we went to the house and nobody was there"]]


def test_a_cue_goes_over_the_end_of_a_segment_within_a_sentence():
    two = evenly("He went to the", each_s=0.2), evenly("house.", start=0.8)
    assert texts(cut(*two)) == [["He went to the house."]]


@pytest.mark.parametrize(
    "text",
    [
        "I told you that my good old friend Mr. Bennet and all of his five daughters are here.",
        "He said that he would come to see us at about 9 a.m. on every single Monday of the year.",
    ],
)
def test_the_dot_of_an_abbreviation_is_no_end_of_a_sentence(text):
    shown = texts(cut(evenly(text, each_s=0.45)))
    dots = tuple(word for word in text.split()[:-1] if word.endswith("."))
    assert len(shown) > 1 and not any(lines[-1].endswith(dots) for lines in shown)


@pytest.mark.parametrize("mark", "।॥۔።။།։؟")
def test_sentences_end_with_the_marks_of_their_scripts(mark):
    one, two = ["ab"] * 9, ["cd"] * 9
    shown = texts(cut(evenly(" ".join([*one, f"ab{mark}", *two, f"cd{mark}"]), each_s=0.45)))
    assert len(shown) == 2 and shown[0][-1].endswith(mark)


def test_a_short_cue_stays_until_it_was_read_but_goes_before_the_next():
    alone, following = cut(spoken((" Yes.", 0.0, 0.2)), evenly("That is so.", start=5.0))
    assert alone.end == pytest.approx(MIN_CUE_S)
    soon, following = cut(
        spoken((" Yes.", 0.0, 0.2)), evenly("But no.", start=0.8), max_words_per_line=2
    )
    assert 0.6 < soon.end < following.start == 0.8
    quick = spoken((" internationalisation of organisations", 0.0, 0.5))
    (cue,) = cut(quick)
    assert cue.end == pytest.approx(len("internationalisation of organisations") / READING_SPEED)
    assert cut(quick, duration=1.0)[0].end == 1.0  # not beyond the audio


def test_no_cue_stays_longer_than_the_most():
    (cue,) = cut(spoken((" Ah!", 0.0, 20.0)))
    assert cue.end == MAX_CUE_S
    slow = evenly("one two three four five six seven eight nine ten", each_s=1.2)
    assert all(cue.end - cue.start <= MAX_CUE_S + 1e-6 for cue in cut(slow))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_line_width": 20},
        {"max_line_count": 1},
        {"max_words_per_line": 3},
        {"max_line_width": 4},
    ],
)
def test_all_text_is_shown_in_its_order_within_the_limits(options):
    asked = CueOptions(**options)
    parts = evenly(LONG, each_s=0.15), segment(3.5, 9.0, LONG), segment(8.9, 9.5, " Overlapping.")
    cues = cut(*parts, **options)
    shown = "".join("".join(lines) for lines in texts(cues)).replace(" ", "")
    assert shown == (LONG * 2 + "Overlapping.").replace(" ", "")
    for cue in texts(cues):
        assert len(cue) <= asked.max_line_count
        assert all(width_of(line) <= asked.max_line_width for line in cue)
        assert sum(len(line.split()) for line in cue) <= (asked.max_words_per_line or 99)
    assert all(one.start < one.end <= other.start for one, other in itertools.pairwise(cues))


def test_words_that_take_no_time_are_shown():
    cues = cut(spoken((" a", 1.0, 1.0), (" b", 1.0, 1.0)), max_words_per_line=1)
    assert len(cues) == 2 and all(cue.end > cue.start for cue in cues)


def test_east_asian_characters_count_twice_and_lines_begin_with_no_mark():
    text = "すると、ブランコノリは突然泣き始めた、"
    text += "すっかり驚いた工業主は飛び上がり、一体どうしたのかと言った。"
    cues = texts(cut(segment(0.0, 10.0, text)))
    assert "".join(itertools.chain(*cues)) == text
    lines = list(itertools.chain(*cues))
    assert all(width_of(line) <= 42 and line[0] not in "、。ーった" for line in lines)
    assert cues[0][-1].endswith("、")  # at the end of a clause
    said = spoken(*((char, i * 0.2, i * 0.2 + 0.2) for i, char in enumerate(text)))
    assert "".join(itertools.chain(*texts(cut(said)))) == text


def test_korean_is_split_between_words_alone():
    text = " 모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다"
    lines = list(itertools.chain(*texts(cut(segment(0.0, 6.0, text)))))
    assert len(lines) > 1 and " ".join(lines) == text.strip()


def test_latin_words_among_chinese_stay_whole():
    text = "我们使用OpenAI的模型把声音变成文字然后在屏幕上显示字幕"
    for lines in texts(cut(segment(0.0, 9.0, text), max_line_width=10)):
        assert all("OpenAI" in line or not set("OpenAI") & set(line) for line in lines)


@pytest.mark.parametrize(
    ("name", "value"), [("max_line_width", 1), ("max_line_count", 0), ("max_words_per_line", 0)]
)
def test_options_have_bounds(name, value):
    with pytest.raises(OptionError, match=f"{value}; expected"):
        check_bounds(name, value)
    check_bounds(name, 50)
    assert CueOptions(max_line_width=42, max_line_count=2) == DEFAULT


LOUD = LONG.upper()


def talk(*said):
    """Segments in order of time, each of (speaker, start, text)."""
    return sorted(
        (
            dataclasses.replace(evenly(text, start), speaker=speaker)
            for speaker, start, text in said
        ),
        key=lambda one: one.start,
    )


def by_speaker(cues):
    """Each cue's text by speaker."""
    return [
        {who: " ".join(one.text for line in lines for one in line) for who, lines in cue.turns}
        for cue in cues
    ]


CONVERSATIONS = {
    "all the time": [("A", 0.0, LONG), ("B", 0.1, LOUD)],
    "a short answer": [("A", 0.0, LONG), ("B", 3.0, "Yes.")],
    "three": [("A", 0.0, LONG), ("B", 1.0, LOUD), ("C", 2.0, "Be quiet, both of you!")],
    "in turn": [("A", 0.0, "Is it?"), ("B", 0.62, "It is."), ("A", 1.3, "Oh."), ("B", 1.7, LOUD)],
    "at the end": [("A", 0.0, LONG), ("B", 9.5, "I see.")],
    "long": [("A", 9.0 * i, LONG) for i in range(9)]
    + [("B", 5 + 7.0 * i, "So?") for i in range(9)],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"max_line_count": 1}, {"max_line_width": 30}])
def test_cues_of_people_who_speak_at_once_come_in_order_and_can_be_seen(name, options):
    segments = talk(*CONVERSATIONS[name])
    cues = cut(*segments, duration=max(one.end for one in segments), **options)
    for before, after in itertools.pairwise(cues):
        assert before.start < before.end <= after.start
    assert all(cue.end - cue.start >= 0.7 - 1e-6 for cue in cues)
    for speaker in {one.speaker for one in segments}:
        said = " ".join(one.text.strip() for one in segments if one.speaker == speaker)
        shown = " ".join(cue[speaker] for cue in by_speaker(cues) if speaker in cue)
        assert shown.split() == said.split()
    for segment in segments:  # no word is shown before it is said, or long after
        own = [cue for cue in cues if segment.speaker in dict(cue.turns)]
        assert any(cue.start <= segment.start + 0.7 and segment.start < cue.end for cue in own)


def test_who_speaks_at_once_has_a_line_of_one_cue():
    both = cut(*talk(("A", 0.0, "How are you today?"), ("B", 0.9, "Fine, thanks.")))
    assert by_speaker(both) == [{"A": "How are you today?", "B": "Fine, thanks."}]


def test_who_speaks_after_the_other_has_a_cue_of_his_own():
    said = talk(("A", 0.0, "How are you today?"), ("B", 1.3, "Fine, thanks."))
    assert by_speaker(cut(*said)) == [{"A": "How are you today?"}, {"B": "Fine, thanks."}]
