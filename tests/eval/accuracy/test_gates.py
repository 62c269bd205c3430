import numpy as np
import pytest

from eval.accuracy import gates as gates_module
from eval.accuracy.gates import gates
from eval.accuracy.score import score_system
from tests.eval.fakes import facts, timed_call

CLIPS = 40
OURS = ("earshot-triton", "earshot-int8")
NAMES = (*OURS, "earshot-fp16", "faster-whisper-float32", "faster-whisper-int8")


def system(name, errors, clip_set="timed", **changes):
    """A scored system that gets `errors[clip]` of 1000 characters of each clip wrong."""
    calls = [
        timed_call(
            f"{clip:03}", "a" * 1000, "b" * wrong + "a" * (1000 - wrong),
            phase="accuracy", clip_set=clip_set, **changes,
        )
        for clip, wrong in enumerate(errors)
    ]  # fmt: skip
    return score_system(facts(name), calls, "raw")


def judged(errors, names=NAMES, default=10):
    """Outcomes by what the gate is about; `errors` a clip: a number, or a list, by system."""
    scores = []
    for name in names:
        wrong = errors.get(name, default)
        scores.append(system(name, [wrong] * CLIPS if isinstance(wrong, int) else wrong))
    found = gates(scores, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    keys = ("triton", "int8", "fp16", "answered")
    return dict(zip(keys, [gate.passed for gate in found], strict=True))


def test_gates_pass_at_the_limit_and_fail_above():
    assert set(judged({}).values()) == {True}
    assert set(judged(dict.fromkeys(OURS, 11)).values()) == {True}  # 1.1 % - 1.0 %
    above = judged({"earshot-int8": 12})
    assert above == {"triton": True, "int8": False, "fp16": False, "answered": True}
    assert judged({"earshot-fp16": 8})["fp16"] is False


def test_better_than_theirs_passes():
    assert set(judged(dict.fromkeys(OURS, 0)).values()) == {True}


def test_the_more_accurate_faster_whisper_is_the_bound():
    for better in ("faster-whisper-float32", "faster-whisper-int8"):
        assert judged({better: 5})["int8"] is False


def test_what_the_clips_cannot_tell_is_not_decided():
    """A gap above the limit that hangs on one clip, and none at all that is known too badly."""
    few = [10] * (CLIPS - 1) + [60]  # +0.125 points on the whole, all of it from one clip
    assert judged({"earshot-int8": few})["int8"] is None
    noisy = np.where(np.arange(CLIPS) % 2, 30, -30) + 40
    assert judged({"earshot-int8": noisy.tolist()}, default=40)["int8"] is None


def test_many_small_losses_fail():
    """The same mean gap as of one clip: what counts is how sure it is."""
    worse = [13 if clip % 10 else 10 for clip in range(CLIPS)]
    assert judged({"earshot-int8": worse})["int8"] is False


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
        ("earshot-int8", {"int8", "fp16"}),
        ("earshot-fp16", {"fp16"}),
        ("faster-whisper-float32", {"triton", "int8"}),
        ("faster-whisper-int8", {"triton", "int8"}),
    ],
)
def test_a_missing_system_leaves_its_gates_undecided(missing, undecided):
    found = judged({}, [name for name in NAMES if name != missing])
    assert {key for key, passed in found.items() if passed is None} == undecided


def test_a_missing_system_is_named():
    found = gates([system("earshot-int8", [1])], "int8", max_gap_faster_whisper=1, max_gap_fp16=1)
    missing = "faster-whisper-float32 and faster-whisper-int8"
    assert found[1].detail == f"{missing} did not hear them in this run"


def test_a_system_that_did_not_hear_a_set_leaves_its_gates_undecided():
    scores = [system(name, [1] * 9) for name in NAMES]
    scores += [system("other", [1] * 9, clip_set="heldout")]
    found = gates(scores, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    heldout = [gate for gate in found if "held-out" in gate.name]
    assert [gate.passed for gate in heldout] == [None, None]
    assert heldout[1].detail == "earshot-int8 and earshot-fp16 did not hear them in this run"


def test_the_default_has_the_configured_precision():
    scores = [system(name, [5 if name == "earshot-fp16" else 1] * 9) for name in NAMES]
    found = gates(scores, "fp16", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    bad = [gate.name for gate in found if gate.passed is False]
    assert bad == [
        "CER of earshot-fp16 on the timed clips at most 0.1 points above faster-whisper's default"
    ]


def test_every_set_is_judged():
    scores = []
    for name in NAMES:
        both = [
            timed_call("x", "a" * 100, text, phase="accuracy", clip_set=clip_set)
            for clip_set, text in (
                ("heldout", "a" * (50 if name in OURS else 100)),
                ("timed", "a" * (50 if name in OURS else 100)),
            )
        ]
        scores.append(score_system(facts(name), both, "raw"))
    found = gates(scores, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)
    titles = gates_module.TITLES.values()
    outcome = [[gate.passed for gate in found if title in gate.name] for title in titles]
    assert outcome == [[False, False], [False] * 3]
    assert "50.00 % - 0.00 % (faster-whisper-float32) = +50.00 points [+50.00, +50.00]" in (
        found[0].detail
    )


def test_clips_without_text_are_not_judged():
    silent = [
        score_system(facts(name), [timed_call("n", "", "", phase="accuracy")], "raw")
        for name in NAMES
    ]
    gate = gates(silent, "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)[0]
    assert (gate.passed, gate.detail) == (None, "no clip has a reference text")


def test_a_failed_call_fails_the_run():
    broken = system("earshot-int8", [0], prediction=None, error="AudioError: no")
    gate = gates([broken], "int8", max_gap_faster_whisper=0.1, max_gap_fp16=0.1)[-1]
    assert gate.passed is False
    assert gate.detail == "1 failed, the first: earshot-int8: 000: AudioError: no"
