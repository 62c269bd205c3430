"""The interface that every runtime implements: windows in, tokens out.

A runtime owns the device. One thread submits jobs and polls for events. `submit` never blocks, and
`poll` never waits longer than its timeout. A failed job ends with an event; only a broken device
raises an error.
"""

import dataclasses
from typing import Literal, Protocol

import torch

from serve.contract.codec import to_json
from serve.contract.errors import EarshotError
from serve.contract.messages import SEARCH_OPTIONS, Alignment, SearchOptions
from serve.contract.phrases import Trie

# "loop": the text repeats itself, see `Job.loop_tokens`; the scores cover the tokens until then.
FinishReason = Literal["eot", "length", "loop", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The options that a runtime supports; the transcriber rejects others by name."""

    runtime: str
    timestamps: bool  # enforces Whisper's timestamp rules while it samples
    sampling: bool  # temperatures above 0
    detect_language: bool
    streaming: bool  # events before the last carry tokens
    beam_width: int  # the maximum number of rows of a window: bounds `beam_size` and `best_of`
    max_windows: int  # windows that may decode at the same time
    device: str = "cpu"  # torch device on which `Job.features` are best computed
    input_kind: Literal["features", "samples"] = "features"  # the content of `Job.features`
    previous_text: bool = True  # prompts may hold previous text and `Job.prefix`
    search_options: bool = False  # all of `SearchOptions` but `beam_size` and `best_of`
    words: bool = False  # honours `Job.align_frames`
    short_windows: bool = False  # `Job.features` may have fewer frames than a window of 30 s
    languages: bool = False  # honours `Detection.languages`
    phrases: bool = False  # honours `DecodingOptions.phrases`
    urgent_first: bool = False  # `Job.urgent` jobs leave the queue first
    reports_begin: bool = False  # sets `JobEvent.began_s`
    # The only values of `beam_size` of an engine built for them, without `best_of`; (): all.
    beam_sizes: tuple[int, ...] = ()

    def refusal(self, options: SearchOptions) -> str | None:
        """Return a message on the first unsupported search option; None if all are supported."""
        for name in SEARCH_OPTIONS:
            value = getattr(options, name)
            if (reason := self._unsupported_reason(name, value)) is not None:
                return f"{name} = {to_json(value)}{reason}"
        return None

    def _unsupported_reason(self, name: str, value: float) -> str | None:
        """Return why the runtime does not support an option's value."""
        if name not in ("beam_size", "best_of"):
            default = getattr(SearchOptions, name)
            if self.search_options or value == default:
                return None
            expected = to_json(default)
            return f", but the runtime {self.runtime} does not have it; expected {expected}"
        if self.beam_sizes:
            supported = self.beam_sizes if name == "beam_size" else (1,)
            if value in supported:
                return None
            expected = " or ".join(map(str, supported))
            return f", which the runtime {self.runtime} was not built for; expected {expected}"
        if value <= self.beam_width:
            return None
        return (
            f", but a window has at most {self.beam_width} rows in the runtime {self.runtime}; "
            f"expected runtime.rows of at least {value} and more than runtime.slots"
        )


@dataclasses.dataclass(frozen=True)
class DecodingOptions(SearchOptions):
    """The decoding options of one window; the search options are off by default."""

    timestamps: bool = True
    temperature: float = 0.0  # 0 = greedy
    max_tokens: int = 224  # new tokens with end of text
    seed: int = 0  # makes sampling repeatable in any batch
    # The phrases to boost at temperature 0. Equal lists should be the same object.
    phrases: Trie | None = None


@dataclasses.dataclass(frozen=True)
class Detection:
    """Options of language detection, for a window with DETECT_LANGUAGE in its prompt.

    The likeliest transcript decides the language of a translation, since the probability of the
    English text says nothing about it.
    """

    languages: tuple[int, ...] = ()  # token ids of the allowed languages; (): any
    # The window is decoded in further languages until the probabilities of the languages tried add
    # up to this. The likeliest text is the answer. Runtimes without this search use one language.
    certainty: float = 0.0
    max_languages: int = 1  # maximum number of languages to try
    # If the prompt names a language, and another language has at least this probability, the window
    # is decoded in both, and the likelier text is the answer. 0: never.
    switch: float = 0.0
    # Sets of token ids of languages that never switch to each other.
    close_languages: tuple[frozenset[int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """One window to decode."""

    id: int
    # float32 on any device: log-mel (n_mels, 3000). A runtime with short windows also takes fewer
    # frames that end with a second of silence. A runtime with the `input_kind` "samples" gets
    # 16 kHz mono of at most 30 s (n,) without padding; it may read them until the job has ended.
    features: torch.Tensor
    prompt: tuple[int, ...]  # ends with the last forced token; may hold DETECT_LANGUAGE once
    options: DecodingOptions = DecodingOptions()
    # The number of log-mel frames that the encoder sees. A runtime that takes samples extends them
    # with silence to this length; others ignore it.
    frames: int = 3000
    # The number of the prompt's last tokens, text and timestamps, with which the window's text
    # begins. The token rules treat them as sampled; scores and answers leave them out.
    prefix: int = 0
    # A draft of the text, verified in one step. It changes the time, never the answer; runtimes may
    # ignore it.
    draft: tuple[int, ...] = ()
    # > 0: the last event has the alignment of each text token with the window's first
    # `align_frames` frames of 20 ms.
    align_frames: int = 0
    # > 0: the job ends when the last `loop_tokens` sampled tokens, without timestamps, repeat the
    # same few tokens at least four times. Some runtimes do not check this.
    loop_tokens: int = 0
    # Whether it is the request's only window, and should go before others. This changes when
    # jobs end, never their results. A runtime with its own scheduler may ignore it.
    urgent: bool = False
    detection: Detection = Detection()


@dataclasses.dataclass(frozen=True)
class Scores:
    """Measurements of a finished window; None if the runtime does not have them."""

    avg_logprob: float | None  # mean over the sampled tokens with end of text
    no_speech_prob: float | None  # at start-of-transcript
    language: int | None  # token id that replaced DETECT_LANGUAGE or, by `switch`, the named one
    language_prob: float | None
    encode_s: float
    decode_s: float
    # Monotonic times at which encoding and decoding began; None if unknown.
    began_s: tuple[float, float] | None = None
    # Token id and probability of the likeliest language of a window with a language in the prompt.
    # None if the window was decoded in both.
    top_language: tuple[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class JobEvent:
    """An event of one job. Exactly one event per submitted job has `finished` set."""

    job_id: int
    tokens: tuple[int, ...] = ()  # sampled since the last event, without prompt and end of text
    finished: FinishReason | None = None
    scores: Scores | None = None  # with `finished` "eot", "length" or "loop"
    error: EarshotError | None = None  # with `finished` "error"
    # with `finished` "eot", "length" or "loop", if the job asked for it and has text
    alignment: Alignment | None = None
    # Monotonic time at which the window got its slot and its encoding began; in one event only.
    began_s: float | None = None


@dataclasses.dataclass
class Gauges:
    """A runtime's gauges and counters since it started."""

    queued: int = 0  # jobs submitted, not yet encoded
    busy_slots: int = 0
    steps: int = 0  # decoder steps run
    step_slots: int = 0  # busy slots summed over those steps; / steps = mean batch size
    tokens: int = 0  # tokens sampled
    windows: int = 0  # windows encoded
    encode_s: float = 0.0
    decode_s: float = 0.0
    drafted: int = 0  # draft tokens of the engine's draft decoder
    drafted_right: int = 0  # accepted draft tokens


class Runtime(Protocol):
    """Decodes windows. It is not thread-safe: one thread makes every call."""

    @property
    def capabilities(self) -> Capabilities:
        """The options that this runtime supports."""

    def submit(self, job: Job) -> None:
        """Queue one job, and return at once.

        Raises:
            OptionError: the runtime does not support a search option (the transcriber has checked
                the rest), or the prompt leaves no room for a token in the context. Too many
                max_tokens are no error: the job then ends at the end of the context.
        """

    def poll(self, timeout_s: float) -> list[JobEvent]:
        """Advance the work, or wait at most `timeout_s` for events; return the events.

        Without jobs it returns an empty list at once.

        Raises:
            DeviceError: the device failed; every unfinished job is lost.
        """

    def cancel(self, job_id: int) -> None:
        """End a job with a last event "cancelled"; ignore the ids of unknown and ended jobs."""

    def gauges(self) -> Gauges:
        """Return gauges and counters.

        Raises:
            DeviceError: the device failed; every unfinished job is lost.
        """

    def close(self) -> None:
        """Release the device. Unfinished jobs get no further events."""
