"""Error rates, speed, gates and normalisers, by hand."""

import re

import numpy as np
import pytest

from eval.accuracy import score as scores
from eval.accuracy.normalize import SPELLING_FILE, Spelling, normalizer, read_spelling
from eval.accuracy.score import Counts, accuracy, char_counts, gap_interval, rate, rtfx, word_counts
from eval.config import EvalConfig
from serve.contract.errors import ConfigError
from tests.eval.fakes import facts, timed_call


def score_system(name, calls, normalizer_name="raw"):
    return scores.score_system(facts(name), calls, normalizer(normalizer_name))


@pytest.mark.parametrize(
    ("count", "reference", "hypothesis", "expected"),
    [
        # the -> a (S), cat kept, quickly inserted (I), sat kept, down deleted (D)
        (word_counts, "the cat sat down", "a cat quickly sat", Counts(1, 1, 1, 2)),
        (char_counts, "kitten", "sitting", Counts(2, 0, 1, 4)),  # k/s, e/i, +g
        (char_counts, "a b", "ab", Counts(0, 1, 0, 2)),  # a space is a character
        (word_counts, "", "", Counts()),
        (char_counts, "a", "", Counts(deletions=1)),
        (word_counts, "", "a", Counts(insertions=1)),
    ],
)
def test_edits_by_hand(count, reference, hypothesis, expected):
    assert count(reference, hypothesis) == expected


def test_rates_pool_all_clips():
    texts = {"a": ("aaaaaaaa", "aaaaaaaa"), "b": ("bb", "bc"), "c": ("", "xy")}
    found = accuracy([timed_call(file, *pair) for file, pair in texts.items()], normalizer("raw"))
    # 1 substitution and 2 insertions on silence, of 10 reference characters
    assert found.cer.percent == pytest.approx(30.0)
    assert found.cer.counts == Counts(1, 0, 2, 9)
    assert found.wer.percent == pytest.approx(100.0)  # 1 S + 1 I of 2 words
    assert found.clips == 3
    nothing = rate([Counts(insertions=3)])
    assert (nothing.percent, nothing.low, nothing.counts.insertions) == (None, None, 3)


def test_intervals_cover_and_the_interval_of_a_gap_is_paired():
    draw = np.random.default_rng(1)
    clips = [Counts(substitutions=int(e), hits=100 - int(e)) for e in draw.integers(0, 20, 60)]
    found = rate(clips)
    assert found == rate(clips)
    # the normal approximation of the same interval
    spread = 1.96 * np.std([c.errors for c in clips], ddof=1) / np.sqrt(len(clips))
    assert found.high - found.percent == pytest.approx(spread, rel=0.15)
    assert found.low < found.percent
    # The clips differ much, but two systems differ by the same two errors on each.
    ours = [Counts(substitutions=2 + n, hits=98 - n) for n in range(30)]
    theirs = [Counts(substitutions=n, hits=100 - n) for n in range(30)]
    assert gap_interval(ours, theirs) == pytest.approx((2.0, 2.0))


def test_speed_by_hand():
    calls = [timed_call(str(n), "", "", latency_s=float(n)) for n in range(101)]
    found = scores.latency(calls)
    assert (found.calls, found.p50_s, found.p95_s, found.p99_s) == pytest.approx((101, 50, 95, 99))
    calls = [
        timed_call("a", "", "", duration_s=30.0, started_s=0.0, latency_s=2.0),
        timed_call("b", "", "", duration_s=10.0, started_s=1.0, latency_s=3.0),
        timed_call("c", "", "", duration_s=99.0, latency_s=0.1, prediction=None, error="x"),
    ]
    assert rtfx(calls) == pytest.approx(40.0 / 4.0), "failed calls add no audio"


def test_score_system_keeps_phases_and_sets_apart():
    said, silent = ("a.wav", "Hello there", "hello there!"), ("n.wav", "", "um")
    calls = [
        timed_call(*silent),
        timed_call(*said),
        timed_call("a.wav", "Hola", "ola", clip_set="heldout", language="es"),
        timed_call(*said, phase="loaded", latency_s=4.0),
        timed_call("a.wav", "Hello there", "hallo there", phase="loaded", latency_s=4.0),
        timed_call(*silent, phase="loaded"),
        timed_call(*said, phase="alone", latency_s=2.0),
        timed_call(*silent, phase="alone", latency_s=1.0),
        timed_call(*said, phase="one_clip", latency_s=1.5),
        timed_call(*said, phase="one_clip", latency_s=2.5),
    ]
    score = score_system("s", calls, "basic-v1")
    timed, heldout = score.sets["timed"], score.sets["heldout"]
    assert timed.overall.cer.counts == Counts(insertions=2, hits=11)  # "um"
    assert heldout.overall.cer.counts == Counts(deletions=1, hits=3)
    assert list(timed.by_clip) == ["a.wav", "n.wav"], "by name, whatever ended first"
    assert (score.speed.alone.p50_s, score.speed.loaded.calls) == (1.5, 3)
    assert score.speed.one_clip_s == 2.0
    assert (timed.silent_clips, timed.silent_with_text) == (1, 1)
    assert (timed.language_right, timed.language_of) == (1, 1)
    assert (heldout.language_right, heldout.language_of) == (0, 1)
    assert list(timed.by_part) == ["en"] and timed.by_part["en"].cer.percent == 0.0


# ---------------------------------------------------------------- gates


CLIPS = 40
OURS = ("earshot-triton", "earshot-int8")
NAMES = (*OURS, "earshot-fp16", "faster-whisper-float32", "faster-whisper-int8")


def call(right, file="x", **fields):
    """On a clip of 100 characters, so many of which are right."""
    return timed_call(file, "a" * 100, "a" * right, **fields)


def gates(systems, precision="int8", groups=()):
    return scores.gates(systems, precision, EvalConfig(), groups)


def system(name, errors, **changes):
    """A scored system that gets `errors[clip]` of 1000 characters of each clip wrong."""
    calls = [
        timed_call(f"{clip:03}", "a" * 1000, f"{'b' * wrong:a<1000}", **changes)
        for clip, wrong in enumerate(errors)
    ]
    return score_system(name, calls)


def judged(errors, names=NAMES, default=10):
    """Outcomes by what the gate is about; `errors` a clip: a number, or a list, by system."""
    lists = {name: errors.get(name, default) for name in names}
    found = gates([system(n, [e] * CLIPS if isinstance(e, int) else e) for n, e in lists.items()])
    keys = ("int8", "fp16", "triton", "answered")
    return dict(zip(keys, [gate.passed for gate in found], strict=True))


def test_gates_pass_at_the_limit_and_fail_above():
    assert set(judged({}).values()) == {True}
    assert set(judged(dict.fromkeys(OURS, 11)).values()) == {True}  # 1.1 % - 1.0 %
    above = judged({"earshot-int8": 12})
    assert above == {"triton": True, "int8": False, "fp16": False, "answered": True}
    assert judged({"earshot-triton": 12})["triton"] is False
    assert judged({"earshot-fp16": 8})["fp16"] is False
    for better in ("faster-whisper-float32", "faster-whisper-int8"):
        assert judged({better: 5})["int8"] is False, "the more accurate one is the bound"


def test_a_missing_system_leaves_its_gates_undecided():
    def undecided(missing):
        found = judged({}, [name for name in NAMES if name != missing])
        return {key for key, passed in found.items() if passed is None}

    assert undecided("earshot-triton") == {"triton"}
    assert undecided("earshot-int8") == {"triton", "int8", "fp16"}
    assert undecided("earshot-fp16") == {"fp16"}
    assert undecided("faster-whisper-int8") == set(), "the other one is their default then"


def test_what_the_clips_cannot_tell_is_not_decided():
    """The interval shrinks with the root of the clips' number: a quarter takes sixteen times."""
    few = [10] * (CLIPS - 1) + [60]  # +0.125 points on the whole, all of it from one clip
    assert judged({"earshot-int8": few})["int8"] is None
    gate = gates([system("earshot-int8", [30, 50] * 20), system("earshot-fp16", [40] * 40)])[1]
    number = re.search(r"too few: about ([\d,]+) of such clips would decide this gap", gate.detail)
    assert gate.passed is None and 300 < int(number[1]) < 500  # (0.31 / 0.1) ** 2 * 40


def test_the_default_has_the_configured_precision():
    systems = [system(name, [5 if name == "earshot-fp16" else 1] * 9) for name in NAMES]
    bad = [gate.name for gate in gates(systems, "fp16") if gate.passed is False]
    assert bad == ["CER of earshot-fp16 at most 0.1 points above faster-whisper's default"]


def test_all_clips_that_both_heard_are_judged_together():
    """What one of two did not hear is left out for both."""
    both = score_system("earshot-int8", [call(50, clip_set="heldout"), call(50)])
    better = score_system("earshot-fp16", [call(100, clip_set="heldout"), call(50)])
    found = gates([both, score_system(NAMES[-1], [call(50)]), better])
    assert found[0].passed is True and "on 1 clips" in found[0].detail
    assert "50.00 % - 25.00 % (earshot-fp16) = +25.00 points" in found[1].detail
    assert "on 2 clips" in found[1].detail


def test_the_groups_that_are_named_decide():
    """INT8 is worse on what is unintelligible, and equal on what is clear."""

    def heard(name, right):
        clear = [call(99, f"clear{n}", group="clear") for n in range(9)]
        murmur = [call(right, f"murmur{n}", group="murmur") for n in range(9)]
        return score_system(name, clear + murmur)

    systems = [heard("earshot-int8", 40), heard("earshot-fp16", 60)]
    for groups, passed in (((), False), (("clear",), True), (("murmur",), False)):
        found = gates(systems, groups=groups)[1]
        assert found.passed is passed
    assert "on 9 clips" in found.detail


def test_clips_without_text_are_not_judged_and_a_failed_call_fails():
    silent = [score_system(n, [timed_call("n", "", "")]) for n in NAMES]
    gate = gates(silent)[0]
    assert (gate.passed, gate.detail) == (None, "they have no clip with a reference text in common")
    gate = gates([system("earshot-int8", [0], prediction=None, error="AudioError: no")])[-1]
    assert gate.passed is False
    assert gate.detail == "1 failed, the first: earshot-int8: 000: AudioError: no"


# ---------------------------------------------------------------- normalizers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Hello, \t World!\n ", "hello world"),
        ("Don't — twenty-seven 5 € + 3 ...", "dont twenty seven 5 € + 3"),  # symbols stay
        ("¿Dónde está? «Aquí». STRASSE Straße", "dónde está aquí strasse strasse"),
        ("cafe\u0301 ﬁne １２", "caf\u00e9 fine 12"),  # composed accents, compatibility forms
    ],
)
def test_basic_v1(text, expected):
    basic = normalizer("basic-v1")
    assert basic(text, "en") == basic(text, None) == basic(expected, "en") == expected


def test_whispers_english_normaliser_is_for_english():
    whisper = normalizer("whisper-english")
    said = "Um, Mr. Smith's paid twenty-one dollars (laughs)!"
    assert whisper(said, "en") == "mister smith is paid $21"
    assert whisper("Mr. Veintiuno, el niño", "es") == "mr veintiuno el niño"
    assert whisper("Mr. Twenty-one", None) == "mr twenty one"


def test_spellings_come_from_the_checkpoint(tmp_path):
    assert read_spelling(tmp_path) == Spelling()
    (tmp_path / SPELLING_FILE).write_text('{"colour": "color"}')
    spelling = read_spelling(tmp_path)
    assert normalizer("whisper-english", spelling)("Colour", "en") == "color"
    assert normalizer("whisper-english")("Colour", "en") == "colour"
    (tmp_path / SPELLING_FILE).write_text("[]")
    with pytest.raises(ConfigError, match=r"normalizer\.json holds \[\]; expected a table"):
        read_spelling(tmp_path)
