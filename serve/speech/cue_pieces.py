"""Cut transcripts into the pieces of subtitles, which lines may not break.

A piece is a word, or a run of characters in scripts without spaces. Pieces have the times of the
words. In a segment without words the time is divided in proportion to the width of the text.
"""

import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Sequence

from serve.contract.messages import Segment
from serve.speech.scripts import is_joined
from serve.speech.sentences import CLOSING, ENDS, sentence_ends

CLAUSE, SEGMENT, ANYWHERE, ABBREVIATION = 1.5, 3.0, 5.0, 8.0
"""Costs of a split after a clause, a segment, a word and an abbreviation; 0 after a sentence."""

_SLOWEST = 3.0  # minimum characters per second, if only the segment's times are known
_CLAUSE_ENDS = ",;:—–،؛、，；：､၊፣፤"
# Characters that may not begin or end a line, by Japanese and Chinese typesetting rules.
_NO_START = frozenset(
    ENDS + _CLAUSE_ENDS + CLOSING + "%‰°ー々〻ゝゞヽヾ・ๆฯ"
    "ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶ"
)
_NO_END = frozenset("([{«“‘¿¡「『（【《〈［｛$€£¥￥#")
_SPACELESS = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai, Lao, Burmese, Khmer
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")  # wide, but with spaces


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A word, or a run of characters that lines may not break."""

    text: str  # stripped
    space: bool  # whether a space precedes it
    start: float  # s; not before the start of the speaker's previous piece
    end: float  # s
    width: int
    cost: float  # cost of a split after it, without the discount for a pause
    speaker: str | None = None


def pieces_of(segments: Sequence[Segment], max_width: int) -> list[Piece]:
    """Cut a transcript into pieces that fit into a line.

    Args:
        segments: in order of time, with words or without.
        max_width: the maximum width of a line, measured by `width_of`.

    Returns:
        The pieces, sorted by start. The pieces of one speaker keep their order.
    """
    by_speaker: dict[str | None, list[tuple[int, Segment]]] = {}
    for numbered in enumerate(segments):
        by_speaker.setdefault(numbered[1].speaker, []).append(numbered)
    pieces = [
        piece
        for speaker, numbered_segments in by_speaker.items()
        for piece in _of_speaker(speaker, numbered_segments, max_width)
    ]
    pieces.sort(key=lambda item: (item[1].start, item[0]))
    return [piece for _, piece in pieces]


def width_of(text: str) -> int:
    """Return the width of a text; East Asian characters count 2, combining marks 0."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _of_speaker(
    speaker: str | None, segments: Sequence[tuple[int, Segment]], max_width: int
) -> Iterator[tuple[int, Piece]]:
    """Cut one speaker's numbered segments; yield pieces with their segment's number."""
    cut = [
        (number, at == 0, at == len(parts) - 1, part)
        for number, segment in segments
        for parts in [_cut_segment(segment, max_width)]
        for at, part in enumerate(parts)
    ]
    bare = [" ".join(text.split()) for *_, (text, _, _) in cut]
    reached = 0.0
    for (number, begins, ends, (text, start, end)), word, sentence in zip(
        cut, bare, sentence_ends(bare), strict=True
    ):
        reached = max(reached, start)
        cost = 0.0 if sentence else _split_cost(word, ends)
        space = text[0].isspace() or (begins and not _stands_alone(word[0]))
        yield number, Piece(word, space, reached, max(reached, end), width_of(word), cost, speaker)


def _cut_segment(segment: Segment, max_width: int) -> list[tuple[str, float, float]]:
    """Return (text, start, end) of a segment's pieces; the text includes a leading space."""
    joined: list[tuple[str, float, float]] = []
    for text, start, end in _timed(segment):
        if joined and not _may_split(joined[-1][0][-1], text[0]):
            before, begin, _ = joined.pop()
            text, start = before + text, begin
        joined.append((text, start, max(start, end)))
    return [part for unit in joined for part in _cut(*unit, max_width)]


def _timed(segment: Segment) -> Iterator[tuple[str, float, float]]:
    """Yield (text, start, end) of words or single characters; texts include a leading space."""
    if segment.words:
        for word in segment.words:
            if word.word.strip():
                yield word.word, word.start, word.end
        return
    texts = [text for word in re.findall(r"\s*\S+", segment.text) for text in _characters(word)]
    widths = [width_of(text) for text in texts]
    total = max(sum(widths), 1)
    each_s = min(segment.end - segment.start, total / _SLOWEST) / total
    done = 0
    for text, width in zip(texts, widths, strict=True):
        yield text, segment.start + done * each_s, segment.start + (done + width) * each_s
        done += width


def _characters(word: str) -> Iterator[str]:
    """Yield the whole word in scripts with spaces, else its characters."""
    begin, bare = 0, len(word) - len(word.lstrip())
    for at in range(bare + 1, len(word)):
        if _may_split(word[at - 1], word[at]):
            yield word[begin:at]
            begin = at
    yield word[begin:]


def _may_split(last: str, first: str) -> bool:
    """Return whether a line may break between two characters."""
    if last.isspace() or first.isspace():
        return True
    if first in _NO_START or last in _NO_END or is_joined(last, first):
        return False
    return _stands_alone(last) or _stands_alone(first)


def _stands_alone(char: str) -> bool:
    """Return whether a character's script is written without spaces."""
    if char.isascii() or _HANGUL.match(char):
        return False
    return _width(char) == 2 or bool(_SPACELESS.match(char))


def _cut(text: str, start: float, end: float, max_width: int) -> Iterator[tuple[str, float, float]]:
    """Cut a text into parts that fit into a line, even within a long word."""
    if width_of(text.strip()) <= max_width:
        yield text, start, end
        return
    parts = [text[: len(text) - len(text.lstrip())]]
    for char in text.strip():
        if parts[-1].strip() and width_of(parts[-1].strip() + char) > max_width:
            parts.append("")
        parts[-1] += char
    each_s, done = (end - start) / sum(map(len, parts)), 0
    for part in parts:
        yield part, start + done * each_s, start + (done + len(part)) * each_s
        done += len(part)


def _split_cost(text: str, ends_segment: bool) -> float:
    """Return the cost of a split after a text that does not end a sentence."""
    last = text.rstrip(CLOSING)[-1:]
    if last and last in _CLAUSE_ENDS:
        return CLAUSE
    if last == ".":
        return ABBREVIATION
    return SEGMENT if ends_segment else ANYWHERE
