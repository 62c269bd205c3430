"""The bounds that fail a run: our default against faster-whisper's default, INT8 against FP16.

A gap of two CERs over the same clips is known only to within its interval (paired bootstrap over
clips, 95 %). So a gate has three outcomes: it passes where the whole interval is at most the limit,
fails where the whole interval is above it, and is not decided in between: these clips cannot tell.
So a gap at its limit fails in about one run of 40, and what is not decided never reads as passed.
"""

import dataclasses
from collections.abc import Sequence

from eval.accuracy.data import ClipSet
from eval.accuracy.score import CONFIDENCE, SystemScore, gap_interval
from serve.config import Precision

THEIR_DEFAULTS = ("faster-whisper-float32", "faster-whisper-int8")
"""faster-whisper as its users run it; the more accurate of them is what ours is held against."""

_ROUNDING = 1e-9  # points

TITLES: dict[ClipSet, str] = {"heldout": "the held-out clips", "timed": "the timed clips"}


@dataclasses.dataclass(frozen=True)
class Gate:
    """A bound; `passed` is None where it could not be decided, and `detail` says why."""

    name: str
    passed: bool | None
    detail: str


def gates(
    scores: Sequence[SystemScore],
    precision: Precision,
    *,
    max_gap_faster_whisper: float,
    max_gap_fp16: float,
) -> list[Gate]:
    """Judge a run on each of its sets of clips.

    Args:
        scores: of the systems that ran.
        precision: of the configured engine, which says which of ours is the default.
        max_gap_faster_whisper: points of CER by which ours may be above faster-whisper.
        max_gap_fp16: points of CER by which INT8 may be above FP16.
    """
    found = {score.facts.name: score for score in scores}
    judged = []
    for clip_set in dict.fromkeys(name for score in scores for name in score.sets):
        where = TITLES[clip_set]
        # Behind Triton is the same transcriber, so the few clips are enough to see that it is.
        through_triton = ["earshot-triton"] if clip_set == "timed" else []
        for ours in (*through_triton, f"earshot-{precision}"):
            name = f"CER of {ours} on {where} at most {max_gap_faster_whisper:g} points above"
            name += " faster-whisper's default"
            judged.append(
                _gap_gate(name, ours, THEIR_DEFAULTS, max_gap_faster_whisper, found, clip_set)
            )
        name = f"CER of earshot-int8 on {where} at most {max_gap_fp16:g} points above earshot-fp16"
        judged.append(
            _gap_gate(name, "earshot-int8", ("earshot-fp16",), max_gap_fp16, found, clip_set)
        )
    return [*judged, _error_gate(scores)]


def _gap_gate(
    name: str,
    ours: str,
    others: Sequence[str],
    limit: float,
    found: dict[str, SystemScore],
    clip_set: ClipSet,
) -> Gate:
    """Judge `ours` against the most accurate of `others`, all of which must be there."""
    missing = [
        system
        for system in (ours, *others)
        if system not in found or clip_set not in found[system].sets
    ]
    if missing:
        return Gate(name, None, f"{' and '.join(missing)} did not hear them in this run")
    one = found[ours].sets[clip_set]
    theirs = min(others, key=lambda other: found[other].sets[clip_set].overall.cer.counts.errors)
    other = found[theirs].sets[clip_set]
    if one.overall.cer.percent is None or other.overall.cer.percent is None:
        return Gate(name, None, "no clip has a reference text")
    low, high = gap_interval(list(one.by_clip.values()), list(other.by_clip.values()))
    detail = (
        f"{one.overall.cer.percent:.2f} % - {other.overall.cer.percent:.2f} % ({theirs}) = "
        f"{one.overall.cer.percent - other.overall.cer.percent:+.2f} points "
        f"[{low:+.2f}, {high:+.2f}] at {100 * CONFIDENCE:g} %"
    )
    return decided(name, detail, (low, high), limit, f"{one.overall.clips} clips")


def decided(name: str, detail: str, interval: tuple[float, float], limit: float, what: str) -> Gate:
    """Judge a gap by its interval; `what` is too little to tell, where it is not decided."""
    low, high = interval
    if high <= limit + _ROUNDING:
        return Gate(name, True, detail)
    if low > limit + _ROUNDING:
        return Gate(name, False, detail)
    return Gate(name, None, f"{detail}: {what} cannot tell")


def complaints(gates: Sequence[Gate]) -> list[str]:
    """A line for each gate that did not pass."""
    said = {False: "FAILED", None: "not decided"}
    return [f"{said[g.passed]}: {g.name}. {g.detail}" for g in gates if g.passed is not True]


def _error_gate(scores: Sequence[SystemScore]) -> Gate:
    failed = [f"{score.facts.name}: {error}" for score in scores for error in score.errors]
    detail = f"{len(failed)} failed, the first: {failed[0]}" if failed else "0 failed"
    return Gate("every call answered", not failed, detail)
