"""A transcriber's requests and answers: plain frozen data, no behaviour.

But for `AudioFile`, which is read where bytes would be.
"""

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
Priority = Literal["live", "file", "job"]  # of which the first goes first
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
        """Give its bytes' room back to the disk, whoever still holds this: they are needed no more.

        The traceback of an error may, until garbage is collected. The descriptor is not closed
        meanwhile, for a worker may be about to read from it: it has nothing more to read.
        """
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self._descriptor, inheritable=False)
        os.close(nothing)

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's."""
        return self._descriptor


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a window's best text; they mean what faster-whisper's do.

    `transcriber.beam_size` is the default of `beam_size` and `best_of`.
    """

    beam_size: Beams = option(1, "1 to 8 hypotheses, at temperature 0; 1: greedy")
    patience: Factor = option(  # rounded
        1.0,
        "the search ends with BEAM_SIZE * PATIENCE of them",
    )
    length_penalty: Power = option(1.0, "they rank by log-probability / length ** this")
    best_of: Beams = option(1, "1 to 8 samples, at temperatures above 0")  # the best is the answer
    repetition_penalty: Factor = option(1.0, "above 1: said tokens become less likely")
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=448)] = option(  # 448 is the context
        0,
        "never so many tokens twice in a row",
    )
    suppress_blank: bool = option(True, "a window's text begins with no space, and is not empty")
    suppress_numerals: bool = option(False, "no token with a digit, %, $ or £: numbers are words")


SEARCH_OPTIONS = tuple(field.name for field in dataclasses.fields(SearchOptions))
"""The options of a request that are `SearchOptions`'s fields."""


@dataclasses.dataclass(frozen=True)
class SpeechOptions:
    """Bounds of what counts as speech.

    The values are those with which faster-whisper packs windows for a batch, but for the shortest
    speech, which it leaves at 0. In the recordings of `python -m eval long` 0.1 s keeps out 13 of
    23 moments in which nobody speaks, and 30 ms of 39 minutes in which somebody does.
    """

    vad_threshold: Fraction = option(0.5, "0 to 1; a frame that is likelier begins speech")
    vad_min_speech_s: Moment = option(0.1, "seconds; what is no longer is no speech")
    vad_min_silence_s: Moment = option(0.16, "seconds of silence that end speech")
    vad_pad_s: Moment = option(0.4, "seconds that stay on either side of speech")


SPEECH_OPTIONS = tuple(field.name for field in dataclasses.fields(SpeechOptions))
"""The options of a request that are `SpeechOptions`'s fields."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One transcription asked for; None = as configured, where nothing else is said.

    Each option is declared here once, or in `SearchOptions` or `SpeechOptions`.
    """

    # A file's bytes, in memory or not, or mono samples in [-1, 1] at `sample_rate`.
    audio: bytes | AudioFile | Samples
    sample_rate: int | None = option(None, "Hz; needed with SAMPLES, not allowed with AUDIO")
    language: str | None = option(
        None, 'such as "en", "English" or "en-US"; default, and "auto": detected', max_bytes=64
    )
    languages: Sequence[str] = option(  # codes or names
        (),
        "codes among which it is detected; default: as configured",
        max_bytes=2**12,
    )
    multilingual: bool = option(False, "detect it for each window; default: false")
    task: Task = option("transcribe", '"transcribe" (default) or "translate"', max_bytes=64)
    prompt: str = option("", "text before the audio: names, spelling, style", max_bytes=2**18)
    hotwords: str = option("", "names and terms that any window may hold", max_bytes=2**18)
    # Each with a weight behind it, or 1. Unlike hotwords, there may be many. (): as configured.
    phrases: Sequence[str] = option(
        (), 'names to come out right; "name^2": weight 2; default: as configured', max_bytes=2**18
    )
    prefix: str = option("", "words that the audio begins with; not answered", max_bytes=2**18)
    # How the windows of long audio are decoded: all at once, or one after another.
    mode: Mode = option("parallel", '"parallel" (default) or "sequential"', max_bytes=64)
    # With a warning; where it is false such a file is refused.
    partial: bool = option(False, "take what is there of a cut file; default: false")
    audio_track: str | None = option(
        None,
        "number from 1 on, or language, of the file's audio track; default: the file's own",
        max_bytes=64,
    )
    timestamps: bool = option(True, "whether the model marks times; default: true")
    word_timestamps: bool = option(False, "whether segments hold timed words; default: false")
    try_word_timestamps: bool = option(False, "the same, if the engine can time words")
    token_logprobs: bool = option(False, "and their tokens' log-probabilities")
    low_confidence: float | None = option(
        None, "0 to 1: timed words are marked whose confidence is lower; default: none are"
    )
    channels: Channels = option(
        "mix",
        '"mix" (default), or "split": each channel of the audio is a speaker\'s own',
        max_bytes=64,
    )
    # Of these all but `diarize` say what is known of the speakers, who get letters else.
    diarize: bool = option(False, "tell speakers apart by their voices; default: false")
    num_speakers: int | None = option(None, "with DIARIZE: how many there are")
    min_speakers: int | None = option(None, "with DIARIZE: at least so many")
    max_speakers: int | None = option(None, "with DIARIZE: at most so many")
    known_speaker_names: Sequence[str] = option(
        (), "with DIARIZE: names of speakers", max_bytes=2**12
    )
    known_speaker_references: Sequence[str] = option(
        (), "2 to 10 s of each of these alone, as data URLs in base64", max_bytes=2**25
    )
    # The last end may be missing, for the end of the audio. (): all of it.
    clip_timestamps: Sequence[float] = option(
        (), "start, end, start, … s: decode these stretches", max_bytes=2**14
    )
    hallucination_silence_threshold: float = option(
        0.0, "seconds: odd segments between longer silences are left out; default: 0, none are"
    )
    vad: Switch | bool | None = option(
        None,
        '"on" or true: decode speech alone; "off" or false: all; "auto": speech alone in audio of '
        "more than 30 s; default: as configured",
        max_bytes=64,
    )
    # By whom has listened already: all is decoded, as without `vad`, and nobody listens again.
    # (): nobody has.
    voice: Sequence[float] = option(
        (), "start, end, start, … s: where somebody speaks, if known", max_bytes=2**14
    )
    vad_threshold: float | None = None
    vad_min_speech_s: float | None = None
    vad_min_silence_s: float | None = None
    vad_pad_s: float | None = None
    temperature: float | None = option(  # a number: only that
        None,
        "0 to 1; default: 0, with the configured fallback",
    )
    max_tokens: int | None = option(None, "most new tokens per window of at most 30 s")
    beam_size: int | None = None
    patience: float | None = None
    length_penalty: float | None = None
    best_of: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppress_blank: bool | None = None
    suppress_numerals: bool | None = None
    # True: the encoder sees a window's audio and a second of silence. Checkpoints are not trained
    # so; measure what it costs. False: it sees 30 s.
    short_encoder: bool | None = option(
        None, "do not encode a window's silence up to 30 s; default: where it costs nothing"
    )
    # The audio breaks off, in a word perhaps: text that repeats itself ends at once, without the
    # repetition that showed it.
    unfinished: bool = option(False, "more of this audio will be asked for; default: false")
    # `Transcript.tokens`: a guess at what the first window says. It changes how long greedy
    # decoding takes, never the answer.
    draft: tuple[int, ...] = option(
        (), "TOKENS of this audio when it was shorter: saves time", max_bytes=2**12
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """The attention of a window's n text tokens to the frames of 20 ms that its audio has.

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
    confidence: float | None = None  # how likely it is right; None: the engine cannot say
    low_confidence: bool | None = None  # True: below what the request asked for; else None


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
    # Its window's, where windows have languages of their own; else None. A segment that is sent
    # before its transcript has one only if it is not the language of all, or with `multilingual`.
    language: str | None = None
    token_logprobs: tuple[TokenLogprob, ...] | None = None  # None: not asked for
    speaker: str | None = None  # who says it, where speakers are told apart; else None


@dataclasses.dataclass(frozen=True)
class Timings:
    """The parts of a request's time, in seconds."""

    queue_s: float  # accepted -> its first window begun by the runtime, or found to have none
    encode_s: float
    decode_s: float
    total_s: float  # accepted -> final answer


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a request's time, by the clock of the wall: seconds since 1970."""

    name: str  # "queue.decoder", "decode", "queue.slot", "encode", "steps", "words", "speakers"
    begin: float
    end: float
    busy_s: float  # of all windows' parts, which may be at the same time
    windows: int  # attempts, where one is decoded again


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The whole answer."""

    text: str
    # None where nobody speaks, and the client named none; of several that of most speech
    language: str | None
    language_prob: float | None  # None where the client named the language, and with None
    duration: float  # s of audio; with `clip_timestamps` up to the last one's end
    segments: tuple[Segment, ...]
    timings: Timings
    tokens: tuple[int, ...] = ()  # sampled for the first window, timestamps among them
    warnings: tuple[
        str, ...
    ] = ()  # sentences for the client: what was left out, guessed or ignored
    phases: tuple[Phase, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class SegmentReady:
    """A segment that will not change any more; segments come in order of time."""

    segment: Segment


@dataclasses.dataclass(frozen=True)
class RequestFinished:
    """The last event of a request that succeeded."""

    transcript: Transcript


@dataclasses.dataclass(frozen=True)
class RequestFailed:
    """The last event of a request that did not; `error` is an EarshotError."""

    error: Exception


TranscriberEvent = SegmentReady | RequestFinished | RequestFailed
OnEvent = Callable[[TranscriberEvent], None]


@dataclasses.dataclass(frozen=True)
class RequestHandle:
    """A submitted request, for whoever submitted it."""

    cancel: Callable[[], None]
    """End the request with a CancelledError; does nothing once it has ended. Never blocks."""
