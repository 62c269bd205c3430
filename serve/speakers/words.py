"""Assign words to speakers, and split segments at changes of speaker."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from serve.contract.messages import Segment, Word
from serve.speakers.diarize import SpeakerTurn, with_letters
from serve.speech.text import sentence_ends

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]


class _SpeakerTurns:
    """A lookup of the speaker of an interval, in a recording's turns."""

    def __init__(self, turns: Sequence[SpeakerTurn]) -> None:
        self._turns = turns
        self._starts = [turn.start_s for turn in turns]
        self._ends = list(itertools.accumulate((turn.end_s for turn in turns), max))

    def speaker(self, start: float, end: float, previous: str | None) -> str | None:
        """Return the speaker with the most speech in an interval.

        Among equals the previous speaker wins. Without any speech the nearest speaker is returned,
        and None if there are no turns.
        """
        first = bisect.bisect_right(self._ends, start)
        spoken = dict[str, float]()
        last = bisect.bisect_left(self._starts, end)
        for turn in self._turns[first:last]:
            if (seconds := min(end, turn.end_s) - max(start, turn.start_s)) > 0:
                spoken[turn.speaker] = spoken.get(turn.speaker, 0.0) + seconds
        if not spoken:
            if not self._turns:
                return None
            adjacent = self._turns[max(0, first - 1) : first + 1]
            return min(adjacent, key=lambda turn: _distance_s(turn, start, end)).speaker
        return max(spoken, key=lambda speaker: (round(spoken[speaker], 3), speaker == previous))


def _distance_s(turn: SpeakerTurn, start: float, end: float) -> float:
    return max(turn.start_s - end, start - turn.end_s)


def label(words: Sequence[Word], turns: Sequence[SpeakerTurn]) -> list[str | None]:
    """Return the speaker of each word.

    A single word of another speaker within a sentence is treated as an error of the turns and gets
    its neighbours' speaker.

    Args:
        words: the words in order of time.
        turns: the turns in order of time, from `Diarizer.diarize`.

    Returns:
        The speaker of each word; None if there are no turns.
    """
    turn_lookup, speakers = _SpeakerTurns(turns), list[str | None]()
    for word in words:
        previous = speakers[-1] if speakers else None
        speakers.append(turn_lookup.speaker(word.start, word.end, previous))
    for first, last in _sentences(words):
        speakers[first:last] = _smooth_single_words(speakers[first:last])
    return speakers


def split(
    segments: Sequence[Segment], turns: Sequence[SpeakerTurn], decode: Decode
) -> Iterator[Segment]:
    """Split segments at changes of speaker, and set the speaker of each part.

    A segment without words is not split and gets its main speaker.

    Args:
        segments: the segments in order of time.
        turns: the turns in order of time, from `Diarizer.diarize`.
        decode: returns the text of tokens, by which tokens are assigned to parts.

    Yields:
        Segments in order; the speaker is None if there are no turns.
    """
    labels = label([word for segment in segments for word in segment.words or ()], turns)
    turn_lookup, offset, previous = _SpeakerTurns(turns), 0, None
    for segment in segments:
        words = segment.words or ()
        speakers = labels[offset : offset + len(words)]
        offset += len(words)
        runs = list(_runs(speakers))
        if len(runs) > 1:
            yield from _parts(segment, speakers, runs, decode)
        elif runs:
            yield dataclasses.replace(segment, speaker=speakers[0])
        else:
            speaker = turn_lookup.speaker(segment.start, segment.end, previous)
            yield dataclasses.replace(segment, speaker=speaker)
            speakers = [speaker]
        previous = speakers[-1]


def letter_speakers(segments: Sequence[Segment], known: Collection[str]) -> list[Segment]:
    """Rename unknown speakers to A, B, … in the order of first segments.

    Args:
        segments: the segments in order of time; their speakers are letters or known names.
        known: the names of known speakers, which do not change.
    """
    speakers = (segment.speaker for segment in segments if segment.speaker is not None)
    names = with_letters(speakers, {name: name for name in known})
    return [
        dataclasses.replace(segment, speaker=segment.speaker and names[segment.speaker])
        for segment in segments
    ]


def _parts(
    segment: Segment,
    speakers: Sequence[str | None],
    runs: Sequence[tuple[int, int]],
    decode: Decode,
) -> Iterator[Segment]:
    """Split a segment into runs of words by one speaker, and yield a segment for each."""
    assert segment.words is not None
    parts = [segment.words[first:last] for first, last in runs]
    texts = ["".join(word.word for word in part) for part in parts]
    tokens = _split_by_text(segment.tokens, texts, lambda token: decode([token]))
    logprobs = _split_by_text(segment.token_logprobs or (), texts, lambda piece: piece.token)
    for index, part in enumerate(parts):
        yield dataclasses.replace(
            segment,
            start=part[0].start if index else segment.start,
            end=part[-1].end if index + 1 < len(parts) else segment.end,
            text=texts[index],
            words=part,
            tokens=tokens[index],
            token_logprobs=None if segment.token_logprobs is None else logprobs[index],
            speaker=speakers[runs[index][0]],
        )


def _split_by_text(
    items: Sequence[T], texts: Sequence[str], text_of: Callable[[T], str]
) -> list[tuple[T, ...]]:
    """Divide tokens, or items with a token's text, among consecutive texts."""
    ends = list(itertools.accumulate(map(len, texts)))[:-1]
    parts: list[list[T]] = [[] for _ in texts]
    length = 0
    for item in items:
        parts[bisect.bisect_right(ends, length)].append(item)
        length += len(text_of(item))
    return [tuple(part) for part in parts]


def _runs(speakers: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yield the first and last + 1 index of each run of one speaker."""
    first = 0
    for _, run in itertools.groupby(speakers):
        last = first + len(list(run))
        yield first, last
        first = last


def _sentences(words: Sequence[Word]) -> Iterator[tuple[int, int]]:
    """Yield the first and last + 1 index of each sentence."""
    first = 0
    for index, ends in enumerate(sentence_ends([word.word for word in words])):
        if ends or index == len(words) - 1:
            yield first, index + 1
            first = index + 1


def _smooth_single_words(speakers: Sequence[str | None]) -> list[str | None]:
    """Assign single words of a sentence to the speaker of the longer adjacent run."""
    runs = list(_runs(speakers))
    corrected = list(speakers)
    for index, (first, last) in enumerate(runs):
        neighbours = [runs[i] for i in (index - 1, index + 1) if 0 <= i < len(runs)]
        longest = max(neighbours, key=lambda run: run[1] - run[0], default=(0, 0))
        if last - first == 1 < longest[1] - longest[0]:
            corrected[first] = speakers[longest[0]]
    return corrected
