"""Subtitles' cues: where a transcript's text is split, when each piece is shown, and its lines.

All segments are one text. It is split where splits cost least in sum: at the ends of sentences, of
clauses, where somebody pauses, and not so that a cue is gone before it can be read. Sizes, times
and reading speed are those that broadcasters and streaming services ask for: two lines of 42
characters, 5/6 s to 7 s, 20 characters a second. A character of an East Asian script counts twice,
so that a line has 21 of them.

Words' times are used where segments have words. Elsewhere a segment's time is shared out by the
width of its text.
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

LEAST_S, MOST_S = 5 / 6, 7.0  # that a cue is shown
READING_SPEED = 20.0  # characters per second
_SLOWEST = (
    3.0  # characters per second that somebody says, where nothing but a segment's time is known
)
_GAP_S = 2 / 24  # of two frames, between a cue that stays longer than its words and the next one
_SHORTEST_S = 0.02  # of a cue whose words take no time
_MOST_WORDS = 300  # of a cue, whatever is asked for: the time to split a text grows with it

# What a cue costs, and what a split does by what stands before it; pauses of p seconds make a split
# cheaper by _PAUSE * p, and cost _INNER_PAUSE * (p - _SHORT_PAUSE_S) inside of a cue.
_CUE, _CLAUSE, _SEGMENT, _ANYWHERE = 1.0, 1.5, 3.0, 5.0
_PAUSE, _INNER_PAUSE, _SHORT_PAUSE_S = 6.0, 2.0, 0.3
_TOO_SHORT, _TOO_FAST, _UNFILLED = 4.0, 2.0, 0.3
_LINE_SPLIT = 0.3  # of two lines, where no clause ends

_SENTENCE_ENDS = ".?!…。？！｡"
_CLAUSE_ENDS = ",;:—–،؛，、；：､"
_CLOSING = "\"'”’»)]}」』）】》〉］｝"  # may stand behind these ends
# No line begins with the first, or ends with the second: Japanese and Chinese rules of typesetting.
_NO_START = frozenset(
    _SENTENCE_ENDS + _CLAUSE_ENDS + _CLOSING + "%‰°ー々〻ゝゞヽヾ・ะาำๅๆฯ"
    "ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶ"
)
_NO_END = frozenset("([{«“‘¿¡「『（【《〈［｛$€£¥￥#เแโใไ")
_SPACELESS = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai, Lao, Burmese, Khmer
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]")  # wide, and written with spaces

_ABBREVIATION = re.compile(r"[bcdfghjklmnpqrstvwxz]{1,3}\.", re.IGNORECASE)  # Mr., St., a name's J.


@dataclasses.dataclass(frozen=True)
class CueOptions:
    """Options of how srt and vtt show a text, by the names that OpenAI's command gives them."""

    highlight_words: bool = option(False, "underline each word while it is said")
    max_line_width: int = option(
        42, "characters a line, of which East Asian ones count twice; default: 42", metavar="N"
    )
    max_line_count: int = option(2, "lines a cue; default: 2", metavar="N")
    max_words_per_line: int | None = option(
        None,
        "words a cue; 1: word by word; default: as many as fit",
        help="words a cue; 1: word by word",
        metavar="N",
    )

    @property
    def needs_words(self) -> bool:
        """Tell whether words must have times."""
        return self.highlight_words or self.max_words_per_line is not None


DEFAULT = CueOptions()
CUE_OPTIONS = options_of(CueOptions)
"""By their names."""
BOUNDS = {
    "max_line_width": (2, 1000),
    "max_line_count": (1, 100),
    "max_words_per_line": (1, _MOST_WORDS),
}
"""The least and the most that an option may be."""


def check_bounds(name: str, value: object) -> None:
    """Refuse an option of `CueOptions` that is out of bounds.

    Raises:
        OptionError: it is; the text begins with the value.
    """
    least, most = BOUNDS.get(name, (False, True))
    if not isinstance(value, int) or not least <= value <= most:
        raise OptionError(f"{shown(value)}; expected {least} to {most}")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A word, or characters between which no line may be broken."""

    text: str  # without spaces around it
    space: bool  # stands before it
    start: float  # s
    end: float  # s
    width: int
    cost: float  # of a split behind it


@dataclasses.dataclass(frozen=True)
class Cue:
    """The lines that are shown at a time."""

    start: float  # s
    end: float  # s
    lines: tuple[tuple[Piece, ...], ...]
    speaker: str | None = None


def split(segments: Sequence[Segment], options: CueOptions, duration: float) -> list[Cue]:
    """Split a transcript into cues, in order; none is shown beside the next or has two speakers.

    Args:
        segments: with words or without.
        options: sizes within `BOUNDS`.
        duration: of the audio in seconds, behind which no cue stays for being read.
    """
    width = options.max_line_width
    parts = [
        (part, speaker)
        for speaker, run in itertools.groupby(segments, key=lambda segment: segment.speaker)
        for part in _split([piece for segment in run for piece in _pieces(segment, width)], options)
    ]
    starts = [part[0].start for part, _ in parts[1:]]
    return [
        Cue(part[0].start, _end(part, following, duration), _lines(part, options), speaker)
        for (part, speaker), following in itertools.zip_longest(parts, starts)
    ]


def width_of(text: str) -> int:
    """Measure the room that a text takes: East Asian characters count 2, marks on others 0."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


# ---------------------------------------------------------------- what is never split


def _pieces(segment: Segment, max_width: int) -> Iterator[Piece]:
    """Cut a segment's text into pieces that fit into a line."""
    joined: list[tuple[str, float, float]] = []
    for text, start, end in _timed(segment):
        if joined and not _may_split(joined[-1][0][-1], text[0]):
            before, begin, _ = joined.pop()
            text, start = before + text, begin
        joined.append((text, start, max(start, end)))
    cut = [part for unit in joined for part in _cut(*unit, max_width)]
    for number, (text, start, end) in enumerate(cut, start=1):
        bare = " ".join(text.split())
        cost = _split_cost(bare, number == len(cut))
        space = text[0].isspace() or (number == 1 and not _stands_alone(bare[0]))
        yield Piece(bare, space, start, end, width_of(bare), cost)


def _timed(segment: Segment) -> Iterator[tuple[str, float, float]]:
    """Yield (text, start, end) of words, or of what could be one; a space begins the text."""
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
    """Yield a word whole where spaces divide words, else its characters."""
    begin, bare = 0, len(word) - len(word.lstrip())
    for at in range(bare + 1, len(word)):
        if _may_split(word[at - 1], word[at]):
            yield word[begin:at]
            begin = at
    yield word[begin:]


def _may_split(last: str, first: str) -> bool:
    """Tell whether a line may be broken between two characters."""
    if last.isspace() or first.isspace():
        return True
    if first in _NO_START or last in _NO_END or unicodedata.category(first).startswith("M"):
        return False
    return _stands_alone(last) or _stands_alone(first)


def _stands_alone(char: str) -> bool:
    """Tell whether a character's script is written without spaces."""
    if char.isascii() or _HANGUL.match(char):
        return False
    return _width(char) == 2 or bool(_SPACELESS.match(char))


def _cut(text: str, start: float, end: float, max_width: int) -> Iterator[tuple[str, float, float]]:
    """Cut a text into parts that fit into a line, however long its words are."""
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
    """Return the cost of a split behind a text, as long as nobody pauses there."""
    last = text.rstrip(_CLOSING)[-1:]
    if last and last in _SENTENCE_ENDS and not _ABBREVIATION.fullmatch(text):
        return 0.0
    if last and last in _CLAUSE_ENDS:
        return _CLAUSE
    return _SEGMENT if ends_segment else _ANYWHERE


# ---------------------------------------------------------------- cues


def _split(pieces: Sequence[Piece], options: CueOptions) -> list[Sequence[Piece]]:
    """Group the pieces into cues, so that the costs of all cues and splits have the least sum."""
    count = len(pieces)
    best, come_from = [0.0, *[math.inf] * count], [0] * (count + 1)
    for begin in range(count):
        for end, cost in _ends(pieces, begin, options):
            if best[begin] + cost < best[end]:
                best[end], come_from[end] = best[begin] + cost, begin
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(come_from[bounds[-1]])
    return [pieces[begin:end] for end, begin in itertools.pairwise(bounds)][::-1]


def _ends(pieces: Sequence[Piece], begin: int, options: CueOptions) -> Iterator[tuple[int, float]]:
    """Yield each end of a cue that may begin with a piece, and its cost with the split there."""
    width, lines = options.max_line_width, 1
    room = width * options.max_line_count
    most = min(options.max_words_per_line or _MOST_WORDS, _MOST_WORDS)
    start, used, inner, whole = pieces[begin].start, 0, 0.0, 0
    for at in range(begin, min(begin + most, len(pieces))):
        piece = pieces[at]
        used += piece.width + (piece.space and used > 0)
        whole += piece.width + (piece.space and whole > 0)
        if used > width:
            lines, used = lines + 1, piece.width
        if at > begin and (lines > options.max_line_count or piece.end - start > MOST_S):
            return
        following = pieces[at + 1].start if at + 1 < len(pieces) else math.inf
        pause = max(0.0, following - piece.end)
        cost = _CUE + inner + _UNFILLED * (1 - whole / room) ** 2
        cost += _reading_cost(whole, following - start)
        if at + 1 < len(pieces):
            cost += max(0.0, piece.cost - _PAUSE * pause)
        yield at + 1, cost
        inner += max(0.0, pause - _SHORT_PAUSE_S) * _INNER_PAUSE


def _reading_cost(width: int, shown_s: float) -> float:
    """Return the cost of a cue that cannot be read in the time until the next."""
    cost = _TOO_SHORT * (1 - shown_s / LEAST_S) if shown_s < LEAST_S else 0.0
    needed_s = width / READING_SPEED
    if shown_s < needed_s:
        cost += _TOO_FAST * (min(needed_s / max(shown_s, _SHORTEST_S), 5.0) - 1)
    return cost


def _end(part: Sequence[Piece], following: float | None, duration: float) -> float:
    """Return when a cue goes: with its last word, or once it can be read, but before the next."""
    start, end = part[0].start, part[-1].end
    width = sum(piece.width + piece.space for piece in part) - part[0].space
    wanted = start + max(LEAST_S, width / READING_SPEED)
    room = duration if following is None else following - _GAP_S
    end = min(max(end, min(wanted, room)), start + MOST_S)
    if following is not None:
        end = min(end, following)
    return max(end, start + _SHORTEST_S)


# ---------------------------------------------------------------- lines


def _lines(part: Sequence[Piece], options: CueOptions) -> tuple[tuple[Piece, ...], ...]:
    """Break a cue into lines: as few as can be, of one length, and broken where a clause ends."""
    count, limit = len(part), options.max_line_width
    best: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # lines, cost and begin of the last line
    for end in range(1, count + 1):
        choices = []
        used = 0
        for begin in range(end - 1, -1, -1):
            used += part[begin].width + (begin + 1 < end and part[begin + 1].space)
            if used > limit and begin + 1 < end:
                break
            lines, cost, _ = best[begin]
            if begin and part[begin - 1].cost >= _SEGMENT:
                cost += _LINE_SPLIT
            choices.append((lines + 1, cost + (1 - used / limit) ** 2, begin))
        best.append(min(choices))
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(best[bounds[-1]][2])
    return tuple(tuple(part[begin:end]) for end, begin in itertools.pairwise(bounds))[::-1]
