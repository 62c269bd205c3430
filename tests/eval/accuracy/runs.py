"""A scored run of made-up systems, for tests of what is made of it."""

import dataclasses

from eval.accuracy.normalize import normalizer
from eval.accuracy.predictions import RunFacts
from eval.accuracy.report import Report
from eval.accuracy.score import gates, score_system
from eval.config import EvalConfig
from tests.eval.fakes import facts, timed_call

RUN = RunFacts(
    started="2026-01-02T03:04:05+00:00",
    config_name="demo",
    precision="int8",
    settings=EvalConfig(manifest="m.jsonl", heldout="h.jsonl", repeats=1, half="", gate_groups=()),
    clips={"heldout": 1, "timed": 2},
    one_clip="a.wav",
    one_clip_s=7.65,
    machine={"CPU": "a chip", "GPU": "none"},
    sources={"heldout": "h.jsonl: 1 clip", "timed": "m.jsonl: 2 clips"},
    unreadable={"timed": {"gone.wav": "it is gone"}},
)


def calls(text, seconds=None, **fields):
    """A system that hears `text` in one clip, the others right; timed where `seconds` is given."""
    clips = (("a.wav", "hello you", text), ("n.wav", "", ""))
    rows = [timed_call(*clip, group="studio", **fields) for clip in clips]
    rows.append(timed_call("h.wav", "good bye", "good bye", clip_set="heldout"))
    if seconds is not None:
        rows += [
            timed_call(*clip, phase=phase, latency_s=seconds)
            for phase in ("loaded", "alone")
            for clip in clips
        ]
        rows.append(timed_call(*clips[0], phase="one_clip", latency_s=seconds))
    return rows


def score(name, text, seconds=None):
    """The score of such a system."""
    return score_system(facts(name), calls(text, seconds), normalizer("basic-v1"))


def report(ours="hello you", seconds=0.5):
    """A run of three systems, of which earshot-int8 hears `ours`; judged by the timed clips."""
    scores = (
        score("earshot-int8", ours, seconds),
        score("earshot-fp16", "hello you"),
        score("faster-whisper-int8", "hello you", 1.0),
    )
    timed = [dataclasses.replace(s, sets={"timed": s.sets["timed"]}) for s in scores]
    limits = EvalConfig(max_cer_gap_faster_whisper=0.3, max_cer_gap_fp16=0.2)
    judged = gates(timed, "int8", limits)
    return Report(RUN, "basic-v1", scores, tuple(judged))
