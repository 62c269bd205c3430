"""The requests and answers of a transcriber, as frozen dataclasses."""

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from serve.contract.fields import Beams, Factor, Fraction, Moment, Power
from serve.contract.options import Switch, option

Task = Literal["transcribe", "translate"]
Mode = Literal["parallel", "sequential"]
Channels = Literal["mix", "split"]
Priority = Literal["live", "file", "job"]  # from highest to lowest
Samples = npt.NDArray[np.float32]


class AudioFile:
    """An open file, used in place of bytes and read by slices; its finalizer closes it.

    Args:
        descriptor: the file's descriptor, which this object owns. The file must not change.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: slice) -> bytes:
        begin, end, _ = key.indices(self._size)
        return os.pread(self._descriptor, max(0, end - begin), begin)

    def free_disk_space(self) -> None:
        """Free the file's disk space, even if the object is still referenced.

        The traceback of an error may keep a reference until the next garbage collection. The
        descriptor stays open, because a worker may still read from it; it then reads an empty file.
        """
        null_descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null_descriptor, self._descriptor, inheritable=False)
        os.close(null_descriptor)

    def fileno(self) -> int:
        """Return the descriptor; this object still owns it."""
        return self._descriptor


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of decoding a window, as in faster-whisper.

    `transcriber.beam_size` is the default of `beam_size` and `best_of`.
    """

    beam_size: Beams = option(1, "1 to 8 hypotheses, at temperature 0; 1: greedy")
    patience: Factor = option(  # the product is rounded
        1.0, "the search ends with BEAM_SIZE * PATIENCE finished hypotheses"
    )
    length_penalty: Power = option(1.0, "hypotheses rank by log-probability / length ** this")
    best_of: Beams = option(1, "1 to 8 samples, at temperatures above 0")  # keeps the best
    repetition_penalty: Factor = option(1.0, "above 1: repeated tokens become less likely")
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=448)] = option(  # 448 is the context
        0, "never repeat an n-gram of this many tokens"
    )
    suppress_blank: bool = option(
        True, "no space at the start of a window's text, and no empty text"
    )
    suppress_numerals: bool = option(False, "no tokens with digits, %, $ or £: numbers are words")


SEARCH_OPTIONS = tuple(field.name for field in dataclasses.fields(SearchOptions))
"""Options of a request that are fields of `SearchOptions`."""


@dataclasses.dataclass(frozen=True)
class SpeechOptions:
    """Options of voice activity detection (VAD).

    The defaults are those of faster-whisper's batched pipeline, except `vad_min_speech_s`, which is
    0 there. In the recordings of `python -m eval long`, 0.1 s removes 13 of 23 false detections,
    and 30 ms of 39 minutes of speech.
    """

    vad_threshold: Fraction = option(0.5, "0 to 1; a frame with a higher probability starts speech")
    vad_min_speech_s: Moment = option(0.1, "seconds; discard speech that is not longer")
    vad_min_silence_s: Moment = option(0.16, "seconds of silence that end speech")
    vad_pad_s: Moment = option(0.4, "seconds of padding on either side of speech")


SPEECH_OPTIONS = tuple(field.name for field in dataclasses.fields(SpeechOptions))
"""Options of a request that are fields of `SpeechOptions`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A transcription request; None means the configured value, unless stated otherwise.

    Each option is declared once, here or in `SearchOptions` or `SpeechOptions`.
    """

    # The bytes of a file, or mono samples in [-1, 1] at `sample_rate`.
    audio: bytes | AudioFile | Samples
    sample_rate: int | None = option(None, "Hz; required with SAMPLES, not allowed with AUDIO")
    language: str | None = option(
        None, 'such as "en", "English" or "en-US"; default, and "auto": detected', max_bytes=64
    )
    languages: Sequence[str] = option(  # codes or names
        (), "codes of the languages to detect; default: as configured", max_bytes=2**12
    )
    multilingual: bool = option(False, "detect the language of each window; default: false")
    task: Task = option("transcribe", '"transcribe" (default) or "translate"', max_bytes=64)
    prompt: str = option("", "text before the audio: names, spelling, style", max_bytes=2**18)
    hotwords: str = option("", "names and terms for the prompt of every window", max_bytes=2**18)
    # Unlike hotwords, there may be many. (): as configured.
    phrases: Sequence[str] = option(
        (), 'names to boost; "name^2": weight 2; default: as configured', max_bytes=2**18
    )
    prefix: str = option(
        "", "first words of the audio; the answer leaves them out", max_bytes=2**18
    )
    # Decode the windows of long audio all at once, or one after another.
    mode: Mode = option("parallel", '"parallel" (default) or "sequential"', max_bytes=64)
    # The answer then has a warning; without the option, a truncated file is rejected.
    partial: bool = option(False, "accept a truncated file; default: false")
    audio_track: str | None = option(
        None,
        "number (from 1) or language of the audio track; default: the file's default track",
        max_bytes=64,
    )
    timestamps: bool = option(True, "whether the model marks times; default: true")
    word_timestamps: bool = option(False, "whether segments have timed words; default: false")
    try_word_timestamps: bool = option(False, "timed words, if the engine supports them")
    token_logprobs: bool = option(False, "whether segments have token log-probabilities")
    low_confidence: float | None = option(
        None, "0 to 1: mark timed words with a lower confidence; default: mark none"
    )
    channels: Channels = option(
        "mix", '"mix" (default), or "split": one speaker per channel', max_bytes=64
    )
    diarize: bool = option(False, "label speakers by their voices; default: false")
    num_speakers: int | None = option(None, "with DIARIZE: the number of speakers")
    min_speakers: int | None = option(None, "with DIARIZE: the minimum number of speakers")
    max_speakers: int | None = option(None, "with DIARIZE: the maximum number of speakers")
    # Speakers without a name get letters.
    known_speaker_names: Sequence[str] = option(
        (), "with DIARIZE: names of speakers", max_bytes=2**12
    )
    known_speaker_references: Sequence[str] = option(
        (), "2 to 10 s of each named speaker alone, as data URLs in base64", max_bytes=2**25
    )
    # The last end may be missing: the end of the audio. (): all of the audio.
    clip_timestamps: Sequence[float] = option(
        (), "start, end, start, … s: decode only these intervals", max_bytes=2**14
    )
    hallucination_silence_threshold: float = option(
        0.0, "seconds: drop implausible segments between longer silences; default: 0, off"
    )
    vad: Switch | bool | None = option(
        None,
        '"on" or true: decode only speech; "off" or false: all; "auto": only speech in audio of '
        "more than 30 s; default: as configured",
        max_bytes=64,
    )
    # The result of a VAD that has run already: no VAD runs again, and all audio is decoded. (): no
    # VAD has run.
    voice: Sequence[float] = option(
        (), "start, end, start, … s: intervals of speech, if known", max_bytes=2**14
    )
    vad_threshold: float | None = None
    vad_min_speech_s: float | None = None
    vad_min_silence_s: float | None = None
    vad_pad_s: float | None = None
    temperature: float | None = option(  # a number turns the fallback off
        None, "0 to 1; default: 0, with the configured fallback"
    )
    max_tokens: int | None = option(None, "maximum of new tokens per window of at most 30 s")
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppress_blank: bool | None = None
    suppress_numerals: bool | None = None
    # True: encode a window's audio and a second of silence. Checkpoints are not trained for this,
    # so measure the accuracy. False: encode 30 s.
    short_encoder: bool | None = option(
        None, "do not pad short windows to 30 s; default: if it costs no accuracy"
    )
    # The audio may end within a word. Repetitive text ends at once, without the repetition.
    unfinished: bool = option(False, "more of this audio follows in later requests; default: false")
    # `Transcript.tokens` of an earlier answer, as draft tokens of the first window. They change the
    # time of greedy decoding, and never the answer.
    draft: tuple[int, ...] = option(
        (), "TOKENS of the answer to a shorter part of this audio: saves time", max_bytes=2**12
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """The attention of a window's n text tokens to the audio's 20 ms frames.

    Row i has the weights of token i, row n those of the end token. If the text starts with a prefix
    of k tokens, their k rows come first.
    """

    token_probs: npt.NDArray[np.float32]  # (n,), the probability of each token among text tokens
    matrix: npt.NDArray[np.float32] | None  # (k + n + 1, frames); None if `begins` is known
    # (n + 1,), the first frame of each row on the best monotonic path
    begins: npt.NDArray[np.int64] | None = None
    prefix: int = 0  # k


@dataclasses.dataclass(frozen=True)
class Word:
    """A word with its adjacent punctuation, and its times in the whole audio."""

    start: float  # s
    end: float  # s
    word: str  # with the leading space
    probability: float
    confidence: float | None = None  # probability that it is right; None: not supported
    low_confidence: bool | None = None  # True: below the request's threshold; else None


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token of a segment's text, or several tokens that form one character."""

    token: str
    logprob: float  # natural logarithm, among all text tokens; the sum of several tokens


@dataclasses.dataclass(frozen=True)
class Segment:
    """A segment of the text, with its times in the whole audio."""

    start: float  # s
    end: float  # s
    text: str
    tokens: tuple[int, ...]  # text tokens only
    avg_logprob: float | None
    no_speech_prob: float | None
    temperature: float
    compression_ratio: float
    words: tuple[Word, ...] | None = None  # None: not requested
    # The window's language, if windows have different languages; else None. A segment that is
    # sent before the transcript has it only if it differs, or with `multilingual`.
    language: str | None = None
    token_logprobs: tuple[TokenLogprob, ...] | None = None  # None: not requested
    speaker: str | None = None  # None: not requested


@dataclasses.dataclass(frozen=True)
class Timings:
    """The durations of a request's phases, in seconds."""

    queue_s: float  # accepted -> the runtime starts its first window, or there is none
    encode_s: float
    decode_s: float
    total_s: float  # accepted -> final answer


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a request, by the wall clock: seconds since 1970."""

    name: str  # "queue.decoder", "decode", "queue.slot", "encode", "steps", "words", "speakers"
    begin: float
    end: float
    busy_s: float  # the sum over all windows, which may overlap
    windows: int  # counts repeated attempts, too


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The final answer of a request."""

    text: str
    # The language with most speech; None if there is no speech and the client named no language.
    language: str | None
    language_prob: float | None  # None if the client named the language, or there is none
    duration: float  # s of audio; with `clip_timestamps`, up to the end of the last clip
    segments: tuple[Segment, ...]
    timings: Timings
    tokens: tuple[int, ...] = ()  # of the first window, with timestamp tokens
    warnings: tuple[str, ...] = ()  # sentences for the client
    phases: tuple[Phase, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class SegmentReady:
    """A final segment; segments arrive in order of time."""

    segment: Segment


@dataclasses.dataclass(frozen=True)
class RequestFinished:
    """The last event of a request that succeeded."""

    transcript: Transcript


@dataclasses.dataclass(frozen=True)
class RequestFailed:
    """The last event of a request that failed; `error` is an EarshotError."""

    error: Exception


TranscriberEvent = SegmentReady | RequestFinished | RequestFailed
OnEvent = Callable[[TranscriberEvent], None]


@dataclasses.dataclass(frozen=True)
class RequestHandle:
    """The handle of a submitted request."""

    cancel: Callable[[], None]
    """End the request with a CancelledError, unless it has ended. Does not block."""
