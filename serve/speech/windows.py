"""Define windows of audio, and split their tokens into pieces and segments. Pure functions.

The timestamp rules follow OpenAI's `whisper/transcribe.py`. Unlike there, text after a window's
last timestamp is kept and not decoded again; see `serve.speech.cutting`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from serve.contract.engine import TokenizerFacts
from serve.contract.messages import Alignment, Samples, Segment
from serve.speech.features import SAMPLE_RATE
from serve.speech.timeline import Pause, WindowTimeline

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
    narrow: bool = False  # the audio so far is too low for speech; see `serve.speech.bandwidth`

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
    given_up: bool = False  # all attempts failed, and this is the best one


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
    for time_s, text in _spans(tokens, facts, window_duration_s):
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


def _spans(
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

    Their times ignore the pauses cut out of the window; `WindowTimeline.restore` adds these.
    Windows do not overlap and pieces lie inside their window, so segments do not overlap. Texts
    are kept as decoded, with the space before a word; `spoken` removes blank ones.

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
