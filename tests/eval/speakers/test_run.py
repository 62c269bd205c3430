"""What is composed, what is read, and what a measurement tells and complains of."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

import eval.speakers.run
from build.clips import load_clips
from eval.accuracy.score import Counts
from eval.speakers.conversations import (
    ConversationPlan,
    Utterance,
    compose,
    read_recordings,
    to_rttm,
    to_stm,
)
from eval.speakers.run import compare_turns, cp_counts, speakers
from serve.contract.errors import ConfigError
from serve.speakers.diarize import SpeakerTurn
from serve.speech.rate import SAMPLE_RATE
from tests.eval.fakes import printed

OPTIONS = {"half": "report", "seed": 0, "device": "cpu"}
TURNS = (SpeakerTurn(0.5, 2.0, "ann"), SpeakerTurn(1.5, 3.25, "bob"))
SAID = (Utterance("ann", 0.5, 2.0, "good morning"), Utterance("bob", 1.5, 3.25, ""))


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("eval.speakers.conversations.CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def clips():
    wanted = ("kathleen", "S0150", "kerstin")
    found = [clip for clip in load_clips(eval.speakers.run.CLIPS[0]) if clip.half == "report"]
    return [clip for name in wanted for clip in found if clip.speaker == name][:100]


@pytest.fixture
def meetings(tmp_path):
    """A folder of two recordings, of which the first is of the half "choose"."""
    folder = tmp_path / "meetings"
    folder.mkdir()
    for name in ("first", "second"):
        soundfile.write(folder / f"{name}.wav", np.zeros(4 * SAMPLE_RATE), SAMPLE_RATE)
        (folder / f"{name}.rttm").write_text(to_rttm(name, TURNS))
    soundfile.write(folder / "without.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    return folder


def test_recordings_are_read_as_they_are_written(meetings):
    (meetings / "first.rttm").write_text("; a comment\n" + to_rttm("first", TURNS))
    (meetings / "second.stm").write_text(";; a comment\n" + to_stm("second", reversed(SAID)))
    recordings = read_recordings(meetings)
    assert [(one.name, one.turns) for one in recordings] == [("first", TURNS), ("second", TURNS)]
    assert [one.utterances for one in recordings] == [(), SAID]


def test_malformed_references_are_refused(meetings, tmp_path):
    (meetings / "second.stm").write_text("x 1 ann soon 2.0 hi\n")
    with pytest.raises(ConfigError, match=r"second.stm:1: got 'x 1 ann soon 2.0 hi'; expected an"):
        read_recordings(meetings)
    (meetings / "first.rttm").write_text("\nSPEAKER x 1 soon 2.0 <NA> <NA> ann\n")
    with pytest.raises(ConfigError, match=r"first.rttm:2: got 'SPEAKER x 1 soon .*; expected a tu"):
        read_recordings(meetings)
    with pytest.raises(ConfigError, match="has no recordings"):
        read_recordings(tmp_path)


@pytest.mark.nightly
def test_a_conversation_is_what_its_plan_says(clips):
    plan = [ConversationPlan(2, 0.4, one_group=False), ConversationPlan(1, 0.2, one_group=True)]
    one, both = compose(plan, 3, clips)
    speakers = [{turn.speaker for turn in found.turns} for found in (one, both)]
    assert list(map(len, speakers)) == [1, 2]
    samples, rate = soundfile.read(both.path)
    assert rate == SAMPLE_RATE and len(samples) >= 0.4 * 60 * rate
    assert 0 <= both.turns[0].start_s < both.turns[-1].end_s <= len(samples) / rate
    for turn in both.turns:
        inside = samples[round(turn.start_s * rate) : round(turn.end_s * rate)]
        assert np.abs(inside).max() > 3 * np.median(np.abs(samples[: rate // 5]))
    assert {utterance.speaker for utterance in both.utterances} == speakers[1]
    texts = {" ".join(clip.text.split()) for clip in clips}
    for utterance in both.utterances:
        assert utterance.text in texts and utterance.start_s < utterance.end_s
    assert compose(plan, 3, clips) == [one, both]


def test_a_half_without_recordings_is_refused(meetings, run_of):
    (meetings / "second.rttm").unlink()
    with pytest.raises(ConfigError, match="meetings has no recording of the half report"):
        speakers(run_of(), recordings=meetings, **OPTIONS, texts=False)


@pytest.fixture
def measured(monkeypatch, meetings, run_of):
    """Measures a system that says some turns of each recording."""

    def measure(told, texts=False):
        diarizer = SimpleNamespace(diarize=lambda samples: told)
        monkeypatch.setattr(eval.speakers.run, "Diarizer", lambda device: diarizer)
        monkeypatch.setattr(eval.speakers.run, "compose", lambda *_: read_recordings(meetings))
        run = run_of(command="speakers")
        result = speakers(run, recordings=meetings, **OPTIONS, texts=texts)
        run.keep(result)
        return result, json.loads(run.path.read_text())

    return measure


def test_what_is_right_passes_and_what_is_wrong_fails(measured):
    result, record = measured(TURNS)
    assert [check.passed for check in result.checks] == [True, True]
    assert record["verdict"] == "passed"
    (conversations, recordings) = record["figures"]["sets"]
    assert (conversations["count"], conversations["counted"], recordings["count"]) == (2, 2, 1)
    assert conversations["rate"] == recordings["rate"] == 0.0
    assert "| conversations |" in printed(result)
    result, _ = measured(TURNS[:1])
    assert [check.passed for check in result.checks] == [False, False]


def transcribe(request):
    assert request.diarize and request.multilingual
    return SimpleNamespace(segments=[SimpleNamespace(text="Good evening.", speaker="B")])


def test_texts_are_held_against_what_each_speaker_says(measured, meetings, monkeypatch):
    monkeypatch.setattr(eval.speakers.run, "prepare_engine", lambda *_: None)
    transcriber = contextlib.nullcontext(SimpleNamespace(transcribe=transcribe))
    monkeypatch.setattr(eval.speakers.run, "open_transcriber", lambda _: transcriber)
    (meetings / "second.stm").write_text(to_stm("second", SAID))
    result, record = measured(TURNS, texts=True)
    edits = {"substitutions": 1, "deletions": 0, "insertions": 0, "hits": 1}
    assert record["figures"]["texts"] == {"second": edits, "all": edits}
    assert "cpWER" in printed(result) and "50.0 %" in printed(result)


# ---------------------------------------------------------------- scores


def turns(*said):
    return [SpeakerTurn(*one) for one in said]


RIGHT = turns((0.0, 4.0, "ann"), (4.0, 8.0, "bob"), (7.0, 10.0, "ann"))  # 11 s of speech


@pytest.mark.parametrize(
    ("told", "missed", "invented", "confused"),
    [
        (turns((0.0, 4.0, "B"), (4.0, 8.0, "A"), (7.0, 10.0, "B")), 0.0, 0.0, 0.0),  # names
        ([], 11.0, 0.0, 0.0),
        (turns((0.0, 10.0, "A")), 1.0, 0.0, 3.0),  # the second second of 7 to 8 is missed
        (turns((0.0, 4.0, "A"), (4.0, 8.0, "B"), (7.0, 12.0, "A")), 0.0, 2.0, 0.0),
        (turns((0.0, 4.0, "A"), (4.0, 8.0, "B"), (7.0, 10.0, "C")), 0.0, 0.0, 3.0),
    ],
)
def test_what_is_wrong_is_counted_once(told, missed, invented, confused):
    found = compare_turns(RIGHT, told)
    assert found.speech_s == pytest.approx(11.0)
    parts = (found.missed_s, found.invented_s, found.confused_s)
    assert parts == pytest.approx((missed, invented, confused))
    assert found.rate == pytest.approx(100 * sum(parts) / 11.0)


def test_errors_add_up_and_where_nobody_speaks_every_turn_is_wrong():
    assert (compare_turns(RIGHT, []) + compare_turns(RIGHT, RIGHT)).rate == pytest.approx(50.0)
    assert compare_turns([], []).rate == 0.0
    assert compare_turns([], turns((0.0, 1.0, "A"))).rate == 100.0


# ---------------------------------------------------------------- words


SPOKEN = [("ann", "Good morning, Bob."), ("bob", "Morning!"), ("ann", "How are you?")]


@pytest.mark.parametrize(
    ("heard", "edits"),
    [
        ([("B", "good morning bob how are you"), ("A", "morning")], (0, 0, 0, 7)),
        ([("A", "good morning bob"), ("B", "morning how are you")], (0, 2, 2, 5)),
        ([("A", "good morning bob morning how are you")], (0, 1, 1, 6)),
        ([("A", "good morning bob how are you"), ("B", "morning"), ("C", "well")], (0, 0, 1, 7)),
        ([], (0, 7, 0, 0)),
    ],
)
def test_words_count_for_who_says_them(heard, edits):
    assert cp_counts(SPOKEN, heard) == Counts(*edits)


def test_characters_are_words_where_nobody_writes_spaces():
    assert cp_counts([("li", "你好嗎 Bob")], [("A", "你好 bob")]).length == 4
    assert cp_counts([("li", "你好嗎")], [("A", "你好")]) == Counts(0, 1, 0, 2)
    assert cp_counts([], []).length == 0
