"""Transcripts that can be trusted: what agrees, the curve over thresholds, a whole run."""

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from build.clips import Clip, load_clips
from eval.config import EvaluationProduct, changed
from eval.record import read_json, write_jsonl
from eval.trust import run as trust_run
from eval.trust.agreement import checks_of, figures_of, pair_of
from eval.trust.run import passes_of, trust
from serve.contract.engine import open_engine
from serve.contract.errors import AudioError, ConfigError, EarshotError
from serve.contract.manifest import Confidence
from tests.eval.fakes import printed, transcript


def pair(file, reference, text, other, duration_s=1.0, references=True, **said):
    clip = Clip(file, Path(file), reference, "en" if reference else None, duration_s)
    first, second = transcript(text, **said), transcript(other)
    return pair_of(clip, first, second, references=references)


def test_a_transcript_is_as_sure_as_its_tokens_and_words():
    first = transcript("so it", -0.2, 0.9)
    more = dataclasses.replace(transcript("is", -0.8, 0.3).segments[0], tokens=(1, 2))
    bare = dataclasses.replace(more, avg_logprob=None, words=None)
    first = dataclasses.replace(first, segments=(*first.segments, more, bare))
    clip = Clip("a", Path("a"), "so", "en", 1.0)
    found = pair_of(clip, first, transcript("so"), references=True)
    assert found.avg_logprob == pytest.approx((4 * -0.2 + 2 * -0.8) / 6)
    assert found.confidence == pytest.approx((0.9 + 0.9 + 0.3) / 3)
    nothing = pair("a", "so", "", "")
    assert nothing.avg_logprob is None and nothing.confidence is None


def test_two_that_hear_nobody_agree_on_silence_alone():
    nobody, missed = pair("a", "", "", " …"), pair("b", "so", "", "")
    for one in (nobody, missed):
        assert one.difference == 0.0 and one.silence
        assert not one.is_trusted(0.0) and not one.is_trusted(100.0)
    heard = pair("c", "", "Thanks", "Thanks")
    assert heard.is_trusted(0.0), "both may make up the same"
    assert (heard.edits.errors, heard.edits.length) == (6, 0)


PAIRS = [
    pair("a", "a" * 100, "a" * 100, "a" * 100, 1.0, avg_logprob=-0.1, confidence=0.5),
    pair("b", "b" * 100, "x" * 100, "x" * 100, 2.0, avg_logprob=-0.9, confidence=0.9),
    pair("c", "c" * 100, "c" * 100, "c" * 96 + "dddd", 3.0, avg_logprob=-0.2, confidence=0.8),
    pair("d", "d" * 100, "d" * 50 + "x" * 50, "d" * 100, 4.0, avg_logprob=-0.5, confidence=0.7),
    pair("e", "e" * 100, "", "", 5.0),
]


def points_of(pairs, threshold=3.5):
    found = figures_of(pairs, 5, seconds=40.0, threshold=threshold)
    return {point.threshold: point for point in found.points}


def test_a_threshold_says_how_much_is_selected_and_how_right():
    found = points_of(PAIRS)
    assert list(found) == [0.0, 1.0, 2.0, 3.5, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert [point.clips for point in found.values()] == [2, 2, 2, 2, 3, 3, 3, 4, 4]
    none, every = found[0.0], found[100.0]
    assert (none.clips_percent, none.seconds_percent) == (20.0, 100 * 3 / 40)
    assert (none.cer.percent, every.cer.percent) == (50.0, 37.5)
    unknown = [dataclasses.replace(one, edits=None) for one in PAIRS]
    without = points_of(unknown)[5.0]
    assert (without.clips, without.cer) == (3, None)
    assert checks_of(unknown, 10.0) == ()


def test_what_is_trusted_must_be_more_right_than_the_rest():
    good = [pair(f"g{i}", "word", "word", "word") for i in range(50)]
    bad = [pair(f"b{i}", "word", "what", "else") for i in range(50)]
    assert [check.passed for check in checks_of([*good, *bad], 10.0)] == [True]
    wrong = [pair(f"g{i}", "word", "what", "what") for i in range(50)]
    others = [pair(f"b{i}", "word", "word", "else") for i in range(50)]
    (failed,) = checks_of([*wrong, *others], 10.0)
    assert failed.passed is False and failed.detail == "75.00 % and 0.00 %"
    mixed = [*good[:2], pair("x", "word", "ward", "ward"), *bad[:1], pair("y", "go", "go", "no")]
    assert [check.passed for check in checks_of(mixed, 10.0)] == [None], "of few it is chance"
    assert [check.passed for check in checks_of(good, 10.0)] == [None], "there are no others"


def test_passes_that_are_the_same_are_refused(tmp_path):
    config = EvaluationProduct(engine=str(tmp_path))
    narrow = changed(config, "transcriber", beam_size=1)
    with pytest.raises(ConfigError, match="beam_size is 1, so a greedy pass would say the same"):
        passes_of(narrow, "")
    with pytest.raises(ConfigError, match="is the config's own engine"):
        passes_of(config, f"{tmp_path}/.")
    assert passes_of(narrow, "b") == (narrow, dataclasses.replace(narrow, engine="b"))


class FakeTranscriber(contextlib.nullcontext):
    """Says what an audio file's bytes say: what is before a bar by a beam, else what is behind."""

    def __init__(self, first):
        super().__init__(self)
        self._first, self.requests = first, []

    def transcribe(self, request):
        self.requests.append(request)
        before, _, behind = request.audio.decode().partition("|")
        text = before if self._first else behind
        if text == "fail":
            raise AudioError("AUDIO cannot be decoded")
        return transcript(text, language="de" if text else None)


@pytest.fixture
def opened(monkeypatch):
    """The transcribers that were opened, by engine and beam."""
    found = {}

    def open_fake(config):
        engine, beam = config.engine, config.transcriber.beam_size
        return found.setdefault((engine, beam), FakeTranscriber(first=beam > 1 and engine == "e"))

    monkeypatch.setattr(trust_run, "open_transcriber", open_fake)
    monkeypatch.setattr(trust_run, "open_engine", lambda path: BUILT)
    monkeypatch.setattr("eval.trust.run.duration_s", lambda _: 2.0)
    monkeypatch.setattr("eval.corpora.find.duration_s", lambda _: 2.0)
    return found


def config_of(place, **settings):
    config = changed(EvaluationProduct(engine="e"), "transcriber", beam_size=5)
    return changed(config, "eval", manifest=str(place), **settings)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


BUILT = SimpleNamespace(manifest=SimpleNamespace(source=SimpleNamespace(id="somebody")))
SAID = {
    "far.wav": "go|no",
    "near.wav": "so it is, my dear|so it is, my deer",
    "same.wav": "Ja|ja.",
    "none.wav": "|",
    "bad.wav": "fail|so",
    "late.wav": "so|fail",
}


def test_a_folder_without_references_becomes_a_list_to_filter(tmp_path, run_of, opened):
    folder = tmp_path / "audio"
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.md").write_text("no audio")
    for name, said in SAID.items():
        (folder / "deep" / name).write_text(said)
    result = trust(run_of(config_of(folder)), other="", threshold=10.0)
    assert list(opened) == [("e", 5), ("e", 1)]
    lines = lines_of(tmp_path / "transcripts.jsonl")
    expected = [  # file, difference, silence, trusted
        ("same.wav", 0.0, False, True),
        ("none.wav", 0.0, True, False),
        ("near.wav", 6.25, False, True),
        ("far.wav", 50.0, False, False),
    ]
    keys = ("difference", "silence", "trusted")
    assert [(Path(n["file"]).name, *(n[key] for key in keys)) for n in lines] == expected
    assert (lines[0]["text"], lines[0]["other_text"], lines[0]["duration"]) == ("Ja", "ja.", 2.0)
    assert lines_of(tmp_path / "failed.jsonl") == [
        {"file": "deep/bad.wav", "error": "AUDIO cannot be decoded"},
        {"file": "deep/late.wav", "error": "AUDIO cannot be decoded"},
    ]
    assert "audio without references: 6 clips; 0.00 h" in printed(result)
    assert "trusted at 10 %: 2 of 6 clips; agreed on silence: 1; failed: 2" in printed(result)
    assert "CER" not in printed(result) and result.checks == ()
    trusted = tmp_path / "trusted.jsonl"  # as a recipe would take it
    write_jsonl(trusted, [line for line in lines if line["trusted"]])
    texts = [(clip.text, clip.language) for clip in load_clips(trusted)]
    assert texts == [("Ja", "de"), ("so it is, my dear", "de")]


def manifest_of(folder, said, references, choose=()):
    lines = []
    for name, text in said.items():
        (folder / name).write_text(text)
        reference = references.get(name, "so")
        language = "en" if reference else None
        half = "choose" if name in choose else "report"
        fields = {"file": name, "text": reference, "language": language, "duration": 2.0}
        lines.append({**fields, "half": half})
    write_jsonl(folder / "manifest.jsonl", lines)
    return folder / "manifest.jsonl"


def test_an_other_engine_that_is_missing_ends_the_command_before_the_first_pass(
    tmp_path, run_of, opened, monkeypatch
):
    monkeypatch.setattr(
        trust_run, "open_engine", lambda path: BUILT if path == "e" else open_engine(path)
    )
    (tmp_path / "a.wav").write_text("so")
    with pytest.raises(EarshotError, match="gone"):
        trust(run_of(config_of(tmp_path)), other=str(tmp_path / "gone"), threshold=10.0)
    assert not opened


def test_references_say_how_right_what_is_selected_is(tmp_path, run_of, opened):
    references = {"far.wav": "go", "near.wav": "so it is my dear", "same.wav": "no", "none.wav": ""}
    manifest = manifest_of(tmp_path, {**SAID, "x.wav": "a|a"}, references, choose=["x.wav"])
    config = config_of(manifest, tell_language=True)
    result = trust(run_of(config, "trust"), other="f", threshold=10.0)
    assert list(opened) == [("e", 5), ("f", 5)]
    asked = {(r.language, r.try_word_timestamps) for r in opened["f", 5].requests}
    assert asked == {("en", True), (None, True)}
    manifest = manifest_of(tmp_path, {"a.wav": "fail|so", "b.wav": "so|fail"}, {})
    with pytest.raises(EarshotError, match=r"of both passes; a.wav: AUDIO cannot be decoded"):
        trust(run_of(config_of(manifest)), other="", threshold=10.0)
    found = result.figures["transcripts"]
    assert (found.trusted, found.silences, found.failed) == (2, 1, 2)
    (point,) = (point for point in found.points if point.threshold == 10.0)
    assert point.clips == 2 and point.cer.percent == pytest.approx(100 * 2 / 18)
    assert "trusted at 10 %: 2 of 6 clips; agreed on silence: 1; failed: 2" in printed(result)
    assert len(result.sections[0].parts[0].header) == 4
    assert len(result.checks) == 1


def test_words_are_calibrated_where_there_are_references(tmp_path, run_of, opened):
    said = {f"{n}.wav": "so|so" if n % 3 else "no|no" for n in range(400)}
    config = config_of(manifest_of(tmp_path, said, {}, choose=[*said][::2]))
    result = trust(run_of(config, "trust"), other="", threshold=10.0)
    words = result.figures["words"]
    assert (words.fit.source, words.fit.clips) == ("somebody", 200)
    assert read_json(tmp_path / "fit.json", Confidence, "a fit") == words.fit
    assert "| 5, fitted" in printed(result) and len(result.checks) == 5
