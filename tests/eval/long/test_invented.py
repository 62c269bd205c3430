"""Clips without speech: the same for a seed, of every kind, and counted rightly."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from eval.accuracy.predictions import SystemFacts
from eval.config import EvalConfig, EvaluationProduct
from eval.corpora.find import find_clips
from eval.long import WITHOUT_SPEECH_SYSTEMS as NAMES
from eval.long import without_speech as invented
from eval.long.without_speech import NOBODY, SPOKEN, make_clips
from eval.record import verdict
from serve.contract.errors import ConfigError
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from tests.eval.fakes import printed, timed_call

SPEECH = "tests/data/human/manifest.jsonl"


@pytest.fixture(scope="module")
def speech():
    return find_clips(SPEECH, limit=16).clips


@pytest.fixture(scope="module")
def made(speech):
    return make_clips(speech, 0)


def test_all_kinds_are_there_and_fit_into_a_window(made):
    assert {one.kind for one in made} == {*NOBODY, *SPOKEN}
    assert sum(one.kind in NOBODY for one in made) >= 60
    for one in made:
        assert 0 < len(one.samples) <= WINDOW_SAMPLES, one.kind
        assert one.samples.dtype == np.float32
        assert np.isfinite(one.samples).all() and np.abs(one.samples).max() <= 1.5
        assert bool(one.text) == (one.kind in SPOKEN)


@pytest.mark.nightly
def test_a_seed_draws_the_same_and_another_something_else(speech, made):
    again = make_clips(speech, 0)
    assert [one.kind for one in again] == [one.kind for one in made]
    for one, other in zip(again, made, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)
    drawn = ("noise", "hum", "keys", "music")
    others = {one.samples.tobytes() for one in make_clips(speech, 4) if one.kind in drawn}
    assert not others & {one.samples.tobytes() for one in made}


def test_without_speech_there_is_nothing_to_cut_from(speech):
    with pytest.raises(ConfigError, match="no clip of at most 9 s has a text"):
        make_clips([dataclasses.replace(clip, text="") for clip in speech], 0)


def call(file, text, reference="", **fields):
    return timed_call(file, reference, text, **fields)


def test_text_where_nobody_speaks_is_invented_and_words_may_be_lost():
    calls = [call("noise/0.wav", "You"), call("noise/1.wav", " "), call("music/2.wav", "")]
    calls += [call("in noise/4.wav", "ab", "abcd"), call("in silence/6.wav", "xy", "x")]
    score = invented.score("ours", calls)
    assert score.invented() == (1, 3)
    assert (score.spoken.deletions, score.spoken.insertions, score.spoken.length) == (2, 1, 5)
    assert invented.table_of([score]).rows[0][:2] == ("ours", "33.3 %")
    check = invented.check_of(score)
    assert not check.passed and check.detail == "1 of 3 clips"
    clean = dataclasses.replace(score, with_text=dict.fromkeys(score.with_text, 0))
    assert invented.check_of(clean).passed


@pytest.fixture
def hear(made, monkeypatch, run_of):
    """Runs it with systems that say what a function makes of a clip."""

    def made_before(given, seed):  # of less speech, for it takes seconds
        assert (given, seed) == (find_clips(SPEECH, half="report").clips, 0)
        return made

    def hear(say):
        def measure(name, config, phases, on_call, **_):
            for clip in phases[0].clips:
                assert Path(clip.path).is_file()
                on_call(dataclasses.replace(say(clip), reference=clip.text, language=clip.language))
            return SystemFacts(name, {}, 0.0, 0)

        monkeypatch.setattr(invented, "make_clips", made_before)
        monkeypatch.setattr("eval.accuracy.run.measure_system", measure)
        monkeypatch.setattr(invented, "prepare", lambda *_: None)
        of = run_of(EvaluationProduct(eval=EvalConfig(manifest=SPEECH, half="report")), "invented")
        return invented.measure_without_speech(of, systems=NAMES[:2], seed=0, again=False)

    return hear


def test_systems_hear_all_clips_and_what_they_said_is_kept(hear, made, tmp_path):
    result = hear(lambda clip: call(clip.file, clip.text))
    ours, _ = result.figures
    assert verdict(result.checks) == "passed"
    assert ours.invented() == (0, sum(one.kind in NOBODY for one in made))
    assert ours.spoken.errors == 0 < ours.spoken.length
    folder = tmp_path / "without-speech"
    kept = (folder / "predictions" / f"{NAMES[1]}.jsonl").read_text().splitlines()
    assert len(kept) == sum(ours.clips.values())
    assert "earshot-no-vad" in printed(result)
    first = sorted((folder / "clips" / "silence").iterdir())[0]
    assert first.stat().st_size == 44 + 2 * round(0.05 * SAMPLE_RATE)


def test_a_call_that_failed_is_no_silence(hear):
    result = hear(lambda clip: call(clip.file, "", prediction=None, error="broken"))
    assert str(result.checks[1]).startswith("FAILED: every call answered. ")
