"""Transcripts as text, srt, vtt, tsv and json."""

import dataclasses
import json

import pytest

from serve.contract.messages import Segment, Timings, Transcript, Word
from serve.speech.cues import CueOptions
from serve.speech.formats import render, timestamp


def transcript(*pieces):
    segments = tuple(
        Segment(start, end, text, (7, 8), -0.25, 0.01, 0.0, 1.1) for start, end, text in pieces
    )
    text = "".join(piece[2] for piece in pieces).strip()
    return Transcript(text, "en", 0.9, 4000.0, segments, Timings(0.0, 0.1, 0.2, 0.3))


TWO = transcript((0.0, 2.5, " Hello & goodbye."), (3661.0, 3662.0404, " 1 < 2\n\n--> 3"))


def test_text_is_a_line_for_each_segment():
    assert render(TWO, "a.wav", "text") == "Hello & goodbye.\n1 < 2 --> 3\n"


def test_srt_counts_blocks_and_has_commas():
    assert render(TWO, "a.wav", "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello & goodbye.\n"
        "\n"
        "2\n01:01:01,000 --> 01:01:02,040\n1 < 2 -> 3\n"
    )


def test_vtt_has_its_header_and_no_markup():
    assert render(TWO, "a.wav", "vtt") == (
        "WEBVTT\n"
        "\n"
        "00:00:00.000 --> 00:00:02.500\nHello &amp; goodbye.\n"
        "\n"
        "01:01:01.000 --> 01:01:02.040\n1 &lt; 2 -> 3\n"
    )


def test_tsv_is_as_openais_command_writes_it():
    assert render(TWO, "a.wav", "tsv") == (
        "start\tend\ttext\n0\t2500\tHello & goodbye.\n3661000\t3662040\t1 < 2 --> 3\n"
    )


def test_json_is_one_object_on_one_line():
    line = render(TWO, "mañana.wav", "json")
    assert line.count("\n") == 1 and line.endswith("\n") and "mañana" in line
    found = json.loads(line)
    assert list(found) == ["file", "text", "language", "duration", "segments"]
    assert found["duration"] == 4000.0 and found["language"] == "en"
    assert found["segments"][0] == {
        "start": 0.0,
        "end": 2.5,
        "text": " Hello & goodbye.",
        "tokens": [7, 8],
        "avg_logprob": -0.25,
        "no_speech_prob": 0.01,
        "temperature": 0.0,
        "compression_ratio": 1.1,
    }


@pytest.mark.parametrize(
    "format, expected",
    [("text", ""), ("srt", ""), ("vtt", "WEBVTT\n"), ("tsv", "start\tend\ttext\n")],
    ids=["text", "srt", "vtt", "tsv"],
)
def test_silence_is_written_too(format, expected):
    assert render(transcript(), "silence.wav", format) == expected


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (59.9996, "00:01:00.000"),  # rounds up through the minute, never to 60 s
        (0.0004, "00:00:00.000"),
        (360_000.0, "100:00:00.000"),
    ],
)
def test_times_round_to_milliseconds(seconds, expected):
    assert timestamp(seconds) == expected


SPOKEN = Segment(
    *(0.0, 2.0, " A <b c", (7,), None, None, 0.0, 1.1),
    words=(Word(0.0, 0.5, " A", 0.9), Word(0.5, 0.5, " <b", 0.8), Word(1.25, 2.0, " c", 0.7)),
)
WORDS = Transcript("A <b c", "en", None, 2.0, (SPOKEN,), Timings(0.0, 0.1, 0.2, 0.3))


def test_json_holds_confidence_where_words_have_it():
    sure = Word(0.0, 0.5, " A", 0.9, confidence=0.8)
    doubtful = Word(0.5, 1.0, " <b", 0.3, confidence=0.2, low_confidence=True)
    spoken = dataclasses.replace(SPOKEN, words=(sure, doubtful))
    whole = dataclasses.replace(WORDS, segments=(spoken,))
    (segment,) = json.loads(render(whole, "a.wav", "json"))["segments"]
    timed = {"start": 0.0, "end": 0.5, "word": " A", "probability": 0.9}
    assert segment["words"][0] == {**timed, "confidence": 0.8}
    assert segment["words"][1].items() >= {"confidence": 0.2, "low_confidence": True}.items()


def test_a_cue_has_lines_none_of_which_is_taken_for_times():
    text = render(TWO, "a.wav", "srt", CueOptions(max_line_width=9))
    assert text.startswith("1\n00:00:00,000 --> 00:00:02,500\nHello &\ngoodbye.\n\n2\n")
    assert text.endswith("\n1 < 2\n-> 3\n")


def test_the_word_that_is_being_said_is_underlined():
    """As by openai-whisper: a cue for each word, and one for each pause between two."""
    assert render(WORDS, "a.wav", "vtt", CueOptions(highlight_words=True)) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:00.500\n<u>A</u> &lt;b c\n\n"
        "00:00:00.500 --> 00:00:01.250\nA &lt;b c\n\n"
        "00:00:01.250 --> 00:00:02.000\nA &lt;b <u>c</u>\n"
    )
    text = render(WORDS, "a.wav", "srt", CueOptions(True, max_words_per_line=2))
    assert "\n<u>A</u> <b\n" in text and text.endswith("\n<u>c</u>\n")


def test_a_word_that_is_marked_breaks_no_line():
    text = render(TWO, "a.wav", "vtt", CueOptions(highlight_words=True, max_line_width=9))
    assert "\nHello &amp;\n<u>goodbye.</u>\n" in text and "\n1 &lt; 2\n<u>-></u> 3\n" in text


def talk(*pieces):
    """A transcript of (speaker, start, text), each of a second."""
    made = transcript(*((start, start + 1.0, text) for _, start, text in pieces))
    segments = (
        dataclasses.replace(segment, speaker=speaker)
        for segment, (speaker, _, _) in zip(made.segments, pieces, strict=True)
    )
    return dataclasses.replace(made, segments=tuple(segments))


TALK = talk(
    ("A", 0.0, " Hello."), ("A", 1.0, " It is late."), ("B", 2.0, " Yes,"), ("A", 2.5, " No.")
)


def test_text_names_whoever_begins():
    assert render(TALK, "a.wav", "text") == "A: Hello.\nIt is late.\nB: Yes,\nA: No.\n"


def test_srt_names_whoever_begins_and_whoever_speaks_at_once():
    blocks = render(TALK, "a.wav", "srt").strip().split("\n\n")
    assert [block.split("\n")[2:] for block in blocks] == [
        ["A: Hello. It is late."],
        ["B: Yes,", "A: No."],
    ]


def test_srt_names_who_goes_on_alone():
    pieces = [("A", 0.0, " Hello."), ("B", 0.5, " Hello."), ("B", 3.0, " Well?"), ("B", 6.0, " A!")]
    blocks = render(talk(*pieces), "", "srt").strip().split("\n\n")
    assert [block.split("\n")[2:] for block in blocks] == [
        ["A: Hello.", "B: Hello."],
        ["B: Well?"],
        ["A!"],
    ]


def test_vtt_marks_the_voice_of_each_line():
    blocks = render(TALK, "a.wav", "vtt").strip().split("\n\n")[1:]
    assert [block.split("\n")[1:] for block in blocks] == [
        ["<v A>Hello. It is late."],
        ["<v B>Yes,</v>", "<v A>No.</v>"],
    ]


def test_words_that_two_people_say_at_once_are_both_underlined():
    def one(speaker, start, text):
        said = (Word(start, start + 1.0, text, 1.0),)
        return dataclasses.replace(SPOKEN, text=text, words=said, speaker=speaker)

    both = dataclasses.replace(WORDS, segments=(one("A", 0.0, " Yes"), one("B", 0.5, " no")))
    text = render(both, "", "srt", CueOptions(highlight_words=True))
    assert [block.split("\n")[2:] for block in text.strip().split("\n\n")] == [
        ["A: <u>Yes</u>", "B: no"],
        ["A: <u>Yes</u>", "B: <u>no</u>"],
        ["A: Yes", "B: <u>no</u>"],
    ]


def test_a_name_makes_no_markup_and_no_times():
    odd = talk(("A<b>\n\n0 --> 1 & Co", 0.0, " Hello."))
    assert render(odd, "", "srt").split("\n")[2:] == ["A<b> 0 -> 1 & Co: Hello.", ""]
    assert render(odd, "", "vtt").split("\n")[3] == "<v A&lt;b&gt; 0 -&gt; 1 &amp; Co>Hello."
