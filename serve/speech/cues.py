"""Split a transcript into the cues of subtitles, with their times and lines.

All segments form one text. It is split where the sum of the costs is lowest: at the ends of
sentences and clauses and at pauses, so that each cue can be read in its time. Sizes, times and
reading speed follow the rules of broadcasters and streaming services: two lines of 42 characters,
5/6 s to 7 s, 20 characters per second. East Asian characters count twice, so a line has at most 21.

A cue holds the words spoken in its time. If two people speak at once, each has a line in the same
cue. If one speaks after the other, each has a cue, unless that would be too short.

Lines never break a piece: a word, or a run of characters in scripts without spaces. Pieces have the
times of the words. In a segment without words the time is divided in proportion to the width of the
text.
"""

import dataclasses
import itertools
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence

from serve.contract.errors import OptionError, shown
from serve.contract.messages import Segment
from serve.contract.options import option, options_of
from serve.speech.text import CLOSING, ENDS, is_joined, sentence_ends

CLAUSE, SEGMENT, ANYWHERE, ABBREVIATION = 1.5, 3.0, 5.0, 8.0
"""Costs of a split after a clause, a segment, a word and an abbreviation; 0 after a sentence."""

_MIN_CHARS_PER_S = 3.0  # minimum characters per second, if only the segment's times are known
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
    cut = [
        (segment.speaker, index == 0, index == len(parts) - 1, part)
        for segment in segments
        for parts in [_cut_segment(segment, max_width)]
        for index, part in enumerate(parts)
    ]
    stripped = [" ".join(text.split()) for *_, (text, _, _) in cut]
    sentences = [False] * len(cut)  # whether a piece ends a sentence of its speaker
    for speaker in {segment.speaker for segment in segments}:
        own = [index for index, (name, *_) in enumerate(cut) if name == speaker]
        for index, ends in zip(own, sentence_ends([stripped[i] for i in own]), strict=True):
            sentences[index] = ends
    pieces, starts = list[Piece](), dict[str | None, float]()
    for (speaker, begins, ends, (text, start, end)), stripped_text, sentence in zip(
        cut, stripped, sentences, strict=True
    ):
        start = starts[speaker] = max(starts.get(speaker, 0.0), start)
        cost = 0.0 if sentence else _split_cost(stripped_text, ends)
        space = text[0].isspace() or (begins and not _is_spaceless(stripped_text[0]))
        width = width_of(stripped_text)
        pieces.append(Piece(stripped_text, space, start, max(start, end), width, cost, speaker))
    return sorted(pieces, key=lambda piece: piece.start)


def width_of(text: str) -> int:
    """Return the width of a text; East Asian characters count 2, combining marks 0."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cut_segment(segment: Segment, max_width: int) -> list[tuple[str, float, float]]:
    """Return (text, start, end) of a segment's pieces; the text includes a leading space."""
    joined: list[tuple[str, float, float]] = []
    for text, start, end in _timed_texts(segment):
        if joined and not _may_split(joined[-1][0][-1], text[0]):
            previous, begin, _ = joined.pop()
            text, start = previous + text, begin
        joined.append((text, start, max(start, end)))
    return [part for unit in joined for part in _cut(*unit, max_width)]


def _timed_texts(segment: Segment) -> Iterator[tuple[str, float, float]]:
    """Yield (text, start, end) of words or single characters; texts include a leading space."""
    if segment.words:
        for word in segment.words:
            if word.word.strip():
                yield word.word, word.start, word.end
        return
    texts = [text for word in re.findall(r"\s*\S+", segment.text) for text in _characters(word)]
    widths = [width_of(text) for text in texts]
    total = max(sum(widths), 1)
    seconds_per_width = min(segment.end - segment.start, total / _MIN_CHARS_PER_S) / total
    width_so_far = 0
    for text, width in zip(texts, widths, strict=True):
        start = segment.start + width_so_far * seconds_per_width
        width_so_far += width
        yield text, start, segment.start + width_so_far * seconds_per_width


def _characters(word: str) -> Iterator[str]:
    """Yield a word whole in scripts with spaces, and in its characters in other scripts."""
    begin, text_begin = 0, len(word) - len(word.lstrip())
    for index in range(text_begin + 1, len(word)):
        if _may_split(word[index - 1], word[index]):
            yield word[begin:index]
            begin = index
    yield word[begin:]


def _may_split(last: str, first: str) -> bool:
    """Return whether a line may break between two characters."""
    if last.isspace() or first.isspace():
        return True
    if first in _NO_START or last in _NO_END or is_joined(last, first):
        return False
    return _is_spaceless(last) or _is_spaceless(first)


def _is_spaceless(char: str) -> bool:
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
    seconds_per_char, chars_so_far = (end - start) / sum(map(len, parts)), 0
    for part in parts:
        part_start = start + chars_so_far * seconds_per_char
        chars_so_far += len(part)
        yield part, part_start, start + chars_so_far * seconds_per_char


def _split_cost(text: str, ends_segment: bool) -> float:
    """Return the cost of a split after a text that does not end a sentence."""
    last = text.rstrip(CLOSING)[-1:]
    if last and last in _CLAUSE_ENDS:
        return CLAUSE
    if last == ".":
        return ABBREVIATION
    return SEGMENT if ends_segment else ANYWHERE


MIN_CUE_S, MAX_CUE_S = 5 / 6, 7.0  # minimum and maximum time of a cue
READING_SPEED = 20.0  # characters per second
_GAP_S = 2 / 24  # two video frames between a prolonged cue and the next one
_ZERO_LENGTH_CUE_S = 0.02  # time of a cue with words that have no duration
_MIN_DISPLAY_S = 0.7  # a cue with less time is merged or prolonged
_MAX_OVERLAP_S = 0.1  # speakers with a longer overlap speak at once
_MAX_SPEAKERS = 8  # maximum speakers per cue
_MAX_WORDS = 300  # maximum words per cue, because the time to split a text grows with it

# Costs of a cue. A pause of p seconds makes a split cheaper by _PAUSE * p, and costs
# _INNER_PAUSE * (p - _SHORT_PAUSE_S) within a cue.
_CUE = 1.0
_PAUSE, _INNER_PAUSE, _SHORT_PAUSE_S = 6.0, 2.0, 0.3
_TOO_SHORT, _TOO_FAST, _UNFILLED = 4.0, 2.0, 0.3
_FLASH_COST = 20.0  # a cue with less time than _MIN_DISPLAY_S
_CHANGE = 4.0  # a change of speaker within the cue
_LINE_SPLIT = 0.3  # a line break that is not at the end of a clause


@dataclasses.dataclass(frozen=True)
class CueOptions:
    """The layout options of srt and vtt, named as in OpenAI's `whisper` command."""

    highlight_words: bool = option(False, "underline each word while it is said")
    max_line_width: int = option(
        42, "characters a line, of which East Asian ones count twice; default: 42"
    )
    max_line_count: int = option(2, "lines a cue; default: 2")
    max_words_per_line: int | None = option(
        None, "words a cue; 1: word by word; default: as many as fit"
    )

    @property
    def needs_words(self) -> bool:
        """Whether the options need words with times."""
        return self.highlight_words or self.max_words_per_line is not None


DEFAULT = CueOptions()
CUE_OPTIONS = options_of(CueOptions)
"""The options of `CueOptions` by name."""
BOUNDS = {
    "max_line_width": (2, 1000),
    "max_line_count": (1, 100),
    "max_words_per_line": (1, _MAX_WORDS),
}
"""The minimum and maximum of each option."""


def check_bounds(name: str, value: object) -> None:
    """Check an option of `CueOptions` against `BOUNDS`.

    Raises:
        OptionError: the option is out of bounds; the message begins with the value.
    """
    minimum, maximum = BOUNDS.get(name, (False, True))
    if not isinstance(value, int) or not minimum <= value <= maximum:
        raise OptionError(f"{shown(value)}; expected {minimum} to {maximum}")


Lines = tuple[tuple[Piece, ...], ...]


@dataclasses.dataclass(frozen=True)
class Cue:
    """The lines shown at one time."""

    start: float  # s
    end: float  # s
    turns: tuple[tuple[str | None, Lines], ...]  # lines by speaker, in order of the first words

    @property
    def lines(self) -> Lines:
        """The lines of all speakers."""
        return tuple(line for _, lines in self.turns for line in lines)


def split(segments: Sequence[Segment], options: CueOptions, duration: float) -> list[Cue]:
    """Split a transcript into cues in order, without overlap.

    A cue is shown for at least 0.7 s, unless `max_words_per_line` requires shorter ones.

    Args:
        segments: in order of time, with words or without.
        options: sizes within `BOUNDS`.
        duration: seconds of audio; a cue is not prolonged beyond it.
    """
    groups = _split(pieces_of(segments, options.max_line_width), options, duration)
    next_starts = [*(group[0].start for group in groups[1:]), None]
    times = [
        [group[0].start, _end(group, next_start, duration)]
        for group, next_start in zip(groups, next_starts, strict=False)
    ]
    if options.max_words_per_line is None:
        _lengthen(times, duration)
    for earlier, later in itertools.pairwise(times):
        later[0] = max(earlier[1], later[0])
        later[1] = max(later[0] + _ZERO_LENGTH_CUE_S, later[1])
    return [
        Cue(start, end, tuple(_turns(group, options)))
        for (start, end), group in zip(times, groups, strict=True)
    ]


def _turns(group: Sequence[Piece], options: CueOptions) -> Iterator[tuple[str | None, Lines]]:
    """Yield the speakers of a cue and their lines."""
    for speaker in dict.fromkeys(piece.speaker for piece in group):
        yield speaker, _lines([piece for piece in group if piece.speaker == speaker], options)


# ---------------------------------------------------------------- cues


def _split(pieces: Sequence[Piece], options: CueOptions, duration: float) -> list[Sequence[Piece]]:
    """Group the pieces into cues with the minimum total cost (dynamic programming)."""
    count, costs = len(pieces), _split_costs(pieces)
    min_cost, previous_bound = [0.0, *[math.inf] * count], [0] * (count + 1)
    for begin in range(count):
        for end, cost in _ends(pieces, costs, begin, options, duration):
            if min_cost[begin] + cost < min_cost[end]:
                min_cost[end], previous_bound[end] = min_cost[begin] + cost, begin
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(previous_bound[bounds[-1]])
    return [pieces[begin:end] for end, begin in itertools.pairwise(bounds)][::-1]


def _split_costs(pieces: Sequence[Piece]) -> list[float]:
    """Return the cost of splitting the speaker's text after each piece."""
    costs, next_pieces = [0.0] * len(pieces), dict[str | None, Piece]()
    for index in range(len(pieces) - 1, -1, -1):
        piece = pieces[index]
        next_piece = next_pieces.get(piece.speaker)
        if next_piece is not None and not _answered(piece, pieces[index + 1], next_piece):
            costs[index] = max(0.0, piece.cost - _PAUSE * max(0.0, next_piece.start - piece.end))
        next_pieces[piece.speaker] = piece
    return costs


def _answered(piece: Piece, next_any: Piece, next_piece: Piece) -> bool:
    """Return whether another speaker speaks in the pause between two pieces of a speaker."""
    in_pause = piece.end - _MAX_OVERLAP_S <= next_any.start and next_any.end <= next_piece.start
    return next_any.speaker != piece.speaker and in_pause


def _ends(
    pieces: Sequence[Piece],
    costs: Sequence[float],
    begin: int,
    options: CueOptions,
    duration: float,
) -> Iterator[tuple[int, float]]:
    """Yield each possible end of a cue that starts at a piece, with the cost of cue and split."""
    start_s = end_s = pieces[begin].start  # end_s: of the last word
    width = lines = 0
    inner_cost = 0.0  # of pauses and speaker changes within the cue
    last_index: dict[str | None, int] = {}  # of each speaker's last piece
    line_width: dict[str | None, int] = {}  # of each speaker's last line
    ends_s: dict[str | None, float] = {}  # of each speaker's last word
    max_words = min(options.max_words_per_line or _MAX_WORDS, _MAX_WORDS)
    for index in range(begin, min(begin + max_words, len(pieces))):
        piece = pieces[index]
        speaker = piece.speaker
        if index > begin:
            inner_cost += max(0.0, piece.start - end_s - _SHORT_PAUSE_S) * _INNER_PAUSE
            if speaker != pieces[index - 1].speaker:
                until_s = max(end for name, end in ends_s.items() if name != speaker)
                inner_cost += _CHANGE * (until_s - piece.start <= _MAX_OVERLAP_S)
        before = line_width.get(speaker, 0)
        line_width[speaker] = before + piece.width + (piece.space and before > 0)
        if not before or line_width[speaker] > options.max_line_width:
            lines += 1
            line_width[speaker] = piece.width
        width += piece.width + (piece.space and width > 0)
        end_s = max(end_s, piece.end)
        ends_s[speaker] = max(piece.end, ends_s.get(speaker, 0.0))
        last_index[speaker] = index
        max_lines = max(options.max_line_count, len(line_width))
        too_large = lines > max_lines or len(line_width) > _MAX_SPEAKERS
        if index > begin and (too_large or piece.end - start_s > MAX_CUE_S):
            return
        filled = width / (options.max_line_width * max_lines)
        cost = _CUE + inner_cost + _UNFILLED * (1 - filled) ** 2
        if index + 1 < len(pieces):
            following_s = pieces[index + 1].start
            cost += _reading_cost(width, following_s - start_s)
            cost += sum(costs[last] for last in last_index.values())
            cost += _PAUSE * max(0.0, end_s - following_s - _MAX_OVERLAP_S)
        elif begin and start_s < duration < pieces[begin - 1].end + _MIN_DISPLAY_S:
            cost += _FLASH_COST  # no room before it either
        yield index + 1, cost


def _reading_cost(width: int, shown_s: float) -> float:
    """Return the cost of showing a cue too briefly; 0 if it can be read before the next cue."""
    cost = _TOO_SHORT * (1 - shown_s / MIN_CUE_S) if shown_s < MIN_CUE_S else 0.0
    if shown_s < _MIN_DISPLAY_S:
        cost += _FLASH_COST
    needed_s = width / READING_SPEED
    if shown_s < needed_s:
        cost += _TOO_FAST * (min(needed_s / max(shown_s, _ZERO_LENGTH_CUE_S), 5.0) - 1)
    return cost


def _end(group: Sequence[Piece], following: float | None, duration: float) -> float:
    """Return a cue's end: that of its last word, or later for more reading time.

    The end is never after the start of the next cue, `following`.
    """
    start, end = group[0].start, max(piece.end for piece in group)
    width = sum(piece.width + piece.space for piece in group) - group[0].space
    readable_end = start + max(MIN_CUE_S, width / READING_SPEED)
    latest_end = duration if following is None else following - _GAP_S
    end = min(max(end, min(readable_end, latest_end)), start + MAX_CUE_S)
    if following is not None:
        end = min(end, following)
    return max(end, start + _ZERO_LENGTH_CUE_S)


def _lengthen(times: list[list[float]], duration: float) -> None:
    """Prolong cues to _MIN_DISPLAY_S where the adjacent cues keep that time.

    Args:
        times: start and end in seconds of each cue, in order; changed in place.
        duration: seconds of audio.
    """
    for index, (start, end) in enumerate(times):
        if end - start >= _MIN_DISPLAY_S:
            continue
        before = times[index - 1] if index else [-_MIN_DISPLAY_S, 0.0]
        after = times[index + 1] if index + 1 < len(times) else [duration, math.inf]
        end = min(start + _MIN_DISPLAY_S, max(end, after[0]))
        start = min(start, max(end - _MIN_DISPLAY_S, min(before[1], before[0] + _MIN_DISPLAY_S)))
        end = min(start + _MIN_DISPLAY_S, max(end, after[1] - _MIN_DISPLAY_S))
        times[index][:] = start, end
        before[1], after[0] = min(before[1], start), max(after[0], end)


# ---------------------------------------------------------------- lines


def _lines(part: Sequence[Piece], options: CueOptions) -> Lines:
    """Break a cue into the fewest lines of similar length, preferably after clauses."""
    count, limit = len(part), options.max_line_width
    best: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # lines, cost and start of the last line
    for end in range(1, count + 1):
        choices = []
        used = 0
        for begin in range(end - 1, -1, -1):
            used += part[begin].width + (begin + 1 < end and part[begin + 1].space)
            if used > limit and begin + 1 < end:
                break
            lines, cost, _ = best[begin]
            if begin and part[begin - 1].cost >= SEGMENT:
                cost += _LINE_SPLIT
            choices.append((lines + 1, cost + (1 - used / limit) ** 2, begin))
        best.append(min(choices))
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(best[bounds[-1]][2])
    return tuple(tuple(part[begin:end]) for end, begin in itertools.pairwise(bounds))[::-1]
