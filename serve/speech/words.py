"""Compute word timestamps from the cross-attention of a window's text tokens.

The algorithm and its heuristics are those of OpenAI's `whisper/timing.py`, as in faster-whisper.
Dynamic time warping aligns tokens to frames. Tokens are joined to words, and punctuation to the
adjacent words. Words that extend into a pause are shortened to twice the length of a median word.
Nothing here calls a model.

In that algorithm, a word starts at every space and every punctuation mark. In an answer, a word
starts only at a space: `assign_words` joins the parts of a word (`l` and `'étoile`, `25` and
`,700`).
"""

import dataclasses
import itertools
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Alignment, Segment, TokenLogprob, Word
from serve.speech.text import is_joined

SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages written without spaces

Decode = Callable[[Sequence[int]], str]

_PREPENDED = "\"'“¿([{-"  # punctuation that belongs to the word after it
_APPENDED = "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the word before it
PUNCTUATION = _PREPENDED + _APPENDED
_SILENT = frozenset(PUNCTUATION + ";…")  # unspoken marks, as are dashes and brackets
_SILENT_CATEGORIES = frozenset({"Pd", "Ps", "Pe", "Pi", "Pf"})
_NO_BREAK = frozenset("\u00a0\u2007\u202f")  # spaces within a word


@dataclasses.dataclass
class WordTiming:
    """A word of a window, or a part of one; times count from the window's start."""

    text: str  # with a leading space; "" after it was joined to a neighbour
    tokens: int  # number of text tokens
    start_s: float
    end_s: float
    probabilities: npt.NDArray[np.float32]  # (n,), of the word's tokens without joined punctuation

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return self.end_s - self.start_s

    @property
    def probability(self) -> float:
        """The tokens' mean probability."""
        return float(self.probabilities.mean())


def split_words(tokens: Sequence[int], decode: Decode, language: str) -> list[tuple[str, int]]:
    """Group text tokens into words and parts of words.

    A part starts at a space or, in languages without spaces, at every character. A punctuation
    mark that is a separate token is a separate part.

    Args:
        tokens: text tokens.
        decode: returns the text of tokens; invalid UTF-8 becomes U+FFFD.
        language: the language's code.

    Returns:
        The text and the number of tokens of each part.
    """
    pieces = list(characters(tokens, decode))
    if language in SPACELESS:
        return pieces
    parts = list[tuple[str, int]]()
    for text, count in pieces:
        if parts and not (text.startswith(" ") or text.strip() in string.punctuation):
            previous, previous_count = parts.pop()
            text, count = previous + text, previous_count + count
        parts.append((text, count))
    return parts


def characters(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[str, int]]:
    """Yield the text and number of tokens of the shortest runs that decode to whole characters."""
    full_text, n_chars, begin = decode(tokens), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        invalid_index = text.find("\ufffd")
        position = n_chars + invalid_index
        if invalid_index < 0 or full_text[position : position + 1] == "\ufffd":
            yield text, end - begin
            begin, n_chars = end, n_chars + len(text)


def join_punctuation(timings: list[WordTiming]) -> None:
    """Join punctuation to the adjacent words; the words' times do not change."""
    next_word = len(timings) - 1
    for i in range(len(timings) - 2, -1, -1):
        mark, word = timings[i], timings[next_word]
        if mark.text.startswith(" ") and mark.text.strip() in _PREPENDED:
            _join(word, mark.text + word.text, mark)
        else:
            next_word = i
    previous = 0
    for i in range(1, len(timings)):
        word, mark = timings[previous], timings[i]
        if not word.text.endswith(" ") and mark.text in _APPENDED:
            _join(word, word.text + mark.text, mark)
        else:
            previous = i


def _join(word: WordTiming, text: str, mark: WordTiming) -> None:
    word.text, mark.text = text, ""
    word.tokens, mark.tokens = word.tokens + mark.tokens, 0


def whole_words(parts: Sequence[WordTiming], spaceless: bool) -> list[WordTiming]:
    """Join the parts of each word.

    Args:
        parts: the parts of one segment, in order.
        spaceless: whether the language is written without spaces. Then parts are words, except
            that vowel signs and marks join the letter before them.

    Returns:
        The words. A word lasts from its first part to its last one and has the probabilities of
        all its parts. Unspoken marks change neither.
    """
    words: list[WordTiming] = []
    for part in parts:
        if words and _continues(words[-1].text, part.text, spaceless):
            words[-1] = _combined(words[-1], part)
        else:
            words.append(part)
    return words


def _continues(previous: str, text: str, spaceless: bool) -> bool:
    """Return whether a part belongs to the word before it."""
    if not previous.strip() or not text.strip():
        return True
    if text[0].isspace() and text[0] not in _NO_BREAK:
        return False
    return not spaceless or is_joined(previous[-1], text[0])


def _combined(word: WordTiming, part: WordTiming) -> WordTiming:
    """Join a word with its next part; unspoken marks do not change its times."""
    text, tokens = word.text + part.text, word.tokens + part.tokens
    if _is_silent(part.text):
        return dataclasses.replace(word, text=text, tokens=tokens)
    if _is_silent(word.text):
        return dataclasses.replace(part, text=text, tokens=tokens)
    probabilities = np.concatenate([word.probabilities, part.probabilities])
    return WordTiming(text, tokens, word.start_s, part.end_s, probabilities)


def _is_silent(text: str) -> bool:
    return all(
        char in _SILENT or char.isspace() or unicodedata.category(char) in _SILENT_CATEGORIES
        for char in text
    )


FRAMES_PER_S = 50  # alignment frames

_SENTENCE_ENDS = ".。!！?？"
_MAX_MEDIAN_S = 0.7  # maximum median duration of a word
_MIN_PAUSE_MEDIANS = 4  # minimum pause between words, in median durations
_MIN_PROB = 1e-30  # lower bound of probabilities before their logarithm
_MAX_DISAGREEMENT_S = 0.5  # a segment's time overrides its word's if they differ by more
_MAX_ONSET_S = 0.1  # a word may start this long before its speech interval
_MIN_OVERLAP_S = 0.02  # minimum overlap that assigns a word to a speech interval


@dataclasses.dataclass(frozen=True)
class Characters:
    """The shortest run of a window's tokens that decodes to whole characters."""

    text: str
    tokens: int
    logprob: float


T = TypeVar("T", WordTiming, Characters)


@dataclasses.dataclass(frozen=True)
class WindowWords:
    """The words of one window, in order, and the median duration of a word."""

    timings: tuple[WordTiming, ...]
    median_word_s: float
    spaceless: bool = False  # the language is written without spaces
    characters: tuple[Characters, ...] | None = None  # scored tokens; None: not wanted

    @property
    def longest_s(self) -> float:
        """The maximum seconds of a word next to a pause."""
        return 2 * self.median_word_s


def monotonic_path(matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Find the first frame of each row on the monotonic path with the largest sum of weights.

    This is dynamic time warping of -matrix. A row's costs D follow from the costs of the row above
    without a loop over frames: D[j] = C[j] + min over k <= j of (a[k] - C[k - 1]). Here a is the
    cheaper of the two cells above, and C is the sum of the row up to j. If the two cells above are
    equal, the path comes from the left, as in OpenAI's implementation.

    Args:
        matrix: (rows, frames), at least one of each.

    Returns:
        int64 (rows,), non-decreasing; the first is 0.
    """
    rows, frames = matrix.shape
    prefix_sums = np.cumsum(matrix, axis=1, dtype=np.float64)
    np.negative(prefix_sums, out=prefix_sums)
    cost = np.full((rows + 1, frames + 1), np.inf)
    cost[0, 0] = 0.0
    entry_cost, is_equal = np.empty(frames), np.empty(frames, np.bool_)
    for i in range(rows):  # in-place operations halve the time
        diagonal, above = cost[i, :-1], cost[i, 1:]
        np.minimum(diagonal, above, out=entry_cost)
        np.equal(diagonal, above, out=is_equal)
        np.copyto(entry_cost, np.inf, where=is_equal)
        np.subtract(entry_cost[1:], prefix_sums[i, :-1], out=entry_cost[1:])
        np.minimum.accumulate(entry_cost, out=entry_cost)
        np.add(prefix_sums[i], entry_cost, out=cost[i + 1, 1:])
    diagonal, above, previous = cost[:-1, :-1], cost[:-1, 1:], cost[1:, :-1]
    enters = ((np.minimum(diagonal, above) < previous) & (diagonal != above)).tobytes()
    # Entries into a row that come from the frame before:
    diagonal_entries = (diagonal < above).tobytes()
    begins = [0] * rows
    frame = frames - 1
    for i in range(rows - 1, 0, -1):
        index = enters.rfind(b"\1", i * frames, i * frames + frame + 1)
        begins[i] = index - i * frames
        frame = begins[i] - diagonal_entries[index]
    return np.array(begins)


def truncate_alignment(alignment: Alignment, count: int, frames: int) -> Alignment:
    """Truncate an alignment to a window's first `count` text tokens and `frames` frames.

    The row of the next token is kept as well, as the end of the text.
    """
    rows, matrix, begins = count + 1, alignment.matrix, alignment.begins
    return Alignment(
        token_probs=alignment.token_probs[:count],
        matrix=None if matrix is None else matrix[: alignment.prefix + rows, :frames],
        begins=None if begins is None else np.minimum(begins[:rows], frames),
        prefix=alignment.prefix,
    )


def time_words(
    alignment: Alignment,
    pieces: Sequence[Sequence[int]],
    decode: Decode,
    language: str,
    logprobs: bool = False,
    voice: Sequence[tuple[float, float]] = (),
) -> WindowWords:
    """Return the words of a window and their times.

    Attention does not mark pauses: the word after a pause often starts within it. With VAD, such a
    word starts with the speech.

    Args:
        alignment: the runtime's alignment of n text tokens.
        pieces: the n tokens by segment; a word never spans two segments.
        decode: returns the text of tokens.
        language: the language's code.
        logprobs: whether to return scored tokens, too.
        voice: start and end in seconds of each speech interval, in order.
    """
    split = [split_words(tokens, decode, language) for tokens in pieces]
    parts = list(itertools.chain(*split))
    bounds = np.cumsum([0, *(count for _, count in parts)])
    begins = alignment.begins
    if begins is None:
        assert alignment.matrix is not None
        begins = monotonic_path(alignment.matrix)[alignment.prefix :]
    times = begins[bounds] / FRAMES_PER_S
    timings = [
        WordTiming(
            text=text,
            tokens=count,
            start_s=float(times[i]),
            end_s=float(times[i + 1]),
            probabilities=alignment.token_probs[bounds[i] : bounds[i + 1]],
        )
        for i, (text, count) in enumerate(parts)
    ]
    durations = [timing.duration_s for timing in timings if timing.duration_s > 0]
    median_word_s = min(_MAX_MEDIAN_S, float(np.median(durations))) if durations else 0.0
    characters = tuple(_scored_characters(alignment, pieces, decode)) if logprobs else None
    words = WindowWords(tuple(timings), median_word_s, language in SPACELESS, characters)
    if durations:
        _shorten_at_sentences(words)
        _begin_with_voice(timings, voice)
    ends = list(itertools.accumulate(map(len, split)))
    for begin, end in zip([0, *ends], ends, strict=False):
        join_punctuation(timings[begin:end])
    return words


def _scored_characters(
    alignment: Alignment, pieces: Sequence[Sequence[int]], decode: Decode
) -> Iterator[Characters]:
    begin = 0
    for text, count in (run for tokens in pieces for run in characters(tokens, decode)):
        probs = alignment.token_probs[begin : begin + count].astype(np.float64)
        yield Characters(text, count, float(np.log(np.maximum(probs, _MIN_PROB)).sum()))
        begin += count


def _shorten_at_sentences(words: WindowWords) -> None:
    """Shorten a punctuation mark, or the word after it, if it fills the pause between sentences."""
    for previous, timing in zip(words.timings, words.timings[1:], strict=False):
        if timing.duration_s <= words.longest_s:
            continue
        if timing.text in _SENTENCE_ENDS:
            timing.end_s = timing.start_s + words.longest_s
        elif previous.text in _SENTENCE_ENDS:
            timing.start_s = timing.end_s - words.longest_s


def _begin_with_voice(timings: list[WordTiming], voice: Sequence[tuple[float, float]]) -> None:
    """Move the start of each word to the start of the speech interval that contains most of it."""
    for timing in timings:
        overlaps = [
            (min(timing.end_s, end) - max(timing.start_s, start), start) for start, end in voice
        ]
        max_overlap_s, start_s = max(overlaps, default=(0.0, 0.0))
        if max_overlap_s >= _MIN_OVERLAP_S:
            timing.start_s = max(timing.start_s, start_s - _MAX_ONSET_S)


def assign_words(
    segments: Sequence[Segment], words: WindowWords, window_start_s: float, spoken_until_s: float
) -> list[Segment]:
    """Add words to a window's segments, and set the segments' times by their words.

    A segment starts and ends with its words. But a first or last word that exceeds the segment's
    own start or end by more than half a second is shortened to fit the segment.

    Args:
        segments: all segments of the window, in order, with times in the recording.
        words: the words of the same text.
        window_start_s: the window's start in the recording.
        spoken_until_s: the end of the last word before this window.
    """
    timings, characters = iter(words.timings), iter(words.characters or ())
    timed_segments: list[Segment] = []
    for segment in segments:
        segment_words = [
            dataclasses.replace(
                timing,
                start_s=round(window_start_s + timing.start_s, 2),
                end_s=round(window_start_s + timing.end_s, 2),
            )
            for timing in _take_tokens(timings, len(segment.tokens))
            if timing.text
        ]
        start, end = segment.start, segment.end
        if segment_words:
            _shorten_after_pause(segment_words, words, spoken_until_s)
            start, end = _reconcile_times(segment, segment_words, words.median_word_s)
            spoken_until_s = end
            segment_words = whole_words(segment_words, words.spaceless)
        logprobs = tuple(  # adding 0.0 turns -0.0 into 0.0
            TokenLogprob(part.text, round(part.logprob, 4) + 0.0)
            for part in _take_tokens(characters, len(segment.tokens))
        )
        timed = dataclasses.replace(
            segment,
            start=round(start, 3),
            end=round(end, 3),
            words=tuple(
                Word(round(w.start_s, 3), round(w.end_s, 3), w.text, round(w.probability, 4))
                for w in segment_words
            ),
            token_logprobs=None if words.characters is None else logprobs,
        )
        timed_segments.append(timed)
    return timed_segments


def _take_tokens(items: Iterator[T], tokens: int) -> Iterator[T]:
    """Take the next items with `tokens` tokens in total."""
    while tokens > 0 and (item := next(items, None)) is not None:
        tokens -= item.tokens
        yield item


def _shorten_after_pause(
    timings: list[WordTiming], words: WindowWords, spoken_until_s: float
) -> None:
    """Shorten the first two words after a pause, which often extend into it."""
    first, longest_s = timings[0], words.longest_s
    second = timings[1] if len(timings) > 1 else None
    if first.end_s - spoken_until_s <= words.median_word_s * _MIN_PAUSE_MEDIANS:
        return
    both_too_long = second is not None and second.end_s - first.start_s > longest_s * 2
    if first.duration_s <= longest_s and not both_too_long:
        return
    if second is not None and second.duration_s > longest_s:
        first.end_s = second.start_s = max(second.end_s / 2, second.end_s - longest_s)
    first.start_s = max(0.0, first.end_s - longest_s)


def _reconcile_times(
    segment: Segment, timings: list[WordTiming], median_word_s: float
) -> tuple[float, float]:
    """Make a segment's times agree with its words' times; return the segment's start and end.

    The words' times win. If one end of the segment lies far inside its first or last word, that end
    wins, and the word is shortened.
    """
    first, last = timings[0], timings[-1]
    start, end = first.start_s, last.end_s
    if first.start_s + _MAX_DISAGREEMENT_S < segment.start < first.end_s:
        first.start_s = max(0.0, min(first.end_s - median_word_s, segment.start))
        start = segment.start
    if last.start_s < segment.end < last.end_s - _MAX_DISAGREEMENT_S:
        last.end_s = max(last.start_s + median_word_s, segment.end)
        end = segment.end
    return start, end
