"""Answers of systems to long recordings -> figures. Pure.

Rates are edits over the length of all references, as in `eval.accuracy.score`. Intervals are
bootstraps over minutes of recordings, since mistakes come in stretches; the draws of two systems
are paired, for both heard the same minutes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from eval.accuracy.data import SystemFacts, TimedCall
from eval.accuracy.normalize import Normalize
from eval.accuracy.score import Counts, Rate, rate
from eval.long.align import HeardRecording, HeardSentence, hear
from eval.long.truth import UNSPOKEN, Kind, Recording, What

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
