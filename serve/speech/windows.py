"""Windows of long audio, and their tokens as pieces of text and as segments. Pure functions.

The rules for timestamps follow OpenAI's `whisper/transcribe.py`, but text after a window's last
timestamp is kept instead of being decoded once more; see `serve.speech.cutting`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from serve.contract.engine import TokenizerFacts
from serve.contract.messages import Alignment, Samples, Segment
from serve.speech.features import SAMPLE_RATE
from serve.speech.timeline import Pause, Timeline

TIMESTAMP_STEP_S = 0.02  # between two neighbouring timestamp tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """A stretch of audio that is decoded in one go."""

    start_s: float  # in the whole audio
    samples: Samples  # (n,), n <= WINDOW_SAMPLES
    last: bool = False  # the audio ends with it
    # Where speech alone is decoded, what was cut out of the samples, and how much before them, in
    # them and, with the last window, after them.
    pauses: tuple[Pause, ...] = ()
    margin_s: float = 0.0  # see `Timeline`
    left_out_s: float = 0.0
    # Start and end in seconds from the window's start of each stretch in which somebody speaks, in
    # order; None where nobody listened.
    voice: tuple[tuple[float, float], ...] | None = None
    channel: int = 0  # of the audio, where each is decoded by itself
    narrow: bool = False  # the audio so far is too low for speech; see `serve.speech.bandwidth`

    @property
    def duration_s(self) -> float:
        """Seconds of audio, without padding."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def voice_s(self) -> float | None:
        """Seconds in which somebody speaks; None where nobody listened."""
        return None if self.voice is None else sum(end - start for start, end in self.voice)

    @property
    def timeline(self) -> Timeline:
        """The place of its times in the whole audio."""
        return Timeline(self.start_s, self.pauses, self.margin_s)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text between two timestamps of one window; times in seconds from the window's start."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]  # text tokens only


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One decoding of one window; scores are None where the runtime cannot measure them."""

    tokens: tuple[int, ...]  # as sampled: text and timestamps
    avg_logprob: float | None
    no_speech_prob: float | None
    temperature: float
    compression_ratio: float  # of the whole text, or of the piece that repeats itself most
    pieces: tuple[Piece, ...] = ()  # of the text
    looped: bool = False  # ended as a loop: more would have been sampled
    alignment: Alignment | None = None  # of the text, where words are asked for


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A window that will not be decoded again. Silence has no pieces."""

    timeline: Timeline  # the window's
    duration_s: float
    attempt: Attempt
    pieces: tuple[Piece, ...]
    language: str | None = None  # code, where windows have languages of their own
    given_up: bool = False  # no attempt was accepted, and this is the best of them


def split_segments(
    tokens: Sequence[int], facts: TokenizerFacts, window_duration_s: float
) -> list[Piece]:
    """Split a window's tokens at their timestamps.

    A timestamp after text ends a piece and the next one begins another; text before the first
    timestamp begins with the window, text after the last one ends with it, and text without any
    timestamp is one piece over the whole window. An end that is not after its start tells nothing,
    so the next piece's start or the window's end stands in for it. Times lie in
    [0, window_duration_s] and never run backwards; stretches without text are left out.

    Args:
        tokens: as sampled; special tokens other than timestamps are ignored.
        facts: the engine's special ids.
        window_duration_s: seconds of audio in the window, without padding.
    """
    begin, spans = 0.0, list[Piece]()
    for time_s, text in _spans(tokens, facts, window_duration_s):
        time_s = max(time_s, begin)
        if text:
            spans.append(Piece(begin, time_s, text))
        begin = time_s
    pieces: list[Piece] = []
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


def written(pieces: Sequence[Piece], facts: TokenizerFacts, timestamps: bool) -> tuple[int, ...]:
    """Return the text tokens of pieces, each between its timestamps where these are wanted."""
    tokens: list[int] = []
    for piece in pieces:
        begin, end = (
            facts.timestamp_begin + round(time_s / TIMESTAMP_STEP_S)
            for time_s in (piece.start_s, piece.end_s)
        )
        tokens += (begin, *piece.tokens, end) if timestamps else piece.tokens
    return tuple(tokens)


def stitch(window: Decoded, decode: Callable[[Sequence[int]], str]) -> list[Segment]:
    """Turn a window's pieces into segments, in order, with times as if it held no pauses.

    They are times in the whole audio, once `Timeline.restore` has put back what was cut out of the
    window. Windows do not overlap and pieces lie inside their window, so segments do not overlap.
    Texts are kept as decoded, with the space that begins a word; see `spoken` for blank ones.

    Args:
        window: what became of it.
        decode: text of a piece's tokens.
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
    """Return the segments that hold more than blanks."""
    return [segment for segment in segments if segment.text.strip()]


def join_text(segments: Iterable[Segment]) -> str:
    """Join the segments' texts as decoded, without space at either end."""
    return "".join(segment.text for segment in segments).strip()
