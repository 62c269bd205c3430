import numpy as np
import pytest

from eval.accuracy.data import Prediction
from eval.accuracy.score import (
    Counts,
    accuracy,
    char_counts,
    gap_interval,
    gates,
    latency,
    rate,
    rtfx,
    score_system,
    word_counts,
)
from tests.eval.fakes import facts, timed_call


def plain(text):
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


def test_latency_percentiles_and_jitter():
    calls = [timed_call("short", "", "", latency_s=v) for v in (1.0, 1.2)]
    calls += [timed_call("long", "", "", latency_s=v) for v in (9.0, 9.0)]
    found = latency(calls)
    assert (found.calls, found.p50_s) == (4, pytest.approx(5.1))
    # the lengths of the clips do not count: variances are 0.02 and 0
    assert found.jitter_s == pytest.approx(np.sqrt(0.01))
    assert latency(calls[:1]).jitter_s is None
    hundred = latency([timed_call(str(n), "", "", latency_s=float(n)) for n in range(101)])
    assert (hundred.p50_s, hundred.p95_s, hundred.p99_s) == pytest.approx((50, 95, 99))


def test_rtfx_counts_answered_audio_only():
    calls = [
        timed_call("a", "", "", duration_s=30.0, started_s=0.0, latency_s=2.0),
        timed_call("b", "", "", duration_s=10.0, started_s=1.0, latency_s=3.0),
        timed_call("c", "", "", duration_s=99.0, latency_s=0.1, prediction=None, error="x"),
    ]
    assert rtfx(calls) == pytest.approx(40.0 / 4.0)


def system(name, errors, **changes):
    """A scored system that gets `errors` of 1000 characters wrong."""
    said = "b" * errors + "a" * (1000 - errors)
    calls = [
        timed_call("x", "a" * 1000, said),
        timed_call("x", "a" * 1000, said, phase="alone", concurrency=1),
    ]
    calls += [timed_call("x", "a" * 1000, said, phase="one_clip", **changes)]
    return score_system(facts(name), calls, "raw")


def test_score_system_keeps_phases_apart():
    calls = [
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
    assert score.overall.cer.counts == Counts(insertions=2, hits=11)  # the first pass, and "um"
    assert score.raw.cer.counts.errors == 4  # H/h, !, u, m
    assert (score.alone.p50_s, score.loaded.calls) == (1.5, 3)
    assert score.ten_second_s == 2.0
    assert (score.silent_clips, score.silent_with_text) == (1, 1)
    assert (score.language_right, score.language_of) == (1, 1)
    assert score.unstable == ("a.wav", "n.wav")
    assert list(score.by_language) == ["en"]
    assert score.by_language["en"].cer.percent == 0.0


def test_unstable_clips_are_those_that_were_heard_in_more_than_one_way():
    calls = [
        timed_call(file, "word", text, phase=phase)
        for file, texts in (
            ("z.wav", ("word", "ward")),
            ("same.wav", ("word", "word")),
            ("a.wav", ("", "x")),
        )
        for phase, text in zip(("alone", "loaded"), texts, strict=True)
    ]
    assert score_system(facts("s"), calls, "raw").unstable == ("a.wav", "z.wav")


def test_clips_without_text_are_not_judged():
    """Neither side may be without a rate, whichever it is."""
    silent = [timed_call("n.wav", "", "", phase=phase) for phase in ("alone", "loaded")]
    for mute, heard in (
        ("earshot-int8", "faster-whisper-int8"),
        ("faster-whisper-int8", "earshot-int8"),
    ):
        scores = [score_system(facts(mute), silent, "raw"), system(heard, 1)]
        gate = gates(scores, 0.3, 0.2)[0]
        assert (gate.passed, gate.detail) == (None, "no clip has a reference text")


def judged(*scores):
    return {gate.name: gate.passed for gate in gates(scores, 0.3, 0.2)}


def test_gates_pass_at_the_limit_and_fail_above():
    at_limit = judged(
        system("earshot-int8", 13), system("earshot-fp16", 11), system("faster-whisper-int8", 10)
    )
    assert set(at_limit.values()) == {True}
    above_theirs = judged(
        system("earshot-int8", 14), system("earshot-fp16", 12), system("faster-whisper-int8", 10)
    )
    assert above_theirs == {
        "CER of earshot-int8 at most 0.3 points above faster-whisper-int8": False,
        "CER of earshot-fp16 at most 0.3 points above faster-whisper-int8": True,
        "CER of earshot-int8 at most 0.2 points above earshot-fp16": True,
        "every call answered": True,
    }
    above_fp16 = judged(
        system("earshot-int8", 13), system("earshot-fp16", 10), system("faster-whisper-int8", 10)
    )
    assert above_fp16["CER of earshot-int8 at most 0.2 points above earshot-fp16"] is False


def test_gates_take_the_most_accurate_faster_whisper():
    names = judged(
        system("earshot-int8", 10),
        system("faster-whisper-int8", 20),
        system("faster-whisper-float32", 5),
    )
    assert names["CER of earshot-int8 at most 0.3 points above faster-whisper-float32"] is False


def test_better_than_theirs_passes():
    found = judged(system("earshot-int8", 0), system("faster-whisper-int8", 500))
    assert found["CER of earshot-int8 at most 0.3 points above faster-whisper-int8"] is True


def test_a_missing_system_is_said_and_not_failed():
    found = gates([system("earshot-int8", 1)], 0.3, 0.2)
    assert [gate.passed for gate in found] == [None, None, True]
    assert "faster-whisper not in this run" in found[0].detail
    assert "earshot-fp16 not in this run" in found[1].detail


def test_a_failed_call_fails_the_run():
    broken = system("earshot-int8", 0, prediction=None, error="AudioError: no")
    gate = gates([broken], 0.3, 0.2)[-1]
    assert gate.passed is False
    assert gate.detail == "1 failed, the first: earshot-int8: x: AudioError: no"
