"""The bounds that fail a run on long recordings.

As in `eval.accuracy.gates`: a gap passes where its whole interval is within the limit, fails where
the whole interval is beyond it, and is not decided in between. Ours is the default, which nobody
has told anything; theirs is the most accurate of faster-whisper's rows on these recordings, without
those that were told that languages change.
"""

from collections.abc import Sequence

from eval.accuracy.gates import Gate, decided
from eval.accuracy.score import CONFIDENCE, Counts, gap_interval
from eval.long.plan import OUR_DEFAULT, THEIRS, THEIRS_BATCHED
from eval.long.score import LongScore

MAX_LOST_GAP = 0.5  # points of words lost or added, in the sentences beside our cuts
_CUTS = (
    f"words lost or added by {OUR_DEFAULT} beside its cuts at most {MAX_LOST_GAP:g} points above"
)


def long_gates(scores: Sequence[LongScore], max_cer_gap: float) -> list[Gate]:
    """Judge a run.

    Args:
        scores: of the systems that heard everything.
        max_cer_gap: points of CER by which ours may be above faster-whisper's best.
    """
    name = f"CER of {OUR_DEFAULT} at most {max_cer_gap:g} points above faster-whisper's best"
    ours = next((score for score in scores if score.name == OUR_DEFAULT), None)
    theirs = best_of_theirs(scores)
    if ours is None or theirs is None:
        missing = OUR_DEFAULT if ours is None else "faster-whisper"
        detail = f"{missing} did not hear them in this run"
        return [Gate(name, None, detail), Gate(f"{_CUTS} faster-whisper's", None, detail)]
    return [
        _cer_gate(name, ours, theirs, max_cer_gap),
        _cut_gate(ours, theirs),
        Gate("every call answered", not any(s.errors for s in scores), _failures(scores)),
    ]


def best_of_theirs(scores: Sequence[LongScore]) -> LongScore | None:
    """The most accurate of faster-whisper's rows that take a recording to be in one language."""
    rows = {**THEIRS, **THEIRS_BATCHED}
    one_language = {name for name, options in rows.items() if not options.get("multilingual")}
    theirs = [score for score in scores if score.name in one_language]
    return min(theirs, key=lambda score: score.overall.cer.counts.errors, default=None)


def _cer_gate(name: str, ours: LongScore, theirs: LongScore, limit: float) -> Gate:
    gap = gap_interval(ours.blocks, theirs.blocks)
    one, other = (_percent(sum(score.blocks, Counts())) for score in (ours, theirs))
    return decided(
        name, _detail(one, other, theirs.name, gap), gap, limit, f"{len(ours.blocks)} minutes"
    )


def _cut_gate(ours: LongScore, theirs: LongScore) -> Gate:
    name = f"{_CUTS} {theirs.name}'s in the same sentences"
    pairs = [
        (_lost_or_added(one), _lost_or_added(other))
        for (at_cut, one), (_, other) in zip(ours.sentences, theirs.sentences, strict=True)
        if at_cut
    ]
    if not pairs:
        return Gate(name, None, "it cut nowhere")
    mine, others = [one for one, _ in pairs], [other for _, other in pairs]
    gap = gap_interval(mine, others)
    one, other = (_percent(sum(found, Counts())) for found in (mine, others))
    detail = _detail(one, other, theirs.name, gap)
    return decided(name, detail, gap, MAX_LOST_GAP, f"{len(pairs)} sentences")


def _lost_or_added(words: Counts) -> Counts:
    """The same words, where one that was misheard counts as heard."""
    return Counts(0, words.deletions, words.insertions, words.hits + words.substitutions)


def _percent(counts: Counts) -> float:
    return 100.0 * counts.errors / counts.length


def _detail(ours: float, theirs: float, name: str, gap: tuple[float, float]) -> str:
    return (
        f"{ours:.2f} % - {theirs:.2f} % ({name}) = {ours - theirs:+.2f} points "
        f"[{gap[0]:+.2f}, {gap[1]:+.2f}] at {100 * CONFIDENCE:g} %"
    )


def _failures(scores: Sequence[LongScore]) -> str:
    failed = [f"{score.name}: {error}" for score in scores for error in score.errors]
    return f"{len(failed)} failed, the first: {failed[0]}" if failed else "0 failed"
