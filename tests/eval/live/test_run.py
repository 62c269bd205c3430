"""The figures and checks of live text, and the passages that are played."""

import contextlib
import dataclasses
import json
import os

import pytest

import eval.live
from eval.config import EvalConfig, EvaluationProduct
from eval.live import final_words, latencies, live, passages
from serve.cli.live_client import Heard
from serve.contract.errors import ConfigError, EarshotError
from serve.contract.server_config import LiveConfig
from tests.eval.fakes import transcript

TEXT = "All is quiet. The rain has gone."


class FakeSystem:
    """A system with the same text for every stream.

    A word ends at each whole second, and is final 1.5 s later.
    """

    loop = None

    def __init__(self, live, failed=False):
        self.requests, self._live, self._failed = [], live, failed

    def transcribe(self, request):
        self.requests.append(request)
        return transcript(TEXT)

    async def play(self, blocks, transcription):
        assert transcription == {"language": "en"}
        for number, word in enumerate(self._live.split()):
            event = {"type": "x.delta", "item_id": "item", "delta": " " * bool(number) + word}
            yield Heard(number + 2.5, event)
        kind = "x.failed" if self._failed else "x.completed"
        yield Heard(9.0, {"type": kind, "item_id": "item", "transcript": self._live})

    def count_changed_words(self):
        return float(len(self.requests))


class ElsewhereSystem(FakeSystem):
    """A system that is only played in other processes than the one that made it."""

    def __init__(self, live):
        super().__init__(live)
        self.maker = os.getpid()

    def play(self, blocks, transcription):
        assert os.getpid() != self.maker
        return super().play(blocks, transcription)


@pytest.fixture
def measure(monkeypatch, manifest, run_of):
    """Measures a system with one clip."""
    monkeypatch.setattr(eval.live, "_APART_S", 0.0)
    clips = EvalConfig(manifest=manifest({"text": "All is quiet the rain was gone"}))
    config = EvaluationProduct(eval=clips, live=LiveConfig(short_encoder="on"))

    def measure(system, streams=(1,)):
        def open_system(config, decode_s):
            assert decode_s == 0.5
            return contextlib.nullcontext(system)

        monkeypatch.setattr(eval.live, "open_system", open_system)
        run = run_of(config, "live")
        return live(run, streams=streams, clips=1, join_s=60.0, simulate=0.5)

    return measure


def test_live_text_is_compared_with_references_and_with_whole_recordings(measure, tmp_path):
    system = FakeSystem("All is quiet. the rain had gone.")
    (level,) = measure(system).figures
    assert [request.word_timestamps for request in system.requests] == [True]
    assert (level.words, level.matched, level.p50_s, level.p99_s) == (7, 6, 1.5, 1.5)
    length = len("all is quiet the rain was gone")
    assert level.cer == pytest.approx(200 / length), "had for was"
    assert level.whole_cer == pytest.approx(100 / length), "has for was"
    assert level.failed == 0
    record = json.loads((tmp_path / "live.json").read_text())
    assert record["settings"]["live"]["short_encoder"] == "on"
    assert [one["p95_s"] for one in record["figures"]] == [1.5]


def test_a_whole_recording_is_transcribed_once(measure):
    system = FakeSystem(TEXT)
    result = measure(system, streams=(1, 2))
    one, two = result.figures
    assert len(system.requests) == 1
    assert (one.words, two.words, two.streams) == (7, 14, 2)
    assert all(check.passed for check in result.checks) and two.changed_per_word == 0


def test_many_streams_are_played_by_several_processes(measure, monkeypatch):
    monkeypatch.setattr(eval.live, "_STREAMS_PER_PROCESS", 1)
    monkeypatch.setattr(eval.live, "processes_for", lambda wanted: wanted)
    (level,) = measure(ElsewhereSystem(TEXT), streams=(2,)).figures
    assert (level.streams, level.words, level.p95_s) == (2, 14, 1.5)


def test_utterances_without_text_are_counted(measure):
    failed, *_ = measure(FakeSystem(TEXT, failed=True)).checks
    assert str(failed) == "FAILED: every utterance has its text with 1 stream. 1 failed"
    with pytest.raises(EarshotError, match="no word became final"):
        measure(FakeSystem(""))


def test_failed_checks_have_their_reason(measure):
    good, _ = measure(FakeSystem(TEXT), streams=(1, 2)).figures
    assert all(check.passed for check in good.checks)
    bad = dataclasses.replace(good, p95_s=2.5, cer=good.whole_cer + 1, failed=1)
    assert [check.detail for check in bad.checks] == ["1 failed", "2.50 s", "+1.00 points"]
    assert not any(check.passed for check in bad.checks)


# ---------------------------------------------------------------- words


def test_a_word_is_final_with_its_last_letter_and_a_mark_may_follow():
    deltas = [(1.0, "Where is"), (2.0, " the key"), (3.0, "? It"), (4.0, " is")]
    words, times_s = zip(*final_words(deltas), strict=True)
    assert words == ("Where", "is", "the", "key?", "It", "is")
    assert times_s == (1.0, 1.0, 2.0, 2.0, 3.0, 4.0)


def test_words_that_were_misheard_have_no_latency():
    final = [("Where", 1.0), ("is,", 1.5), ("tea", 2.0), ("here", 2.5)]
    whole = transcript("where is the here")  # a second each
    assert latencies(final, whole) == [0.0, -0.5, -1.5]


# ---------------------------------------------------------------- passages


@pytest.fixture
def played(manifest, monkeypatch, tmp_path):
    """Gives the texts of what is played of clips with these fields."""
    monkeypatch.setattr("eval.accuracy.passages.CACHE", tmp_path / "passages")

    def play(*clips, half="", groups=EvalConfig.gate_groups):
        settings = EvalConfig(manifest=manifest(*clips), half=half, gate_groups=groups)
        return [clip.text for clip in passages(EvaluationProduct(eval=settings), 10.0)]

    return play


def by(speaker, group="a", half="report", duration=4.0):
    return {"speaker": speaker, "group": group, "half": half, "duration": duration}


SILENT = {"text": "", "language": None, "duration": 6.0}


def test_clips_of_each_speaker_are_joined_and_groups_take_turns(played):
    clips = [*[by("one")] * 4, *[by("two", "b")] * 2, by("three", "b", "choose")]
    joined = ["text 0 text 1", "text 4 text 5", "text 2 text 3"]
    assert played(*clips, half="report") == joined
    assert played(*clips) == joined  # what is alone is too short
    with pytest.raises(ConfigError, match="lists no clips of the half 'other'"):
        played(*clips, half="other")


def test_short_clips_are_left_out_if_there_are_passages(played):
    alone = {"group": "b", "duration": 6.0}
    clips = [*[by("one")] * 2, by("two", duration=2.0), alone]
    assert played(*clips) == ["text 0 text 1", "text 3"]
    short = [{"group": "b", "duration": 2.0}, {"group": "a", "duration": 1.0}]
    assert played(*short) == ["text 1", "text 0"], "as they are"


def test_only_clips_of_the_gate_groups_are_taken(played):
    clips = [by("one", duration=6.0), by("two", "hard", duration=6.0), SILENT]
    assert played(*clips, groups=("a",)) == ["text 0"]
    assert played(*clips) == ["text 0", "text 1"]
    with pytest.raises(ConfigError, match="has no clip with text; expected some"):
        played(SILENT)
