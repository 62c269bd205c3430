"""Who speaks when, in conversations: clips of people, one after another."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from serve.contract.errors import RequestError
from serve.speakers.diarize import Diarizer, KnownSpeaker
from serve.speech.rate import SAMPLE_RATE
from tests.serve.speech.sounds import decode

HUMAN = Path(__file__).parents[2] / "data" / "human"
WOMAN, MAN = "kathleen", "S0150"


@functools.cache
def clips(speaker):
    """A speaker's clips of a few seconds."""
    lines = (HUMAN / "manifest.jsonl").read_text("utf-8").splitlines()
    entries = [one for one in map(json.loads, lines) if one["speaker"] == speaker]
    files = [one["file"] for one in entries if 3.0 <= one["duration"] <= 6.0]
    return [decode((HUMAN / file).read_bytes())[0] for file in files[:6]]


def quiet(seconds):
    return np.zeros(round(seconds * SAMPLE_RATE), np.float32)


@pytest.fixture(scope="module")
def diarizer():
    return Diarizer("cpu")


@pytest.fixture(scope="module")
def conversation():
    """Both in turn, three clips each, and where each clip begins and ends."""
    parts, spans, at = [quiet(0.5)], [], SAMPLE_RATE // 2
    for woman, man in zip(clips(WOMAN)[:3], clips(MAN)[:3], strict=True):
        for name, samples in ((WOMAN, woman), (MAN, man)):
            spans.append((at / SAMPLE_RATE, (at + len(samples)) / SAMPLE_RATE, name))
            parts += [samples, quiet(0.4)]
            at += len(samples) + round(0.4 * SAMPLE_RATE)
    return np.concatenate(parts), spans


def speakers(turns):
    return {turn.speaker for turn in turns}


def spoken(turns, start, end):
    """Seconds of each speaker in between."""
    seconds = {}
    for turn in turns:
        inside = max(0.0, min(turn.end_s, end) - max(turn.start_s, start))
        seconds[turn.speaker] = seconds.get(turn.speaker, 0.0) + inside
    return seconds


def test_two_people_are_told_apart(diarizer, conversation):
    samples, spans = conversation
    turns = diarizer.diarize(samples)
    assert turns[0].speaker == "A" and speakers(turns) == {"A", "B"}
    assert list(turns) == sorted(turns, key=lambda turn: turn.start_s)
    for start, end, name in spans:
        seconds, mine = spoken(turns, start, end), "A" if name == WOMAN else "B"
        assert seconds[mine] > 0.5 * (end - start)
        assert sum(seconds.values()) - seconds[mine] < 0.2 * (end - start)


@pytest.mark.nightly
def test_blocks_say_what_the_whole_says(diarizer, conversation):
    samples, _ = conversation
    blocks = [samples[i : i + 33_333] for i in range(0, len(samples), 33_333)]
    assert diarizer.diarize(iter(blocks)) == diarizer.diarize(samples)


@pytest.mark.nightly
def test_the_number_of_speakers_may_be_told(diarizer, conversation):
    samples, _ = conversation
    assert len(speakers(diarizer.diarize(samples, min_speakers=1, max_speakers=1))) == 1
    assert len(speakers(diarizer.diarize(samples, min_speakers=3))) == 3
    assert len(speakers(diarizer.diarize(samples, max_speakers=1))) == 1


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.5, 12.0])
def test_silence_has_no_turns(diarizer, seconds):
    assert diarizer.diarize(quiet(seconds)) == ()


def test_half_a_second_is_enough(diarizer):
    middle = clips(WOMAN)[0][SAMPLE_RATE : SAMPLE_RATE * 3 // 2]
    (turn,) = diarizer.diarize(middle)
    assert 0.0 <= turn.start_s < turn.end_s <= 0.5


@pytest.mark.nightly
def test_one_reader_is_one_speaker(diarizer):
    assert speakers(diarizer.diarize(np.concatenate(clips(WOMAN)))) == {"A"}


@pytest.mark.nightly
def test_pauses_between_words_are_nobodys(diarizer):
    """The network alone hears one speaker all through: 10 s, of which 6.4 are speech."""
    rng = np.random.default_rng(0)
    speech = np.concatenate(clips("mmxg"))[: 8 * round(0.8 * SAMPLE_RATE)]
    parts = [part for words in np.split(speech, 8) for part in (words, quiet(0.5))]
    room = rng.normal(0.0, 3e-4, 10 * SAMPLE_RATE).astype(np.float32)
    turns = diarizer.diarize(np.concatenate(parts)[: len(room)] + room)
    for middle in 1.05 + 1.3 * np.arange(7):
        assert not any(turn.start_s < middle < turn.end_s for turn in turns)
    assert speakers(turns) == {"A"} and 5.5 < sum(t.end_s - t.start_s for t in turns) < 7.0


def test_who_is_known_has_a_name(diarizer, conversation):
    samples, spans = conversation
    known = [KnownSpeaker("Kathleen", clips(WOMAN)[4]), KnownSpeaker("Li", clips(MAN)[4])]
    assert speakers(diarizer.diarize(samples, known=known)) == {"Kathleen", "Li"}
    turns = diarizer.diarize(samples, known=known[1:])
    assert speakers(turns) == {"A", "Li"}
    start, end, _ = spans[1]
    assert spoken(turns, start, end)["Li"] > 0.5 * (end - start)


@pytest.mark.nightly
def test_a_known_speaker_who_is_not_heard_names_nobody(diarizer):
    turns = diarizer.diarize(
        np.concatenate(clips(WOMAN)[:2]), known=[KnownSpeaker("Li", clips(MAN)[4])]
    )
    assert speakers(turns) == {"A"}


@pytest.mark.nightly
def test_a_letter_is_never_somebody_elses_name(diarizer, conversation):
    turns = diarizer.diarize(conversation[0], known=[KnownSpeaker("A", clips(MAN)[4])])
    assert turns[0].speaker == "B" and speakers(turns) == {"A", "B"}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (lambda: quiet(3.0), "'Ann' has no speech"),
        (lambda: clips(WOMAN)[0][:SAMPLE_RATE], r"'Ann' lasts 1\.0 s; expected 2 to 10 s"),
        (lambda: np.concatenate([clips(WOMAN)[0], clips(MAN)[0]]), "'Ann' has two voices"),
    ],
)
def test_a_reference_holds_one_voice(diarizer, reference, said):
    with pytest.raises(RequestError, match=said):
        diarizer.diarize(quiet(1.0), known=[KnownSpeaker("Ann", reference())])
