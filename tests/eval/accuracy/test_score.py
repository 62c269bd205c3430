import numpy as np
import pytest

from eval.accuracy.normalize import Spelling
from eval.accuracy.predictions import Prediction
from eval.accuracy.score import (
    Counts,
    accuracy,
    char_counts,
    gap_interval,
    latency,
    rate,
    rtfx,
    score_system,
    word_counts,
)
from tests.eval.fakes import facts, timed_call


def plain(text, _language=None):
    return text


def test_word_counts_by_hand():
    # the -> a (S), cat kept, quickly inserted (I), sat kept, down deleted (D)
    counts = word_counts("the cat sat down", "a cat quickly sat")
    assert counts == Counts(substitutions=1, deletions=1, insertions=1, hits=2)
    assert (counts.errors, counts.length) == (3, 4)


def test_character_counts_by_hand():
    # kitten -> sitting: k/s, e/i, +g
    assert char_counts("kitten", "sitting") == Counts(2, 0, 1, 4)
    assert char_counts("a b", "ab") == Counts(0, 1, 0, 2)  # a space is a character


@pytest.mark.parametrize("count", [word_counts, char_counts])
def test_empty_texts(count):
    assert count("", "") == Counts()
    assert count("a", "") == Counts(deletions=1)
    assert count("", "a") == Counts(insertions=1)


def test_rates_pool_all_clips():
    calls = [
        timed_call("a", "aaaaaaaa", "aaaaaaaa"),
        timed_call("b", "bb", "bc"),
        timed_call("c", "", "xy"),
    ]
    found = accuracy(calls, plain)
    # 1 substitution and 2 insertions on silence, of 10 reference characters
    assert found.cer.percent == pytest.approx(30.0)
    assert found.cer.counts == Counts(1, 0, 2, 9)
    assert found.wer.percent == pytest.approx(100.0)  # 1 S + 1 I of 2 words
    assert found.clips == 3


def test_no_reference_no_rate():
    found = rate([Counts(insertions=3)])
    assert (found.percent, found.low, found.high) == (None, None, None)
    assert found.counts.insertions == 3


def test_bootstrap_is_deterministic_and_covers():
    draw = np.random.default_rng(1)
    clips = [Counts(substitutions=int(e), hits=100 - int(e)) for e in draw.integers(0, 20, 60)]
    first, second = rate(clips), rate(clips)
    assert first == second
    assert first.low < first.percent < first.high
    # the normal approximation of the same interval
    spread = 1.96 * np.std([c.errors for c in clips], ddof=1) / np.sqrt(len(clips))
    assert first.high - first.percent == pytest.approx(spread, rel=0.15)


def test_bootstrap_of_equal_clips_has_no_width():
    found = rate([Counts(substitutions=1, hits=9)] * 5)
    assert (found.low, found.percent, found.high) == (10.0, 10.0, 10.0)


def test_bootstrap_survives_draws_without_text():
    found = rate([Counts(hits=5), Counts(), Counts()])  # some draws hold silence only
    assert (found.low, found.high) == (0.0, 0.0)


def test_gap_is_paired():
    # The clips differ much, but the two systems differ by the same two errors on each.
    ours = [Counts(substitutions=2 + n, hits=98 - n) for n in range(30)]
    theirs = [Counts(substitutions=n, hits=100 - n) for n in range(30)]
    low, high = gap_interval(ours, theirs)
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)


def test_latency_percentiles():
    calls = [timed_call("short", "", "", latency_s=v) for v in (1.0, 1.2)]
    calls += [timed_call("long", "", "", latency_s=v) for v in (9.0, 9.0)]
    found = latency(calls)
    assert (found.calls, found.p50_s) == (4, pytest.approx(5.1))
    hundred = latency([timed_call(str(n), "", "", latency_s=float(n)) for n in range(101)])
    assert (hundred.p50_s, hundred.p95_s, hundred.p99_s) == pytest.approx((50, 95, 99))


def test_rtfx_counts_answered_audio_only():
    calls = [
        timed_call("a", "", "", duration_s=30.0, started_s=0.0, latency_s=2.0),
        timed_call("b", "", "", duration_s=10.0, started_s=1.0, latency_s=3.0),
        timed_call("c", "", "", duration_s=99.0, latency_s=0.1, prediction=None, error="x"),
    ]
    assert rtfx(calls) == pytest.approx(40.0 / 4.0)


def test_score_system_keeps_phases_and_sets_apart():
    calls = [
        timed_call("a.wav", "Hello there", "hello there!", phase="accuracy"),
        timed_call("n.wav", "", "um", phase="accuracy"),
        timed_call("a.wav", "Hola", "ola", phase="accuracy", clip_set="heldout", language="es"),
        timed_call("a.wav", "Hello there", "hello there!", phase="loaded", latency_s=4.0),
        timed_call("a.wav", "Hello there", "hallo there", phase="loaded", repeat=1, latency_s=4.0),
        timed_call("n.wav", "", "um", phase="loaded", latency_s=1.0),
        timed_call("a.wav", "Hello there", "hello there!", phase="alone", latency_s=2.0),
        timed_call("n.wav", "", "", phase="alone", latency_s=1.0, prediction=Prediction("", None)),
        timed_call("a.wav", "Hello there", "hello there!", phase="one_clip", latency_s=1.5),
        timed_call(
            "a.wav", "Hello there", "hello there!", phase="one_clip", latency_s=2.5, repeat=1
        ),
    ]
    score = score_system(facts("s"), calls, "basic-v1")
    timed, heldout = score.sets["timed"], score.sets["heldout"]
    assert timed.overall.cer.counts == Counts(insertions=2, hits=11)  # "um"
    assert timed.by_normalizer["raw"].cer.counts.errors == 4  # H/h, !, u, m
    assert timed.by_normalizer["basic-v1"] == timed.overall
    assert heldout.overall.cer.counts == Counts(deletions=1, hits=3)
    assert list(score.sets) == ["timed", "heldout"]
    assert (score.speed.alone.p50_s, score.speed.loaded.calls) == (1.5, 3)
    assert score.speed.one_clip_s == 2.0
    assert (timed.silent_clips, timed.silent_with_text) == (1, 1)
    assert (timed.language_right, timed.language_of) == (1, 1)
    assert (heldout.language_right, heldout.language_of) == (0, 1)
    assert score.unstable == ("a.wav", "n.wav")
    assert list(timed.by_language) == ["en"]
    assert timed.by_language["en"].cer.percent == 0.0


def test_clips_are_paired_by_name_whatever_ended_first():
    ended = [
        [timed_call(name, "a", "a", phase="accuracy") for name in names] for names in ("ab", "ba")
    ]
    one, other = (score_system(facts("s"), calls, "raw").sets["timed"] for calls in ended)
    assert list(one.by_clip) == list(other.by_clip)


def test_every_normaliser_is_reported_beside_the_chosen_one():
    calls = [
        timed_call("a", "I have twenty-one", "I've 21", phase="accuracy"),
        timed_call("b", "tengo veintiuno", "tengo 21", phase="accuracy", language="es"),
    ]
    score = score_system(facts("s"), calls, "whisper-english", Spelling())
    heard = score.sets["timed"]
    assert heard.overall == heard.by_normalizer["whisper-english"]
    errors = {name: found.wer.counts.errors for name, found in heard.by_normalizer.items()}
    assert errors == {"basic-v1": 5, "whisper-english": 1, "raw": 4}


def test_a_clip_of_unknown_language_counts_for_no_language():
    calls = [
        timed_call("a", "one", "one", phase="accuracy", language=None),
        timed_call("b", "two", "two", phase="accuracy"),
    ]
    heard = score_system(facts("s"), calls, "basic-v1").sets["timed"]
    assert list(heard.by_language) == ["en", "unknown"]
    assert (heard.language_right, heard.language_of) == (1, 1)
