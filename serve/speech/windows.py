"""Define windows of audio and their segments, and find speech without text. Pure functions.

The timestamp rules follow OpenAI's `whisper/transcribe.py`. Unlike there, text after a window's
last timestamp is kept and not decoded again; see `serve.speech.cutting`.

Where a pause was cut out of a window there is a seam, with a margin of silence on either side. A
start time in the margin before a seam is mapped to the end of the pause. An end time in the margin
after a seam is mapped to the start of the pause. A word across a seam belongs to the side on which
its middle lies.

Whisper may stop before the speech ends, or give 30 seconds to one short sentence. OpenAI's
`whisper/transcribe.py` and faster-whisper continue at the last timestamp. Here windows are cut in
advance, so the remainder becomes a separate window. It begins in the first gap between segments
that holds enough speech. If a segment has too few tokens for its speech, the window is cut in two
from that segment on.

The limits were measured with Whisper base on 32 long recordings of people. Timestamps were early by
less than `_TIMESTAMP_ERROR_S`, and gaps with more speech than `_MIN_UNCOVERED_S` always contained
words. One of 1,499 segments had fewer than `_MIN_TOKENS_PER_S` tokens per second of speech, and it
lacked 30 words. No other segment had fewer than 1.3.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from serve.contract.manifest import TokenizerFacts
from serve.contract.messages import Alignment, Samples, Segment, Word
from serve.speech.features import SAMPLE_RATE

Interval = tuple[float, float]
"""Start and end in seconds; the end may be infinite."""


@dataclasses.dataclass(frozen=True)
class Pause:
    """A pause that was cut out of a window; all in seconds."""

    at_s: float  # from the window's start
    length_s: float


@dataclasses.dataclass(frozen=True)
class WindowTimeline:
    """The mapping of a window's times to the recording.

    `start` and `end` are non-decreasing, and a start is never mapped to a time after a later end.
    """

    start_s: float  # the window's start in the recording
    pauses: Sequence[Pause] = ()  # in order
    margin_s: float = 0.0  # silence on either side of each pause

    def start(self, time_s: float) -> float:
        """Map a start time of the window to the recording."""
        cut_s = 0.0
        for pause in self.pauses:
            if time_s < pause.at_s - self.margin_s:
                break
            time_s = max(time_s, pause.at_s)
            cut_s += pause.length_s
        return self.start_s + time_s + cut_s

    def end(self, time_s: float) -> float:
        """Map an end time of the window to the recording."""
        cut_s = 0.0
        for pause in self.pauses:
            if time_s <= pause.at_s + self.margin_s:
                time_s = min(time_s, pause.at_s)
                break
            cut_s += pause.length_s
        return self.start_s + time_s + cut_s

    def word(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Map the start and end of a word in the window to the recording."""
        middle, cut_s = (start_s + end_s) / 2, 0.0
        for pause in self.pauses:
            if middle < pause.at_s:
                end_s = min(end_s, pause.at_s)
                break
            start_s = max(start_s, pause.at_s)
            end_s = max(end_s, start_s)
            cut_s += pause.length_s
        return self.start_s + start_s + cut_s, self.start_s + end_s + cut_s

    def restore(self, segments: Iterable[Segment]) -> list[Segment]:
        """Map the times of segments and their words to the recording.

        Args:
            segments: the window's segments in order, with times that ignore the pauses.
        """
        segments = list(segments)
        return [self._restored(segment) for segment in segments] if self.pauses else segments

    def _restored(self, segment: Segment) -> Segment:
        words = None if segment.words is None else tuple(map(self._restored_word, segment.words))
        start = self.start(segment.start - self.start_s)
        end = self.end(segment.end - self.start_s)
        if segment.words and words:
            if segment.start == segment.words[0].start:
                start = words[0].start
            if segment.end == segment.words[-1].end:
                end = words[-1].end
        start, end = round(start, 3), round(max(start, end), 3)
        return dataclasses.replace(segment, start=start, end=end, words=words)

    def _restored_word(self, word: Word) -> Word:
        start, end = self.word(word.start - self.start_s, word.end - self.start_s)
        return dataclasses.replace(word, start=round(start, 3), end=round(end, 3))


TIMESTAMP_STEP_S = 0.02  # step between adjacent timestamp tokens


@dataclasses.dataclass(frozen=True, eq=False)
class AudioWindow:
    """An interval of audio that is decoded at once."""

    start_s: float  # in the recording
    samples: Samples  # (n,), n <= WINDOW_SAMPLES
    last: bool = False  # the last window of the audio
    pauses: tuple[Pause, ...] = ()  # cut out of the samples
    margin_s: float = 0.0  # see `WindowTimeline`
    # Seconds cut out before and in the window and, if it is the last one, after it.
    left_out_s: float = 0.0
    # Start and end of each speech interval in seconds from the window's start, in order; None if
    # VAD did not run.
    voice: tuple[tuple[float, float], ...] | None = None
    channel: int = 0  # the audio channel, if channels are decoded separately
    narrow: bool = False  # the audio so far is too low for speech; see `serve.speech.cutting`
    voice_pending: bool = False  # the window comes a second time with `voice`

    @property
    def duration_s(self) -> float:
        """Seconds of audio, without padding."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def voice_s(self) -> float | None:
        """Seconds of speech; None if VAD did not run."""
        return None if self.voice is None else sum(end - start for start, end in self.voice)

    @property
    def timeline(self) -> WindowTimeline:
        """The mapping of the window's times to the recording's."""
        return WindowTimeline(self.start_s, self.pauses, self.margin_s)


@dataclasses.dataclass(frozen=True)
class WindowSegment:
    """The text between two timestamps of a window; times in seconds from the window's start."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]  # text tokens only


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of decoding a window once; scores are None if the runtime has none."""

    tokens: tuple[int, ...]  # as sampled: text and timestamps
    avg_logprob: float | None
    no_speech_prob: float | None
    temperature: float
    compression_ratio: float  # the maximum over the whole text and its pieces
    pieces: tuple[WindowSegment, ...] = ()  # the text's pieces
    looped: bool = False  # ended early, because the text repeated itself
    alignment: Alignment | None = None  # the text's alignment, if words are wanted


@dataclasses.dataclass(frozen=True)
class DecodedWindow:
    """The final result of a window; silence has no pieces."""

    timeline: WindowTimeline  # the window's
    duration_s: float
    attempt: Attempt
    pieces: tuple[WindowSegment, ...]
    language: str | None = None  # the window's own language code, if it has one
    given_up: bool = False  # all attempts failed, and this is the best attempt


def split_segments(
    tokens: Sequence[int], facts: TokenizerFacts, window_duration_s: float
) -> list[WindowSegment]:
    """Split a window's tokens at their timestamps.

    A timestamp after text ends a piece, and the next timestamp begins another. Text before the
    first timestamp begins with the window, and text after the last one ends with it. Text without
    timestamps is one piece over the whole window. An end that is not after its start is replaced by
    the next piece's start or the window's end. Times lie in [0, window_duration_s] and never
    decrease. Intervals without text are dropped.

    Args:
        tokens: as sampled; special tokens other than timestamps are ignored.
        facts: the engine's special ids.
        window_duration_s: seconds of audio in the window, without padding.
    """
    begin, spans = 0.0, list[WindowSegment]()
    for time_s, text in _split_at_timestamps(tokens, facts, window_duration_s):
        time_s = max(time_s, begin)
        if text:
            spans.append(WindowSegment(begin, time_s, text))
        begin = time_s
    pieces: list[WindowSegment] = []
    next_start = window_duration_s
    for piece in reversed(spans):
        if piece.end_s <= piece.start_s:
            piece = dataclasses.replace(piece, end_s=next_start)
        pieces.append(piece)
        next_start = piece.start_s
    return pieces[::-1]


def _split_at_timestamps(
    tokens: Sequence[int], facts: TokenizerFacts, window_duration_s: float
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (time, text tokens before it) per timestamp and for the window's end."""
    text: list[int] = []
    for token in tokens:
        if token >= facts.timestamp_begin:
            time_s = round((token - facts.timestamp_begin) * TIMESTAMP_STEP_S, 2)
            yield min(time_s, window_duration_s), tuple(text)
            text.clear()
        elif token < facts.eot:
            text.append(token)
    yield window_duration_s, tuple(text)


def written(
    pieces: Sequence[WindowSegment], facts: TokenizerFacts, timestamps: bool
) -> tuple[int, ...]:
    """Return the text tokens of pieces, with their timestamp tokens if `timestamps`."""
    tokens: list[int] = []
    for piece in pieces:
        begin, end = (
            facts.timestamp_begin + round(time_s / TIMESTAMP_STEP_S)
            for time_s in (piece.start_s, piece.end_s)
        )
        tokens += (begin, *piece.tokens, end) if timestamps else piece.tokens
    return tuple(tokens)


def stitch(window: DecodedWindow, decode: Callable[[Sequence[int]], str]) -> list[Segment]:
    """Convert a window's pieces to segments, in order.

    The segments' times ignore the pauses cut out of the window; `WindowTimeline.restore` adds the
    pauses. Windows do not overlap and pieces lie inside their window, so segments do not overlap.
    Texts are kept as decoded, with the space before a word; `spoken` removes blank texts.

    Args:
        window: the window's final result.
        decode: returns the text of tokens.
    """
    attempt = window.attempt
    return [
        Segment(
            start=round(window.timeline.start_s + piece.start_s, 3),
            end=round(window.timeline.start_s + piece.end_s, 3),
            text=decode(piece.tokens),
            tokens=piece.tokens,
            avg_logprob=attempt.avg_logprob,
            no_speech_prob=attempt.no_speech_prob,
            temperature=attempt.temperature,
            compression_ratio=attempt.compression_ratio,
            language=window.language,
        )
        for piece in window.pieces
    ]


def spoken(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments with text that is not blank."""
    return [segment for segment in segments if segment.text.strip()]


def join_text(segments: Iterable[Segment]) -> str:
    """Join the segments' texts as decoded, and strip the result."""
    return "".join(segment.text for segment in segments).strip()


_MIN_UNCOVERED_S = 0.6  # minimum speech without text that is decoded again
_TIMESTAMP_ERROR_S = 0.2  # maximum error of a timestamp
_LEAD_SILENCE_S = 0.2  # silence before the speech in a remainder
_MIN_TOKENS_PER_S = 1.0  # minimum text tokens per second of speech; intelligible speech has more
_MIN_SPARSE_SPEECH_S = 5.0  # minimum speech in a sparse segment; a drawl or a laugh is shorter
_FRAME = SAMPLE_RATE // 100  # samples: 10 ms
_SMOOTH_FRAMES = 5


def find_uncovered(
    window: AudioWindow, pieces: Sequence[WindowSegment]
) -> tuple[int, list[AudioWindow]]:
    """Find the first speech in a window that its text does not cover.

    Args:
        window: a window with `voice`; without it all speech counts as covered.
        pieces: the pieces of the window's text, in order.

    Returns:
        The number of pieces to keep, and the windows to decode after them: none if all speech is
        covered, one that begins in a gap, or two if a piece has too little text.
    """
    next_starts = [*(piece.start_s for piece in pieces[1:]), window.duration_s + _TIMESTAMP_ERROR_S]
    for number, (piece, next_s) in enumerate(zip(pieces, next_starts, strict=False)):
        if is_sparse(window, piece):
            return number, _cut_in_two(window, piece)
        gap = voice_in(window, piece.end_s + _TIMESTAMP_ERROR_S, next_s - _TIMESTAMP_ERROR_S)
        if _seconds(gap) >= _MIN_UNCOVERED_S:
            begin = _remainder_begin(window.samples, piece.end_s, gap[0][0])
            return number + 1, [sub_window(window, begin)]
    return len(pieces), []


def uncovered_s(window: AudioWindow, pieces: Sequence[WindowSegment]) -> float:
    """Sum the seconds of speech in a window outside all pieces, which are widened by the slack."""
    ends = [0.0, *(piece.end_s + _TIMESTAMP_ERROR_S for piece in pieces)]
    starts = [*(piece.start_s - _TIMESTAMP_ERROR_S for piece in pieces), window.duration_s]
    gaps = zip(ends, starts, strict=True)
    return sum(_seconds(voice_in(window, start_s, end_s)) for start_s, end_s in gaps)


def voice_in(window: AudioWindow, start_s: float, end_s: float) -> list[Interval]:
    """Return the intervals of a window's speech between two times."""
    parts = [(max(start, start_s), min(end, end_s)) for start, end in window.voice or ()]
    return [(start, end) for start, end in parts if start < end]


def is_sparse(window: AudioWindow, piece: WindowSegment) -> bool:
    """Return whether a piece has too little text for its speech."""
    voice_s = _seconds(voice_in(window, piece.start_s, piece.end_s))
    return voice_s >= _MIN_SPARSE_SPEECH_S and len(piece.tokens) < _MIN_TOKENS_PER_S * voice_s


def sub_window(window: AudioWindow, begin: int, end: int | None = None) -> AudioWindow:
    """Return the window of a part of a window; it is not the last one.

    Args:
        window: the whole window.
        begin: index of the part's first sample.
        end: index after its last sample; None: the window's end.
    """
    samples = window.samples[begin:end]
    begin_s, end_s = begin / SAMPLE_RATE, (begin + len(samples)) / SAMPLE_RATE
    earlier_s = [pause.length_s for pause in window.pauses if pause.at_s <= begin_s]
    return dataclasses.replace(
        window,
        start_s=window.start_s + begin_s + sum(earlier_s),
        samples=samples,
        last=False,
        pauses=tuple(
            dataclasses.replace(pause, at_s=pause.at_s - begin_s)
            for pause in window.pauses[len(earlier_s) :]
            if pause.at_s < end_s
        ),
        left_out_s=0.0,
        voice=tuple((a - begin_s, b - begin_s) for a, b in voice_in(window, begin_s, end_s)),
    )


def _cut_in_two(window: AudioWindow, piece: WindowSegment) -> list[AudioWindow]:
    """Cut the window from a piece on in two, at the quietest place in the piece's middle half."""
    first, last = (round(time_s * SAMPLE_RATE) for time_s in (piece.start_s, piece.end_s))
    quarter = (last - first) // 4
    middle = quietest(window.samples, first + quarter, last - quarter)
    return [sub_window(window, first, middle), sub_window(window, middle)]


def _remainder_begin(samples: Samples, text_end_s: float, voice_s: float) -> int:
    """Return the first sample of a remainder: just before the speech, or between two words."""
    if voice_s - _LEAD_SILENCE_S > text_end_s + _TIMESTAMP_ERROR_S:
        return round((voice_s - _LEAD_SILENCE_S) * SAMPLE_RATE)
    first_s, last_s = max(0.0, text_end_s - _TIMESTAMP_ERROR_S), text_end_s + _TIMESTAMP_ERROR_S
    return quietest(samples, round(first_s * SAMPLE_RATE), round(last_s * SAMPLE_RATE))


def quietest(samples: Samples, first: int, last: int) -> int:
    """Find the center of the quietest 50 ms between two samples at least 0.1 s apart."""
    frames = samples[first:last]
    frames = frames[: len(frames) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    smooth = np.convolve(power, np.ones(_SMOOTH_FRAMES), mode="valid")
    return first + _FRAME * (int(np.argmin(smooth)) + _SMOOTH_FRAMES // 2)


def _seconds(voice: Iterable[Interval]) -> float:
    return sum(end - start for start, end in voice)
