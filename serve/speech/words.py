"""Times of words: from what a window's text tokens attended to, to words with times.

The algorithm and its heuristics are those of OpenAI's `whisper/timing.py`, which faster-whisper
follows too: dynamic time warping finds the frames at which one token's attention hands over to the
next one's, tokens are joined to words, punctuation to the words beside it, and words that grew into
a pause are cut to twice the length of an average word. Nothing here calls a model.

That algorithm begins a word at every punctuation mark. An answer's word begins at a space of the
text: `give_words` joins the parts of a word (`l` and `'étoile`, `25` and `,700`) in the end.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from serve.contract.messages import Alignment, Segment, TokenLogprob, Word
from serve.speech.word_parts import (
    SPACELESS,
    Decode,
    Timing,
    characters,
    join_punctuation,
    split_words,
    whole_words,
)

FRAMES_PER_S = 50  # of an alignment

_SENTENCE_ENDS = ".。!！?？"
_LONGEST_MEDIAN_S = 0.7  # an average word takes no longer, whatever was measured
_PAUSE = 4  # median words between two words that stand apart
_LEAST_PROB = 1e-30  # has a logarithm
_DISAGREEMENT_S = 0.5  # by so much a segment's times must differ from its words' to be believed
_ONSET_S = 0.1  # a word may begin so much before a voice is heard
_LEAST_VOICE_S = 0.02  # of a word that say where it is


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character or more of a window, of the fewest tokens that make them whole."""

    text: str
    tokens: int
    logprob: float


@dataclasses.dataclass(frozen=True)
class WindowWords:
    """The words of one window, in order, and how long an average one takes."""

    timings: tuple[Timing, ...]
    median_s: float
    spaceless: bool = False  # their language is written without spaces
    characters: tuple[Characters, ...] | None = None  # its tokens; None: not asked for

    @property
    def longest_s(self) -> float:
        """The most seconds that a word beside a pause takes."""
        return 2 * self.median_s


def handovers(matrix: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Find the frame at which each row begins on the monotonic path of the largest weights.

    Dynamic time warping of -matrix. A row's costs follow from those of the row above without a loop
    over frames: D[j] = C[j] + min over k <= j of (a[k] - C[k - 1]), where a is the cheaper of the
    two cells above and C sums the row up to j. Where the two cells above are equal the path comes
    from the left, as it does in OpenAI's.

    Args:
        matrix: (rows, frames), at least one of each.

    Returns:
        int64 (rows,), never running backwards, the first 0.
    """
    rows, frames = matrix.shape
    run = np.cumsum(matrix, axis=1, dtype=np.float64)
    np.negative(run, out=run)
    cost = np.full((rows + 1, frames + 1), np.inf)
    cost[0, 0] = 0.0
    entry, equal = np.empty(frames), np.empty(frames, np.bool_)
    for i in range(rows):  # in place: that halves its time
        diagonal, above = cost[i, :-1], cost[i, 1:]
        np.minimum(diagonal, above, out=entry)
        np.equal(diagonal, above, out=equal)
        np.copyto(entry, np.inf, where=equal)
        np.subtract(entry[1:], run[i, :-1], out=entry[1:])
        np.minimum.accumulate(entry, out=entry)
        np.add(run[i], entry, out=cost[i + 1, 1:])
    diagonal, above, left = cost[:-1, :-1], cost[:-1, 1:], cost[1:, :-1]
    enters = ((np.minimum(diagonal, above) < left) & (diagonal != above)).tobytes()
    jumps = (diagonal < above).tobytes()  # of those that enter a row, who come from its left
    begins = [0] * rows
    frame = frames - 1
    for i in range(rows - 1, 0, -1):
        at = enters.rfind(b"\1", i * frames, i * frames + frame + 1)
        begins[i] = at - i * frames
        frame = begins[i] - jumps[at]
    return np.array(begins)


def of_first(alignment: Alignment, count: int, frames: int) -> Alignment:
    """Return the alignment of a window's first text tokens in its first frames.

    What comes after those tokens is one more row.
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

    Attention is blind to pauses: the word after one often begins in it. Where it is known when
    somebody speaks, such a word begins with the voice.

    Args:
        alignment: of n text tokens, as the runtime measured it.
        pieces: those n tokens, by the segment that they are in; no word is in two segments.
        decode: text of tokens.
        language: code.
        logprobs: whether its tokens are to be told too.
        voice: start and end in seconds of each stretch in which somebody speaks, in order.
    """
    split = [split_words(tokens, decode, language) for tokens in pieces]
    texts = [text for words, _ in split for text in words]
    counts = [count for _, tokens in split for count in tokens]
    bounds = np.cumsum([0, *counts])
    times = _begins(alignment)[bounds] / FRAMES_PER_S if texts else []
    timings = [
        Timing(
            text=text,
            tokens=count,
            start_s=float(times[i]),
            end_s=float(times[i + 1]),
            probabilities=alignment.token_probs[bounds[i] : bounds[i + 1]],
        )
        for i, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]
    durations = [timing.duration_s for timing in timings if timing.duration_s > 0]
    median_s = min(_LONGEST_MEDIAN_S, float(np.median(durations))) if durations else 0.0
    characters = tuple(_scored_characters(alignment, pieces, decode)) if logprobs else None
    words = WindowWords(tuple(timings), median_s, language in SPACELESS, characters)
    if durations:
        _shorten_at_sentences(words)
        _begin_with_voice(timings, voice)
    ends = list(itertools.accumulate(len(texts) for texts, _ in split))
    for begin, end in zip([0, *ends], ends, strict=False):
        join_punctuation(timings[begin:end])
    return words


def _scored_characters(
    alignment: Alignment, pieces: Sequence[Sequence[int]], decode: Decode
) -> Iterator[Characters]:
    begin = 0
    for text, count in (one for tokens in pieces for one in characters(tokens, decode)):
        probs = alignment.token_probs[begin : begin + count].astype(np.float64)
        yield Characters(text, count, float(np.log(np.maximum(probs, _LEAST_PROB)).sum()))
        begin += count


def _begins(alignment: Alignment) -> npt.NDArray[np.int64]:
    if alignment.begins is not None:
        return alignment.begins
    assert alignment.matrix is not None
    return handovers(alignment.matrix)[alignment.prefix :]


def _shorten_at_sentences(words: WindowWords) -> None:
    """Cut what fills the pause between two sentences: their punctuation, or the word after it."""
    for before, timing in zip(words.timings, words.timings[1:], strict=False):
        if timing.duration_s <= words.longest_s:
            continue
        if timing.text in _SENTENCE_ENDS:
            timing.end_s = timing.start_s + words.longest_s
        elif before.text in _SENTENCE_ENDS:
            timing.start_s = timing.end_s - words.longest_s


def _begin_with_voice(timings: list[Timing], voice: Sequence[tuple[float, float]]) -> None:
    """Let no word begin in the silence before the stretch of voice that holds most of it."""
    for timing in timings:
        parts = [
            (min(timing.end_s, end) - max(timing.start_s, start), start) for start, end in voice
        ]
        most_s, start_s = max(parts, default=(0.0, 0.0))
        if most_s >= _LEAST_VOICE_S:
            timing.start_s = max(timing.start_s, start_s - _ONSET_S)


def give_words(
    segments: Sequence[Segment], words: WindowWords, window_start_s: float, spoken_until_s: float
) -> list[Segment]:
    """Give a window's segments their words, and the times of those words.

    A segment begins and ends with its words, unless its own times say that a word at either end is
    too long by half a second; then the word yields.

    Args:
        segments: of all the window's text, in order, with times in the whole audio.
        words: of the same text.
        window_start_s: in the whole audio.
        spoken_until_s: where the words before this window end.
    """
    timings, characters = iter(words.timings), iter(words.characters or ())
    given: list[Segment] = []
    for segment in segments:
        mine = _take(timings, len(segment.tokens), window_start_s)
        start, end = segment.start, segment.end
        if mine:
            _shorten_after_pause(mine, words, spoken_until_s)
            start, end = _agree(segment, mine, words.median_s)
            spoken_until_s = end
            mine = whole_words(mine, words.spaceless)
        segment = dataclasses.replace(
            segment,
            start=round(start, 3),
            end=round(end, 3),
            words=tuple(
                Word(round(w.start_s, 3), round(w.end_s, 3), w.text, round(w.probability, 4))
                for w in mine
            ),
        )
        if words.characters is not None:
            logprobs = tuple(_take_logprobs(characters, len(segment.tokens)))
            segment = dataclasses.replace(segment, token_logprobs=logprobs)
        given.append(segment)
    return given


def _take(timings: Iterator[Timing], tokens: int, offset_s: float) -> list[Timing]:
    """Take the next words, of so many tokens, with times in the whole audio."""
    taken: list[Timing] = []
    while tokens > 0 and (timing := next(timings, None)) is not None:
        tokens -= timing.tokens
        if timing.text:
            start_s, end_s = (round(offset_s + s, 2) for s in (timing.start_s, timing.end_s))
            taken.append(dataclasses.replace(timing, start_s=start_s, end_s=end_s))
    return taken


def _take_logprobs(characters: Iterator[Characters], tokens: int) -> Iterator[TokenLogprob]:
    """Take the next characters, of so many tokens."""
    while tokens > 0 and (part := next(characters, None)) is not None:
        tokens -= part.tokens
        yield TokenLogprob(part.text, round(part.logprob, 4) + 0.0)  # -0.0 is 0.0


def _shorten_after_pause(mine: list[Timing], words: WindowWords, spoken_until_s: float) -> None:
    """Cut the first two words after a pause, which is where they grew into it."""
    first, longest_s = mine[0], words.longest_s
    second = mine[1] if len(mine) > 1 else None
    if first.end_s - spoken_until_s <= words.median_s * _PAUSE:
        return
    together = second is not None and second.end_s - first.start_s > longest_s * 2
    if first.duration_s <= longest_s and not together:
        return
    if second is not None and second.duration_s > longest_s:
        first.end_s = second.start_s = max(second.end_s / 2, second.end_s - longest_s)
    first.start_s = max(0.0, first.end_s - longest_s)


def _agree(segment: Segment, mine: list[Timing], median_s: float) -> tuple[float, float]:
    """Return start and end of a segment, once it and its words agree on them."""
    first, last = mine[0], mine[-1]
    start, end = first.start_s, last.end_s
    if first.start_s + _DISAGREEMENT_S < segment.start < first.end_s:
        first.start_s = max(0.0, min(first.end_s - median_s, segment.start))
        start = segment.start
    if last.start_s < segment.end < last.end_s - _DISAGREEMENT_S:
        last.end_s = max(last.start_s + median_s, segment.end)
        end = segment.end
    return start, end
