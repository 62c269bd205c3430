"""Scores of long recordings: words lost, repeated and made up; and the gates.

As in `eval.accuracy.gates`, a gap passes if its whole interval is within the limit, fails if the
whole interval is beyond it, and is not decided in between. Each of ours that has rivals is compared
with the most accurate of them on these recordings.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import jiwer

from eval.accuracy.gates import all_answered, decided, gap_text
from eval.accuracy.normalize import Normalize
from eval.accuracy.predictions import SystemFacts, TimedCall, TimedText
from eval.accuracy.score import Counts, Rate, char_counts, gap_interval, rate
from eval.long.compose import UNSPOKEN, Recording, Stretch, What
from eval.long.plan import OUR_DEFAULT, RIVALS, THEIRS, THEIRS_BATCHED, Kind
from eval.record import Check

RUN = 3  # words in a row, from which on they count as a stretch
_FARTHEST = 60  # words between a stretch and what it repeats
_ALIKE = 0.75  # share of words that are the same in a repeated stretch
NEAR_CUT_S = 0.5  # between a sentence and a cut that may have harmed it
TOUCH_S = 0.3  # by which a text has to overlap with a sentence, not to stand where nobody speaks


@dataclasses.dataclass(frozen=True)
class HeardSentence:
    """The outcome of a sentence."""

    sentence: Stretch
    words: Counts
    characters: Counts
    at_cut: bool  # within `NEAR_CUT_S` of a place where the system cut the audio


@dataclasses.dataclass(frozen=True)
class HeardRecording:
    """The outcome of a recording."""

    sentences: tuple[HeardSentence, ...]
    lost_in_stretches: int  # words, of those lost: `RUN` and more in a row
    repeated: int  # words, of those added: `RUN` and more in a row that stand near by as well
    made_up: int  # words, of those added: other stretches
    unspoken: dict[What, int]  # characters where nobody speaks, by what there is instead
    cuts: int | None  # places at which the system cut the audio; None where it does not say


def hear(
    recording: Recording, segments: Sequence[TimedText], normalize: Normalize
) -> HeardRecording:
    """Hold what a system said of a recording against what is said in it.

    Args:
        recording: the truth.
        segments: of the system, in order.
        normalize: what texts are compared under.
    """
    spoken = [normalize(stretch.text, stretch.language).split() for stretch in recording.sentences]
    answered = [word for segment in segments for word in normalize(segment.text, None).split()]
    alignment = _align([word for words in spoken for word in words], answered)
    regions = cut_regions(segments)
    stretches = [
        (part, part.hyp_end_idx - part.hyp_start_idx)
        for part in alignment
        if part.type == "insert" and part.hyp_end_idx - part.hyp_start_idx >= RUN
    ]
    repeated = sum(
        length for part, length in stretches if _repeats(answered, part.hyp_start_idx, length)
    )
    return HeardRecording(
        sentences=tuple(
            HeardSentence(
                sentence=sentence,
                words=words,
                characters=char_counts(" ".join(said_words), " ".join(heard_words)),
                at_cut=_near(sentence, regions or ()),
            )
            for sentence, said_words, (words, heard_words) in zip(
                recording.sentences, spoken, _by_sentence(spoken, answered, alignment), strict=True
            )
        ),
        lost_in_stretches=sum(
            length
            for part in alignment
            if part.type == "delete" and (length := part.ref_end_idx - part.ref_start_idx) >= RUN
        ),
        repeated=repeated,
        made_up=sum(length for _, length in stretches) - repeated,
        unspoken=_unspoken(recording, segments, normalize),
        cuts=None if regions is None else len(regions),
    )


def _align(spoken: Sequence[str], answered: Sequence[str]) -> list[jiwer.AlignmentChunk]:
    """Align two texts: parts that are equal, or one kind of edit."""
    out = jiwer.process_words([" ".join(spoken)], [" ".join(answered)])
    return list(out.alignments[0])


def _by_sentence(
    spoken: Sequence[Sequence[str]],
    answered: Sequence[str],
    alignment: Sequence[jiwer.AlignmentChunk],
) -> list[tuple[Counts, list[str]]]:
    """Return the word edits of each sentence, and the words that were heard of it."""
    owner = [number for number, words in enumerate(spoken) for _ in words]
    hits, substituted, lost, added = ([0] * len(spoken) for _ in range(4))
    words: list[list[str]] = [[] for _ in spoken]
    for part in alignment:
        for at in range(part.ref_start_idx, part.ref_end_idx):
            if part.type == "delete":
                lost[owner[at]] += 1
                continue
            (hits if part.type == "equal" else substituted)[owner[at]] += 1
            words[owner[at]].append(answered[part.hyp_start_idx + at - part.ref_start_idx])
        if part.type == "insert":
            number = owner[max(0, part.ref_start_idx - 1)]
            added[number] += part.hyp_end_idx - part.hyp_start_idx
            words[number] += answered[part.hyp_start_idx : part.hyp_end_idx]
    counts = map(Counts, substituted, lost, added, hits)
    return list(zip(counts, words, strict=True))


def _repeats(answered: Sequence[str], start: int, length: int) -> bool:
    """Return whether a stretch of the text stands there once more, not far before or after."""
    stretch = answered[start : start + length]
    for shift in range(1, _FARTHEST + length):
        for other in (start - shift, start + shift):
            if other < 0:
                continue
            same = sum(
                a == b for a, b in zip(stretch, answered[other : other + length], strict=False)
            )
            if same >= _ALIKE * length:
                return True
    return False


def cut_regions(segments: Sequence[TimedText]) -> list[tuple[float, float]] | None:
    """Find from when to when a cut may lie: between segments of different windows.

    None where the system does not tell windows apart.
    """
    if any(segment.window is None for segment in segments):
        return None
    return [
        (min(before.end_s, after.start_s), max(before.end_s, after.start_s))
        for before, after in itertools.pairwise(segments)
        if before.window != after.window
    ]


def _near(sentence: Stretch, regions: Sequence[tuple[float, float]]) -> bool:
    return any(
        sentence.start_s - NEAR_CUT_S <= end_s and start_s <= sentence.end_s + NEAR_CUT_S
        for start_s, end_s in regions
    )


def _unspoken(
    recording: Recording, segments: Sequence[TimedText], normalize: Normalize
) -> dict[What, int]:
    """Count characters of segments that touch no sentence, by what there is in their middle."""
    characters = dict.fromkeys(UNSPOKEN, 0)
    beside = [stretch for stretch in recording.stretches if stretch.what != "speech"]
    for segment in segments if beside else ():
        touched = any(
            min(segment.end_s, sentence.end_s) - max(segment.start_s, sentence.start_s) > TOUCH_S
            for sentence in recording.sentences
        )
        if not touched:
            what = _what(beside, (segment.start_s + segment.end_s) / 2)
            characters[what] += len(normalize(segment.text, None))
    return characters


def _what(stretches: Sequence[Stretch], at_s: float) -> What:
    """Find which of some stretches there is at a time, or next to it."""
    return min(
        stretches, key=lambda stretch: max(stretch.start_s - at_s, at_s - stretch.end_s)
    ).what


# ---------------------------------------------------------------- score


BLOCK_S = 60.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a system on some recordings; counts are words unless they say otherwise."""

    cer: Rate
    wer: Rate  # its counts tell what was lost and what was added
    lost_in_stretches: int
    repeated: int
    made_up: int
    unspoken: dict[What, int]  # characters
    cuts: int | None
    at_cuts: Counts  # of sentences beside which the system cut
    elsewhere: Counts  # of all others
    first_language: Rate  # CER of sentences in the language that a recording begins with
    other_languages: Rate
    rtfx: float


@dataclasses.dataclass(frozen=True)
class LongScore:
    """Everything that the report says about one system."""

    facts: SystemFacts
    overall: Figures
    by_kind: dict[Kind, Figures]
    blocks: tuple[Counts, ...]  # character edits of each minute
    sentences: tuple[tuple[bool, Counts], ...]  # of each: whether it is at a cut, its words
    languages: tuple[tuple[str, str | None], ...]  # of each recording: its first, and the answer
    errors: tuple[str, ...]  # calls that failed

    @property
    def name(self) -> str:
        """Return the system's name."""
        return self.facts.name


def score_long(
    facts: SystemFacts,
    calls: Sequence[TimedCall],
    recordings: Sequence[Recording],
    normalize: Normalize,
) -> LongScore:
    """Score a system.

    Args:
        facts: of the system.
        calls: one for each recording, in their order.
        recordings: the truth.
        normalize: what texts are compared under.
    """
    all_heard = [
        hear(recording, call.prediction.segments if call.prediction else (), normalize)
        for recording, call in zip(recordings, calls, strict=True)
    ]
    triples = list(zip(recordings, calls, all_heard, strict=True))
    kinds = dict.fromkeys(recording.kind for recording in recordings)
    return LongScore(
        facts=facts,
        overall=_figures(triples),
        by_kind={kind: _figures([t for t in triples if t[0].kind == kind]) for kind in kinds},
        blocks=tuple(_blocks(triples, lambda sentence: sentence.characters)),
        sentences=tuple((s.at_cut, s.words) for result in all_heard for s in result.sentences),
        languages=tuple(
            (recording.language, call.prediction.language if call.prediction else None)
            for recording, call, _ in triples
        ),
        errors=tuple(f"{call.file}: {call.error}" for call in calls if call.error is not None),
    )


_Triple = tuple[Recording, TimedCall, HeardRecording]


def _figures(triples: Sequence[_Triple]) -> Figures:
    results = [result for _, _, result in triples]
    sentences = [
        (recording.language, s) for recording, _, result in triples for s in result.sentences
    ]
    cuts = [result.cuts for result in results if result.cuts is not None]
    return Figures(
        cer=rate(_blocks(triples, lambda sentence: sentence.characters)),
        wer=rate(_blocks(triples, lambda sentence: sentence.words)),
        lost_in_stretches=sum(result.lost_in_stretches for result in results),
        repeated=sum(result.repeated for result in results),
        made_up=sum(result.made_up for result in results),
        unspoken={what: sum(result.unspoken[what] for result in results) for what in UNSPOKEN},
        cuts=sum(cuts) if len(cuts) == len(results) else None,
        at_cuts=_sum(s.words for _, s in sentences if s.at_cut),
        elsewhere=_sum(s.words for _, s in sentences if not s.at_cut),
        first_language=rate(
            [s.characters for language, s in sentences if s.sentence.language == language]
        ),
        other_languages=rate(
            [s.characters for language, s in sentences if s.sentence.language != language]
        ),
        rtfx=sum(call.duration_s for _, call, _ in triples)
        / sum(call.latency_s for _, call, _ in triples),
    )


def _blocks(triples: Sequence[_Triple], part: Callable[[HeardSentence], Counts]) -> list[Counts]:
    """Sum edits by minutes of recordings; in some minutes nobody speaks."""
    blocks: dict[tuple[str, int], Counts] = {}
    for recording, _, result in triples:
        for sentence in result.sentences:
            key = recording.file, int(sentence.sentence.start_s // BLOCK_S)
            blocks[key] = blocks.get(key, Counts()) + part(sentence)
    return list(blocks.values())


def _sum(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


# ---------------------------------------------------------------- gates


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
