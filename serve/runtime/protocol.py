"""The interface that every runtime implements: windows in, tokens out.

A runtime owns the device. It is driven by one thread, which submits jobs and polls for events;
it never blocks in `submit` and never waits longer than asked in `poll`. A job that fails ends in
an event; only a broken device raises.
"""

import dataclasses
from typing import Literal, Protocol

import torch

from serve.contract.codec import to_json
from serve.contract.errors import EarshotError
from serve.contract.messages import SEARCH_OPTIONS, Alignment, SearchOptions
from serve.contract.phrases import Trie

# "loop": the text repeats itself, see `Job.loop_tokens`; scores are of what was sampled until then.
FinishReason = Literal["eot", "length", "loop", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The options that a runtime can honour; the transcriber refuses others, by name."""

    runtime: str
    timestamps: bool  # enforces Whisper's timestamp rules while it samples
    suppression: bool  # honours the checkpoint's suppress lists
    sampling: bool  # temperatures above 0
    detect_language: bool
    no_speech_prob: bool
    token_logprobs: bool  # average log-probability of a window
    streaming: bool  # events before the last carry tokens
    beam_width: int  # the most rows of a window: bounds `beam_size` and `best_of`
    max_windows: int  # windows that may decode at the same time
    device: str = "cpu"  # torch device on which `Job.features` are best computed
    takes: Literal["features", "samples"] = "features"  # what `Job.features` must hold
    previous_text: bool = True  # prompts may hold text: what precedes the audio, and `Job.prefix`
    search_options: bool = False  # all of `SearchOptions` but `beam_size` and `best_of`
    words: bool = False  # honours `Job.align_frames`
    drafts: bool = False  # `Job.draft` saves steps; elsewhere it is ignored, which changes nothing
    short_windows: bool = False  # `Job.features` may have fewer frames than a window of 30 s
    languages: bool = False  # honours `Detection.languages`
    phrases: bool = False  # honours `DecodingOptions.phrases`
    urgent_first: bool = False  # of the jobs that wait, `Job.urgent` ones find a place first
    tells_begin: bool = False  # by `Event.began_s`
    # Of engines built for certain beams: those `beam_size`s alone, and no `best_of`. (): all.
    beam_sizes: tuple[int, ...] = ()

    def refusal(self, wanted: SearchOptions) -> str | None:
        """Say which option of a search cannot be honoured, and what to do; None: all can."""
        for name in SEARCH_OPTIONS:
            value = getattr(wanted, name)
            if (reason := self._unable(name, value)) is not None:
                return f"{name} = {to_json(value)}{reason}"
        return None

    def refusal_of(self, job: "Job") -> str | None:
        """Return the `refusal` of everything that a job asks for."""
        if job.align_frames > 0 and not self.words:
            return f"the runtime {self.runtime} cannot align this engine's text; ask without"
        if job.detection.languages and not self.languages:
            return f"the runtime {self.runtime} cannot choose among some languages; ask without"
        if job.options.phrases is not None and not self.phrases:
            return f"the runtime {self.runtime} cannot boost phrases; ask without"
        return self.refusal(job.options)

    def _unable(self, name: str, value: float) -> str | None:
        """Say why the runtime cannot have an option at a value."""
        if name not in ("beam_size", "best_of"):
            neutral = getattr(SearchOptions, name)
            if self.search_options or value == neutral:
                return None
            expected = to_json(neutral)
            return f", but the runtime {self.runtime} does not have it; expected {expected}"
        if self.beam_sizes:
            possible = self.beam_sizes if name == "beam_size" else (1,)
            if value in possible:
                return None
            expected = " or ".join(map(str, possible))
            return f", which the runtime {self.runtime} was not built for; expected {expected}"
        if value <= self.beam_width:
            return None
        return (
            f" needs runtime.rows of at least {value} and more than runtime.slots; the runtime "
            f"{self.runtime} has room for {self.beam_width} in a window"
        )


@dataclasses.dataclass(frozen=True)
class DecodingOptions(SearchOptions):
    """Options of how one window is decoded; the defaults of its search change nothing."""

    timestamps: bool = True
    temperature: float = 0.0  # 0 = greedy
    max_tokens: int = 224  # new tokens, end of text included
    seed: int = 0  # makes sampling repeatable, whatever else is in the batch
    # What is boosted, at temperature 0. The same list is best the same object.
    phrases: Trie | None = None


@dataclasses.dataclass(frozen=True)
class Detection:
    """Options of how a window's language is found, where its prompt holds DETECT_LANGUAGE.

    The language of a translation is that of the likeliest transcript: how likely the English text
    is says nothing about it.
    """

    languages: tuple[int, ...] = ()  # token ids of those that it may be; (): any
    # While the languages that were tried are together less likely than this, the window is decoded
    # in the next one, too, and the likeliest text is the answer; a runtime that detects languages
    # but does not look takes the likeliest language's.
    certainty: float = 0.0
    tries: int = 1  # the most languages that are
    # Where the prompt names a language instead: if the window's likeliest one is another, and at
    # least so likely, the window is decoded in that, too, and the likelier text is the answer. 0:
    # never; a runtime that does not look never does.
    switch: float = 0.0
    close: tuple[frozenset[int], ...] = ()  # token ids of languages between which none switches


@dataclasses.dataclass(frozen=True)
class Job:
    """One window to decode."""

    id: int
    # float32 on any device: log-mel (n_mels, 3000), or fewer frames of which silence is the last
    # second, where the runtime has short windows; or, for a runtime that `takes` samples,
    # 16 kHz mono of at most 30 s (n,), not padded
    features: torch.Tensor
    prompt: tuple[int, ...]  # ends with the last forced token; may hold DETECT_LANGUAGE once
    options: DecodingOptions = DecodingOptions()
    # So many of the prompt's last tokens, text and timestamps, are what the window begins to say:
    # rules for what is sampled count them as sampled, scores and answers do not.
    prefix: int = 0
    # A guess at what will be sampled, verified in one step: it changes the time, never the answer.
    draft: tuple[int, ...] = ()
    # > 0: the last event tells which of the window's first so many frames, of 20 ms, each text
    # token attended to.
    align_frames: int = 0
    # > 0: once so many sampled tokens in a row, timestamps apart, only repeat the few before them,
    # and do so four times or more, the job ends; a runtime that does not look goes on.
    loop_tokens: int = 0
    # The only window of its request: it goes before others where the runtime can. It changes when
    # jobs end, never how; a runtime with a scheduler of its own may ignore it.
    urgent: bool = False
    detection: Detection = Detection()


@dataclasses.dataclass(frozen=True)
class Scores:
    """Measurements of a finished window; None where the runtime cannot tell."""

    avg_logprob: float | None  # mean over the sampled tokens, end of text included
    no_speech_prob: float | None  # at start-of-transcript
    language: int | None  # token id that replaced DETECT_LANGUAGE, or by `switch` the named one
    language_prob: float | None
    encode_s: float
    decode_s: float
    # Monotonic times at which these began; None where the runtime cannot tell.
    began_s: tuple[float, float] | None = None
    # The likeliest language of a window whose prompt names one, a token id, and its probability.
    # None where the window was decoded in both.
    heard: tuple[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one job. Exactly one event per submitted job has `finished` set."""

    job_id: int
    tokens: tuple[int, ...] = ()  # sampled since the job's last event; no prompt, no end of text
    finished: FinishReason | None = None
    scores: Scores | None = None  # with `finished` "eot", "length" or "loop"
    error: EarshotError | None = None  # with `finished` "error"
    # with `finished` "eot", "length" or "loop", if the job asked for it and there is any text
    alignment: Alignment | None = None
    # Monotonic time at which its window, with its slot, began to be encoded, told once.
    began_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Gauges:
    """A runtime's gauges and counters since it started."""

    queued: int  # jobs submitted, not yet encoded
    busy_slots: int
    steps: int  # decoder steps run
    step_slots: int  # busy slots summed over those steps; / steps = mean batch size
    tokens: int  # tokens sampled
    windows: int  # windows encoded
    encode_s: float
    decode_s: float
    drafted: int = 0  # tokens guessed by the engine's second decoder
    drafted_right: int = 0  # of these, that saved a step


class Runtime(Protocol):
    """Executes windows. Not thread-safe: one thread makes every call."""

    @property
    def capabilities(self) -> Capabilities:
        """The options that this runtime honours."""
        ...

    def submit(self, job: Job) -> None:
        """Take one job; return at once.

        Raises:
            OptionError: the prompt leaves no room in the context; max_tokens beyond that room
                only ends the job at the context's end.
        """
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Advance the work, or wait for news at most `timeout_s`; return what happened.

        With nothing submitted it returns an empty list at once.

        Raises:
            DeviceError: the device failed; every unfinished job is lost.
        """
        ...

    def cancel(self, job_id: int) -> None:
        """End a job; it gets a last event with "cancelled". Unknown or ended ids do nothing."""
        ...

    def gauges(self) -> Gauges:
        """Return gauges and counters.

        Raises:
            DeviceError: the device failed; every unfinished job is lost.
        """
        ...

    def close(self) -> None:
        """Release the device. Unfinished jobs get no further events."""
        ...
