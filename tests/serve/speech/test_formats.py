"""Transcripts as text, srt, vtt and json."""

import json

import pytest

from serve.messages import Segment, Timings, Transcript
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
    "format, expected", [("text", ""), ("srt", ""), ("vtt", "WEBVTT\n")], ids=["text", "srt", "vtt"]
)
def test_silence_is_written_too(format, expected):
    assert render(transcript(), "silence.wav", format) == expected


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.0, "00:00:00.000"),
        (59.9996, "00:01:00.000"),  # rounds up through the minute, never to 60 s
        (3599.9999, "01:00:00.000"),
        (0.0004, "00:00:00.000"),
        (360_000.0, "100:00:00.000"),
    ],
)
def test_times_round_to_milliseconds(seconds, expected):
    assert timestamp(seconds) == expected
