"""The bounds that fail a run on long recordings.

As in `eval.accuracy.gates`: a gap passes where its whole interval is within the limit, fails where
the whole interval is beyond it, and is not decided in between. Each of ours that has rivals is held
against the most accurate of them on these recordings.
"""

from collections.abc import Sequence

from eval.accuracy.gates import all_answered, decided, gap_text
from eval.accuracy.score import Counts, gap_interval
from eval.long.plan import OUR_DEFAULT, RIVALS, THEIRS, THEIRS_BATCHED
from eval.long.score import Figures, LongScore
from eval.long.truth import Kind
from eval.record import Check

MAX_LOST_GAP = 0.5  # points of words lost or added, in the sentences beside our cuts
MAX_UNCOVERED = 0.5  # per cent of words lost or repeated in stretches, where people read clearly
CLEAR: tuple[Kind, ...] = ("reading", "passage")
THEIRS_ALL = (*THEIRS, *THEIRS_BATCHED)


def long_gates(scores: Sequence[LongScore], max_cer_gap: float) -> list[Check]:
    """Judge a run.

    Args:
        scores: of the systems that heard everything.
        max_cer_gap: points of CER by which ours may be above faster-whisper's best.
    """
    by_name = {score.name: score for score in scores}
    judged = []
    for name, rivals in RIVALS.items():
        ours = by_name.get(name)
        theirs = best([by_name[rival] for rival in rivals if rival in by_name])
        judged.append(_cer_gate(name, ours, theirs, max_cer_gap))
        if name == OUR_DEFAULT:
            judged.append(_cut_gate(name, ours, theirs))
            judged += coverage_gates(ours, [s for s in scores if s.name in THEIRS_ALL])
    return [*judged, all_answered({score.name: score.errors for score in scores})]


def best(scores: Sequence[LongScore]) -> LongScore | None:
    """Return the most accurate."""
    return min(scores, key=lambda score: score.overall.cer.counts.errors, default=None)


def _cer_gate(name: str, ours: LongScore | None, theirs: LongScore | None, limit: float) -> Check:
    title = f"CER of {name} at most {limit:g} points above faster-whisper's best"
    if ours is None or theirs is None:
        return Check(title, None, _missing(name, ours))
    return _judged(title, ours.blocks, theirs.blocks, theirs.name, limit, "minutes")


def _cut_gate(name: str, ours: LongScore | None, theirs: LongScore | None) -> Check:
    title = f"words lost or added by {name} beside its cuts at most {MAX_LOST_GAP:g} points above"
    title += " faster-whisper's best in the same sentences"
    if ours is None or theirs is None:
        return Check(title, None, _missing(name, ours))
    pairs = [
        (_lost_or_added(counts), _lost_or_added(their_counts))
        for (at_cut, counts), (_, their_counts) in zip(
            ours.sentences, theirs.sentences, strict=True
        )
        if at_cut
    ]
    if not pairs:
        return Check(title, None, "it cut nowhere")
    mine, others = [mine for mine, _ in pairs], [other for _, other in pairs]
    return _judged(title, mine, others, theirs.name, MAX_LOST_GAP, "sentences")


def _judged(
    title: str,
    ours: Sequence[Counts],
    theirs: Sequence[Counts],
    name: str,
    limit: float,
    parts: str,
) -> Check:
    """Judge the gap of two that heard the same parts; `name` is of the other."""
    gap = gap_interval(ours, theirs)
    mine, other = (_percent(sum(counts, Counts())) for counts in (ours, theirs))
    detail = gap_text(mine, other, name, gap)
    return decided(title, detail, gap, limit, f"{len(ours)} {parts}")


def coverage_gates(ours: LongScore | None, theirs: Sequence[LongScore]) -> list[Check]:
    """Judge, of speech that people read, what is lost or comes twice, beside the best of theirs.

    A stretch that is lost is lost on every run, so these are counts without an interval.
    """
    judged = []
    for kind in CLEAR if ours else ():
        assert ours is not None
        if kind not in ours.by_kind:
            continue
        mine = uncovered(ours.by_kind[kind])
        others = {score.name: uncovered(score.by_kind[kind]) for score in theirs}
        name = min(others, key=lambda system: others[system], default=None)
        limit = MAX_UNCOVERED if name is None else min(MAX_UNCOVERED, others[name])
        detail = f"{mine:.2f} %; faster-whisper's best: " + (
            "not run" if name is None else f"{others[name]:.2f} % ({name})"
        )
        title = (
            f"words of kind {kind} lost or repeated in stretches: at most {MAX_UNCOVERED:g} %, and "
            "no more than faster-whisper's best"
        )
        judged.append(Check(title, mine <= limit, detail))
    return judged


def uncovered(figures: Figures) -> float:
    """Return the per cent of words that are lost, or said twice, in stretches."""
    counts = figures.wer.counts
    return 100.0 * (figures.lost_in_stretches + figures.repeated) / counts.length


def _missing(name: str, ours: LongScore | None) -> str:
    if ours is None:
        return f"{name} did not hear them in this run"
    return "none of faster-whisper's that are asked for as much heard them in this run"


def _lost_or_added(words: Counts) -> Counts:
    """Return the same words, where one that was misheard counts as heard."""
    return Counts(0, words.deletions, words.insertions, words.hits + words.substitutions)


def _percent(counts: Counts) -> float:
    return 100.0 * counts.errors / counts.length
