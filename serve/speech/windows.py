"""Long audio as pure functions: cut it into windows, judge what came back, stitch the text.

Nothing here calls a model. The rules for timestamps and for decoding again follow OpenAI's
`whisper/transcribe.py`, with one difference: OpenAI decodes a recording from left to right and
moves on to the last timestamp that it saw, so windows depend on each other. Here windows are cut
beforehand at quiet places, so they can decode at the same time, and text after a window's last
timestamp is kept instead of being decoded once more; see `serve.speech.coverage` for speech of
which there is no text.

Where to cut: every window but the last ends between 15 s and 30 s after it began, in the longest
pause found there. Loudness is the power of 20 ms frames averaged over 0.3 s, so that a gap inside
a word or between two words does not look like a pause. Frames within 6 dB of the quietest count
as pause, which finds pauses in clean recordings and in noisy ones alike; more than 40 dB below the
loudest all are equally quiet, so that digital silence does not beat a pause with room noise. Pauses
of 1 s and more are equally good and the latest wins, since a window costs the same whatever it
holds. The cut is in the middle of a pause, or half a second before the speech that ends a long one.
Speech without any pause is cut at its quietest place.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from serve.contract.config import TranscriberConfig
from serve.contract.engine import TokenizerFacts
from serve.contract.messages import Alignment, Samples, Segment
from serve.speech.features import SAMPLE_RATE, WINDOW_SAMPLES
from serve.speech.timeline import Pause, Timeline

TIMESTAMP_STEP_S = 0.02  # between two neighbouring timestamp tokens

HARDLY_SPOKEN_S = 0.5
"""Of voice: with less, whether there are words is the model's to say."""

_EARLIEST_CUT = WINDOW_SAMPLES // 2
_SHORTEST_REST = SAMPLE_RATE  # samples; a last window of less holds too little to recognise
_SURE_SAMPLES = WINDOW_SAMPLES + _SHORTEST_REST  # with so many, what follows moves no cut
_FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_SMOOTH_FRAMES = 15  # 0.3 s
_PAUSE_DB = 6.0  # above the quietest frame
_DEEPEST_DB = 40.0  # below the loudest frame
_SILENCE = 1e-12  # mean square of samples: below the last bit of 24
_LONG_PAUSE_FRAMES = 50  # 1 s
_PLAIN_RATIO = 1.56  # compression ratio of 600 bytes of plain text, the lower end of what was seen
LOOP_START = 16  # tokens: the words that are repeated, and what compressing needs in any case
_TOKENS_PER_S = 8  # nobody speaks faster


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
        """Where its times are in the whole audio."""
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
class Verdict:
    """What becomes of an attempt."""

    outcome: Literal["accept", "silence", "retry", "give up"]
    temperature: float | None = None  # of the next attempt, with "retry"


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A window that will not be decoded again. Silence has no pieces."""

    timeline: Timeline  # the window's
    duration_s: float
    attempt: Attempt
    pieces: tuple[Piece, ...]
    language: str | None = None  # code, where windows have languages of their own
    given_up: bool = False  # no attempt was accepted, and this is the best of them


def cut(blocks: Iterable[Samples]) -> Iterator[Window]:
    """Cut audio into windows of at most 30 s that join up to exactly the whole.

    A window is yielded as soon as it is known, and where it ends does not depend on how the audio
    is split into blocks. A last window is never shorter than 1 s unless it is the only one.

    Args:
        blocks: float32 (n,) each, 16 kHz mono, in order.
    """
    cutter = Cutter()
    for block in blocks:
        yield from cutter.push(block)
    yield from cutter.finish()


class Cutter:
    """Cuts audio that comes in blocks; see `cut`."""

    def __init__(self) -> None:
        self._start = 0  # of what is held, in the whole audio
        self._held = [np.zeros(0, np.float32)]
        self._count = 0  # samples held

    def push(self, block: Samples) -> Iterator[Window]:
        """The windows that are known after one more block."""
        self._held.append(block)
        self._count += len(block)
        if self._count >= _SURE_SAMPLES:
            yield from self._cut(_SURE_SAMPLES)

    def finish(self) -> Iterator[Window]:
        """The windows that are left."""
        yield from self._cut(WINDOW_SAMPLES + 1)
        yield Window(self._start / SAMPLE_RATE, self._held[0], last=True)

    def _cut(self, enough: int) -> Iterator[Window]:
        """Windows, as long as so many samples are held."""
        rest = np.concatenate(self._held)
        self._held, self._count = [rest], len(rest)
        while len(rest) >= enough:
            end = _first_cut(rest)
            window = Window(self._start / SAMPLE_RATE, rest[:end].copy())
            self._start, rest = self._start + end, rest[end:]
            self._held, self._count = [rest], len(rest)
            yield window


def _first_cut(samples: Samples) -> int:
    """Where the first window of audio of more than 30 s ends; a minute's first 31 s suffice."""
    latest = min(WINDOW_SAMPLES, len(samples) - _SHORTEST_REST)
    return _EARLIEST_CUT + _quiet_place(samples[_EARLIEST_CUT:latest])


def _quiet_place(region: Samples) -> int:
    """Index of the best sample to cut at; region is (n,) with n of at least a second."""
    frames = region[: len(region) // _FRAME * _FRAME].reshape(-1, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    # Edges repeat their last frame, or a window's end would look quieter than it is.
    half = _SMOOTH_FRAMES // 2
    padded = np.pad(power, half, mode="edge")
    smooth = np.convolve(padded, np.full(_SMOOTH_FRAMES, 1.0 / _SMOOTH_FRAMES), mode="valid")
    level_db = 10.0 * np.log10(np.maximum(smooth, _SILENCE))
    level_db = np.maximum(level_db, level_db.max() - _DEEPEST_DB)
    margin_db = min(_PAUSE_DB, (level_db.max() - level_db.min()) / 3)
    begin, end = _longest_pause(level_db <= level_db.min() + margin_db)
    # The middle, but never more than half a second before speech begins again.
    frames_before_speech = min((end - begin) / 2, _LONG_PAUSE_FRAMES / 2)
    return int((end - frames_before_speech) * _FRAME)


def _longest_pause(quiet: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """First frame, and the one after the last, of the longest run of quiet frames.

    Runs of a second and more are equally long; of equals the last is taken.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], quiet, [False]))))
    runs = edges.reshape(-1, 2)
    lengths = np.minimum(runs[:, 1] - runs[:, 0], _LONG_PAUSE_FRAMES)
    best = len(runs) - 1 - int(np.argmax(lengths[::-1]))  # argmax finds the first of equals
    return int(runs[best, 0]), int(runs[best, 1])


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
    """The tokens of pieces: their text, and around each its timestamps where these are wanted."""
    tokens: list[int] = []
    for piece in pieces:
        begin, end = (
            facts.timestamp_begin + round(time_s / TIMESTAMP_STEP_S)
            for time_s in (piece.start_s, piece.end_s)
        )
        tokens += (begin, *piece.tokens, end) if timestamps else piece.tokens
    return tuple(tokens)


def compression_ratio(text: str) -> float:
    """Bytes of UTF-8 over bytes after zlib: high for text that repeats itself, 0 for none."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def loop_tokens(max_tokens: int, duration_s: float, threshold: float) -> int:
    """So many tokens that only repeat what is before them make a whole window repetitive.

    Of a window of n tokens of which r say nothing new the rest compresses as any text: the ratio of
    the whole is about that of plain text times n / (n - r), whatever follows. n is bounded by what
    can be said in the window's time, too.

    Args:
        max_tokens: the most that may be sampled.
        duration_s: of the window's audio.
        threshold: compression ratio above which a window is repetitive.

    Returns:
        At least `LOOP_START`; 0 where no loop would be enough.
    """
    new = _PLAIN_RATIO / max(threshold, _PLAIN_RATIO)
    if max_tokens * new < LOOP_START:
        return 0
    most = min(max_tokens, LOOP_START + _TOKENS_PER_S * duration_s)
    return LOOP_START + round(most * (1 - new))


def judge(
    attempt: Attempt,
    config: TranscriberConfig,
    fixed_temperature: bool,
    voice_s: float | None = None,
) -> Verdict:
    """Accept an attempt, call it silence, or ask for another at the next higher temperature.

    It is silence where the model says so and either is unsure of the text or hardly a voice is
    heard: of a "Thank you." that nobody said it is sure. An attempt that was ended as a loop but
    does not compress as such goes on: the same temperature again. Scores that are None skip their
    check. Where the client fixed the temperature, the attempt stands as it is. After the highest
    one there is nothing left to try; see `best_attempt`.

    Args:
        attempt: of a window.
        config: the thresholds.
        fixed_temperature: by the client.
        voice_s: seconds of the window in which somebody speaks; None: nobody listened.
    """
    repetitive = attempt.compression_ratio > config.compression_ratio_threshold
    if attempt.looped and not repetitive:
        return Verdict("retry", attempt.temperature)
    unsure = attempt.avg_logprob is not None and attempt.avg_logprob < config.logprob_threshold
    hardly_spoken = voice_s is not None and voice_s < HARDLY_SPOKEN_S
    if (
        attempt.no_speech_prob is not None
        and attempt.no_speech_prob > config.no_speech_threshold
        and (unsure or attempt.avg_logprob is None or hardly_spoken)
    ):
        return Verdict("silence")
    if fixed_temperature or not (unsure or repetitive):
        return Verdict("accept")
    higher = [t for t in config.temperatures if t > attempt.temperature]
    return Verdict("retry", min(higher)) if higher else Verdict("give up")


def best_attempt(attempts: Sequence[Attempt], config: TranscriberConfig) -> Attempt:
    """The likeliest of a window's attempts, of which none was accepted.

    As in faster-whisper's `generate_with_fallback`: those that do not repeat themselves go first.
    Where the runtime tells no log-probability, it is the one at the lowest temperature.

    Args:
        attempts: at least one, in order.
        config: for the threshold of repetition.
    """
    limit = config.compression_ratio_threshold
    plain = [attempt for attempt in attempts if attempt.compression_ratio <= limit]
    return max(plain or attempts, key=_likelihood)


def _likelihood(attempt: Attempt) -> float:
    return -math.inf if attempt.avg_logprob is None else attempt.avg_logprob


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
    """Those that hold more than blanks."""
    return [segment for segment in segments if segment.text.strip()]


def join_text(segments: Iterable[Segment]) -> str:
    """The whole text: the segments' texts as decoded, without space at either end."""
    return "".join(segment.text for segment in segments).strip()
