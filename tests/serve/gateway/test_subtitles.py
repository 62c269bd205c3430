"""The page's transcripts as subtitles."""

import json

import pytest

from serve.gateway.page import subtitles

SEGMENTS = [
    {
        "start": 0,
        "end": 2.0,
        "text": " Hello, <you>.",
        "words": [
            {"start": 0.0, "end": 0.5, "word": "Hello,"},
            {"start": 0.5, "end": 1.5, "word": "<you>."},
        ],
    },
    {"start": 5.0, "end": 6.0, "text": "Corrected by hand.", "words": None},
]


def ask(running, headers=None, **fields):
    body = {"format": "vtt", "duration": 6.5, "segments": SEGMENTS, **fields}
    status, _, text = running.ask("POST", "/subtitles", json.dumps(body), headers)
    return status, text.decode()


def test_a_transcript_comes_back_as_subtitles(running):
    assert ask(running) == (
        200,
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello, &lt;you>.\n\n"
        "00:00:05.000 --> 00:00:06.000\nCorrected by hand.\n",
    )
    assert ask(running, format="srt", segments=[])[1] == ""


def test_words_have_the_spaces_of_their_text(running):
    words = [{"start": i, "end": i + 1, "word": word} for i, word in enumerate("声音と")]
    segments = [{"start": 0, "end": 3, "text": "声音と", "words": words}]
    assert ask(running, format="srt", segments=segments)[1].endswith("\n声音と\n")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"format": "docx"}, "format"),
        ({"segments": [{"start": 0, "end": 1}]}, "text is missing"),
        ({"duration": "long"}, "expected a number"),
        ({"segments": [{"start": 0, "end": 1, "text": "a" * 300_001}]}, "300001 characters"),
    ],
)
def test_what_is_no_transcript_is_refused(running, fields, told):
    status, text = ask(running, **fields)
    assert status == 400 and told in text


def test_a_transcript_that_is_too_large_is_refused(running, monkeypatch):
    monkeypatch.setattr(subtitles, "MOST_BYTES", 100)
    assert ask(running)[0] == 413
    assert running.ask("GET", "/subtitles")[0] == 405
    assert not running.gateway.door.admission.requests
