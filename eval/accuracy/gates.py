"""The gates of a run: our default against faster-whisper's default, INT8 against FP16.

A gap of two CERs over the same clips is known only to within its interval (paired bootstrap over
clips, 95 %). So a gate passes if the whole interval is at most the limit, fails if the whole
interval is above it, and is not decided in between. A gap at its limit fails in about one run of
40. Each gate says how many clips decide a gap of the size that it found.
"""

from collections.abc import Mapping, Sequence

from eval.accuracy.predictions import ClipSet
from eval.accuracy.score import (
    CONFIDENCE,
    Counts,
    SystemScore,
    clips_to_decide,
    gap_interval,
)
from eval.record import Check
from serve.contract.config import Precision

THEIR_DEFAULTS = ("faster-whisper-float32", "faster-whisper-int8")
"""faster-whisper as its users run it; ours is compared with the more accurate of them."""

_ROUNDING = 1e-9  # points

TITLES: dict[ClipSet, str] = {"heldout": "the held-out clips", "timed": "the timed clips"}


def gates(
    scores: Sequence[SystemScore],
    precision: Precision,
    *,
    max_gap_faster_whisper: float,
    max_gap_fp16: float,
    groups: Sequence[str] = (),
) -> list[Check]:
    """Judge a run, on the clips that the compared systems heard.

    Args:
        scores: of the systems that ran.
        precision: of the configured engine, which says which of ours is the default.
        max_gap_faster_whisper: points of CER by which ours may be above faster-whisper.
        max_gap_fp16: points of CER by which INT8 may be above FP16.
        groups: groups of clips that decide; () is all clips.
    """
    by_name = {score.facts.name: score for score in scores}
    default = f"earshot-{precision}"
    theirs = [name for name in THEIR_DEFAULTS if name in by_name]
    pairs = [
        ("faster-whisper's default", default, theirs, max_gap_faster_whisper),
        ("earshot-fp16", "earshot-int8", ["earshot-fp16"], max_gap_fp16),
        # Behind Triton is the same transcriber, so a few clips are enough to see that it is.
        (f"{default} in process", "earshot-triton", [default], max_gap_fp16),
    ]
    answered = all_answered({score.facts.name: score.errors for score in scores})
    return [*(_gap_gate(*pair, by_name, groups) for pair in pairs), answered]


def _gap_gate(
    title: str,
    ours: str,
    others: Sequence[str],
    limit: float,
    by_name: dict[str, SystemScore],
    groups: Sequence[str],
) -> Check:
    """Judge `ours` against the most accurate of `others`; `title` names these."""
    name = f"CER of {ours} at most {limit:g} points above {title}"
    missing = [system for system in (ours, *others) if system not in by_name]
    if missing or not others:
        return Check(name, None, f"{' and '.join(missing) or title} did not run")
    judged: list[tuple[float, Check]] = []
    for other in others:
        pairs = _pairs(by_name[ours], by_name[other], groups)
        mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        totals = [sum(counts, Counts()) for counts in (mine, theirs)]
        if totals[0].length:
            rates = [100.0 * total.errors / total.length for total in totals]
            gap, interval = rates[0] - rates[1], gap_interval(mine, theirs)
            equal = sum(a.errors == b.errors for a, b in pairs)
            detail = (
                f"{gap_text(rates[0], rates[1], other, interval)} on {len(pairs)} clips, of which "
                f"{equal} have as many errors with both; "
                f"{_needed(gap, interval, limit, len(pairs))}"
            )
            judged.append((gap, decided(name, detail, interval, limit, f"{len(pairs)}")))
    if not judged:
        return Check(name, None, "they heard no clip with a reference text together")
    return max(judged, key=lambda one: one[0])[1]


def _pairs(
    ours: SystemScore, theirs: SystemScore, groups: Sequence[str]
) -> list[tuple[Counts, Counts]]:
    """Return the edits of both systems on the clips of these groups that both heard."""
    return [
        (counts, theirs.sets[clip_set].by_clip[file])
        for clip_set, of_set in ours.sets.items()
        if clip_set in theirs.sets
        for file, counts in of_set.by_clip.items()
        if file in theirs.sets[clip_set].by_clip and (not groups or of_set.groups[file] in groups)
    ]


def _needed(gap: float, interval: tuple[float, float], limit: float, clips: int) -> str:
    needed = clips_to_decide(gap, interval, limit, clips)
    if needed is None:
        return "no number of clips tells a gap that is the limit from it"
    return f"about {needed:,} such clips decide a gap of this size"


def gap_text(ours: float, theirs: float, name: str, interval: tuple[float, float]) -> str:
    """Say how far apart two rates in percent are, and the interval; `name` is of the other."""
    low, high = interval
    return (
        f"{ours:.2f} % - {theirs:.2f} % ({name}) = {ours - theirs:+.2f} points "
        f"[{low:+.2f}, {high:+.2f}] at {100 * CONFIDENCE:g} %"
    )


def decided(
    name: str, detail: str, interval: tuple[float, float], limit: float, what: str
) -> Check:
    """Judge a gap by its interval; `what` stands in the reason if it is not decided."""
    low, high = interval
    if high <= limit + _ROUNDING:
        return Check(name, True, detail)
    if low > limit + _ROUNDING:
        return Check(name, False, detail)
    return Check(name, None, f"{detail}: {what} cannot tell")


def all_answered(errors: Mapping[str, Sequence[str]]) -> Check:
    """Check that no call failed; errors by system."""
    failed = [f"{name}: {error}" for name, of_system in errors.items() for error in of_system]
    detail = f"{len(failed)} failed, the first: {failed[0]}" if failed else "0 failed"
    return Check("every call answered", not failed, detail)
