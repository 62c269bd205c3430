import re

import numpy as np
import pytest

from eval.accuracy.score import clips_to_decide, gates, score_system
from tests.eval.fakes import facts, timed_call

CLIPS = 40
OURS = ("earshot-triton", "earshot-int8")
NAMES = (*OURS, "earshot-fp16", "faster-whisper-float32", "faster-whisper-int8")


def system(name, errors, clip_set="timed", **changes):
    """A scored system that gets `errors[clip]` of 1000 characters of each clip wrong."""
    calls = [
        timed_call(
            f"{clip:03}",
            "a" * 1000,
            "b" * wrong + "a" * (1000 - wrong),
            phase="accuracy",
            clip_set=clip_set,
            **changes,
        )
        for clip, wrong in enumerate(errors)
    ]
    return score_system(facts(name), calls, "raw")


def judged(errors, names=NAMES, default=10):
    """Outcomes by what the gate is about; `errors` a clip: a number, or a list, by system."""
    scores = []
    for name in names:
        wrong = errors.get(name, default)
        scores.append(system(name, [wrong] * CLIPS if isinstance(wrong, int) else wrong))
    found = gates(scores, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    keys = ("int8", "fp16", "triton", "answered")
    return dict(zip(keys, [gate.passed for gate in found], strict=True))


def test_gates_pass_at_the_limit_and_fail_above():
    assert set(judged({}).values()) == {True}
    assert set(judged(dict.fromkeys(OURS, 11)).values()) == {True}  # 1.1 % - 1.0 %
    above = judged({"earshot-int8": 12})
    assert above == {"triton": True, "int8": False, "fp16": False, "answered": True}
    assert judged({"earshot-triton": 12})["triton"] is False
    assert judged({"earshot-fp16": 8})["fp16"] is False


def test_the_more_accurate_faster_whisper_is_the_bound():
    for better in ("faster-whisper-float32", "faster-whisper-int8"):
        assert judged({better: 5})["int8"] is False


@pytest.mark.nightly
def test_what_the_clips_cannot_tell_is_not_decided():
    """A gap above the limit that hangs on one clip, and none at all that is known too badly."""
    few = [10] * (CLIPS - 1) + [60]  # +0.125 points on the whole, all of it from one clip
    assert judged({"earshot-int8": few})["int8"] is None
    noisy = np.where(np.arange(CLIPS) % 2, 30, -30) + 40
    assert judged({"earshot-int8": noisy.tolist()}, default=40)["int8"] is None


@pytest.mark.nightly
def test_equal_systems_rarely_fail():
    """Two systems that err alike, each by its own luck: the gate must not fail by chance."""
    failed = 0
    for seed in range(10):
        draw = np.random.default_rng(seed)
        errors = {name: draw.poisson(30, CLIPS).tolist() for name in NAMES}
        failed += judged(errors)["int8"] is False
    assert failed <= 1


@pytest.mark.parametrize(
    ("missing", "undecided"),
    [
        ("earshot-triton", {"triton"}),
        ("earshot-int8", {"triton", "int8", "fp16"}),
        ("earshot-fp16", {"fp16"}),
        ("faster-whisper-float32", set()),  # the other one is their default then
        ("faster-whisper-int8", set()),
    ],
)
def test_a_missing_system_leaves_its_gates_undecided(missing, undecided):
    found = judged({}, [name for name in NAMES if name != missing])
    assert {key for key, passed in found.items() if passed is None} == undecided


def test_a_gate_says_how_many_clips_decide_its_gap():
    """The interval shrinks with the root of their number: a quarter of it takes sixteen times."""
    assert clips_to_decide(0.05, (-0.15, 0.25), 0.1, 100) == 1600
    assert clips_to_decide(-0.3, (-0.5, -0.1), 0.1, 100) == 25
    assert clips_to_decide(0.1, (0.0, 0.2), 0.1, 100) is None
    assert clips_to_decide(0.0, (0.0, 0.0), 0.1, 100) == 1
    noisy = [system("earshot-int8", [30, 50] * 20), system("earshot-fp16", [40] * 40)]
    gate = gates(noisy, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)[1]
    number = re.search(
        r"about ([\d,]+) such clips decide a gap of this size: 40 cannot tell", gate.detail
    )
    assert gate.passed is None and 300 < int(number[1]) < 500  # (0.31 / 0.1) ** 2 * 40


def test_the_default_has_the_configured_precision():
    scores = [system(name, [5 if name == "earshot-fp16" else 1] * 9) for name in NAMES]
    found = gates(scores, "fp16", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    bad = [gate.name for gate in found if gate.passed is False]
    assert bad == ["CER of earshot-fp16 at most 0.1 points above faster-whisper's default"]


def test_all_clips_that_both_heard_are_judged_together():
    """What one of two did not hear is left out for both."""
    ours, theirs = (
        score_system(
            facts(name),
            [
                timed_call("x", "a" * 100, "a" * 50, phase="accuracy", clip_set=clip_set)
                for clip_set in sets
            ],
            "raw",
        )
        for name, sets in (
            ("earshot-int8", ("heldout", "timed")),
            ("faster-whisper-int8", ("timed",)),
        )
    )
    fp16 = score_system(
        facts("earshot-fp16"),
        [
            timed_call("x", "a" * 100, text, phase="accuracy", clip_set=clip_set)
            for clip_set, text in (("heldout", "a" * 100), ("timed", "a" * 50))
        ],
        "raw",
    )
    found = gates([ours, theirs, fp16], "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    assert found[0].passed is True and "on 1 clips, of which 1 have as many" in found[0].detail
    assert "50.00 % - 25.00 % (earshot-fp16) = +25.00 points" in found[1].detail
    assert "on 2 clips, of which 1 have as many errors with both" in found[1].detail


def test_the_groups_that_are_named_decide():
    """INT8 is worse on what nobody understands, and equal on what is clear."""
    scores = [
        score_system(
            facts(name),
            [
                timed_call(f"{group}{n}", "a" * 100, heard, phase="accuracy", group=group)
                for group, heard in (("clear", "a" * 99), ("murmur", "a" * right))
                for n in range(9)
            ],
            "raw",
        )
        for name, right in (("earshot-int8", 40), ("earshot-fp16", 60))
    ]
    for groups, passed in (((), False), (("clear",), True), (("murmur",), False)):
        found = gates(scores, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1, groups=groups)
        assert found[1].passed is passed
    assert "on 9 clips" in found[1].detail


def test_clips_without_text_are_not_judged():
    silent = [
        score_system(facts(name), [timed_call("n", "", "", phase="accuracy")], "raw")
        for name in NAMES
    ]
    gate = gates(silent, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)[0]
    assert (gate.passed, gate.detail) == (None, "they heard no clip with a reference text together")


def test_a_failed_call_fails_the_run():
    broken = system("earshot-int8", [0], prediction=None, error="AudioError: no")
    gate = gates([broken], "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)[-1]
    assert gate.passed is False
    assert gate.detail == "1 failed, the first: earshot-int8: 000: AudioError: no"
