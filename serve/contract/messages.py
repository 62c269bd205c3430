"""What goes into a transcriber and what comes out: plain frozen data, no behaviour.

But for `AudioFile`, which is read where bytes would be.
"""

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Task = Literal["transcribe", "translate"]
Mode = Literal["parallel", "sequential"]
Samples = npt.NDArray[np.float32]


class AudioFile:
    """An open file whose bytes are read when they are asked for, as slices; its end closes it.

    Args:
        descriptor: of the file, which must not change; its owner is this from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> bytes:
        begin, end, _ = place.indices(self._size)
        return os.pread(self._descriptor, max(0, end - begin), begin)

    def let_go(self) -> None:
        """Its bytes are needed no more: the disk has their room, whoever still holds this.

        The traceback of an error may, until garbage is collected. The descriptor is not closed
        meanwhile, for a worker may be about to read from it: it has nothing more to read.
        """
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self._descriptor, inheritable=False)
        os.close(nothing)

    def fileno(self) -> int:
        """The descriptor, which stays this object's."""
        return self._descriptor


@dataclasses.dataclass(frozen=True)
class Request:
    """One transcription asked for."""

    # A file's bytes, in memory or not, or mono samples in [-1, 1] at `sample_rate`.
    audio: bytes | AudioFile | Samples
    sample_rate: int | None = None  # Hz; needed with samples, not allowed with bytes
    language: str | None = None  # such as "en", "English", "en-US"; None or "auto" detects it
    # Codes or names of the languages that it may be in, if it is to be detected; (): as configured.
    languages: Sequence[str] = ()
    multilingual: bool = False  # the language is detected for each window of at most 30 s
    task: Task = "transcribe"
    # How the windows of long audio are decoded: all at once, or one after another, each with the
    # text before it. None = as configured.
    mode: Mode | None = None
    prompt: str = ""  # text that precedes the audio: names, spelling, style
    hotwords: str = ""  # names and terms that any window may hold
    # Names and terms that are to come out right, each with a weight behind it or 1: "Karenina^2".
    # Unlike hotwords, there may be many. (): as configured.
    phrases: Sequence[str] = ()
    prefix: str = ""  # words that the audio begins with, which the answer leaves out
    # Whether what is there of a file that was cut short is transcribed, with a warning; else it is
    # refused. None = as configured.
    partial: bool | None = None
    timestamps: bool = True
    word_timestamps: bool = False  # segments come with their words, and words with their times
    try_word_timestamps: bool = False  # so they do, unless the engine cannot time words
    token_logprobs: bool = False  # segments come with the log-probabilities of their tokens
    # Only these stretches are decoded: start, end, start, end, … in seconds; the last end may be
    # missing, for the end of the audio. (): all of it.
    clip_timestamps: Sequence[float] = ()
    # Segments of unlikely words between silences longer than this, in seconds, are left out; 0 =
    # none are, None = as configured.
    hallucination_silence_threshold: float | None = None
    vad: bool | None = None  # whether what is not speech is left out; None = as configured
    # Start, end, start, end, … in seconds of each stretch in which somebody speaks, by whom has
    # listened already: all is decoded, as without `vad`, and nobody listens again. (): nobody has.
    voice: Sequence[float] = ()
    # What counts as speech; see `serve.contract.config.SpeechConfig`. None = as configured.
    vad_threshold: float | None = None
    vad_min_speech_s: float | None = None
    vad_min_silence_s: float | None = None
    vad_pad_s: float | None = None
    temperature: float | None = None  # None = 0 with the configured fallback; a number = only that
    max_tokens: int | None = None  # new tokens per window; None = the configured limit
    # The search for the best text; see `serve.contract.config.SearchConfig`. None = as configured.
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    # Whether the encoder sees a window's audio and a second of silence, instead of silence up to
    # 30 s: much less work for short audio. Checkpoints are not trained so; measure what it costs.
    short_encoder: bool = False
    # Whether the audio breaks off, in a word perhaps, and will be decoded again when there is more
    # of it: text that repeats itself ends at once, without the repetition that showed it.
    unfinished: bool = False
    # `Transcript.tokens` of this audio when it was shorter: a guess at what its first window says.
    # It changes how long greedy decoding takes, never the answer.
    draft: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """What a window's n text tokens attended to, of the frames of 20 ms that its audio has.

    Row i weighs the frames in which token i may have been said, row n those after the last token.
    Where the window's text was begun by a prefix of k tokens, k rows for these come first.
    """

    token_probs: npt.NDArray[np.float32]  # (n,), of each token among all text tokens
    matrix: npt.NDArray[np.float32] | None  # (k + n + 1, frames); None where `begins` is known
    # (n + 1,), the frame at which each row begins on the way through its largest weights
    begins: npt.NDArray[np.int64] | None = None
    prefix: int = 0  # k


@dataclasses.dataclass(frozen=True)
class Word:
    """A word with its times in the whole audio, and the punctuation beside it."""

    start: float  # s
    end: float  # s
    word: str  # as it stands in the text, with the space that begins it
    probability: float


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token of a segment's text, or the several of which one character is made."""

    token: str
    logprob: float  # natural, among all text tokens; of several the sum


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of text with its times in the whole audio."""

    start: float  # s
    end: float  # s
    text: str
    tokens: tuple[int, ...]  # text tokens only
    avg_logprob: float | None
    no_speech_prob: float | None
    temperature: float
    compression_ratio: float
    words: tuple[Word, ...] | None = None  # None: not asked for
    language: str | None = None  # of its window, with `multilingual`; else None
    token_logprobs: tuple[TokenLogprob, ...] | None = None  # None: not asked for


@dataclasses.dataclass(frozen=True)
class Timings:
    """Where a request's time went, in seconds."""

    queue_s: float  # accepted -> its first window taken by the runtime, or found to have none
    encode_s: float
    decode_s: float
    total_s: float  # accepted -> final answer


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The whole answer."""

    text: str
    # None where nobody speaks, and the client named none; with `multilingual` that of most speech
    language: str | None
    language_prob: float | None  # None where the client named the language, and with None
    duration: float  # s of audio; with `clip_timestamps` up to the last one's end
    segments: tuple[Segment, ...]
    timings: Timings
    tokens: tuple[int, ...] = ()  # sampled for the first window, timestamps among them
    warning: str = ""  # what the client should know of its audio, as that it is cut short


@dataclasses.dataclass(frozen=True)
class SegmentReady:
    """A segment that will not change any more; segments come in order of time."""

    segment: Segment


@dataclasses.dataclass(frozen=True)
class Finished:
    """The last event of a request that succeeded."""

    transcript: Transcript


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last event of a request that did not; `error` is an EarshotError."""

    error: Exception


TranscriberEvent = SegmentReady | Finished | Failed
OnEvent = Callable[[TranscriberEvent], None]


@dataclasses.dataclass(frozen=True)
class RequestHandle:
    """A submitted request, for whoever submitted it."""

    cancel: Callable[[], None]
    """End the request with a CancelledError; does nothing once it has ended. Never blocks."""
