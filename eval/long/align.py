"""A recording's truth beside a system's text, word by word: what became of each sentence. Pure.

The whole recording is aligned at once (jiwer, Levenshtein over words), so a sentence that was put
at the wrong time still counts as heard. Words that were added belong to the sentence in which, or
after which, they stand.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jiwer

from eval.accuracy.data import TimedText
from eval.accuracy.normalize import Normalize
from eval.accuracy.score import Counts, char_counts
from eval.long.truth import UNSPOKEN, Recording, Stretch, What

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
