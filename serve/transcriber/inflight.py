"""One accepted request: how it is decoded, which windows it waits for, what it has so far.

Plain state without threads or a runtime; `serve.transcriber.loop` drives it.

The windows of a request decode at the same time, with one exception: where the language has to be
found, the first window goes alone, and the others follow with the language that was found in it.
A window of silence says nothing about the language, so then the next one goes alone as well.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

from serve.config import TranscriberConfig
from serve.engine import DETECT_LANGUAGE
from serve.errors import AudioError, OptionError
from serve.messages import Request, Segment, Timings, TranscriberEvent, Transcript
from serve.runtime.protocol import Capabilities, DecodingOptions, Scores
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import (
    Attempt,
    Decoded,
    Window,
    compression_ratio,
    join_text,
    judge,
    split_segments,
    stitch,
)

_SEEDS_PER_WINDOW = 1000


@dataclasses.dataclass(frozen=True)
class Plan:
    """How every window of a request is decoded."""

    prompt: tuple[int, ...]  # holds DETECT_LANGUAGE where the language must be found
    language: str | None  # code; None where it must be found
    options: DecodingOptions
    fixed_temperature: bool  # the client chose the temperature: no fallback


def plan_request(
    request: Request,
    tokenizer: Tokenizer,
    capabilities: Capabilities,
    config: TranscriberConfig,
    n_text_ctx: int,
) -> Plan:
    """Check a request's options and turn them into a plan; the audio is decoded later.

    Raises:
        OptionError: an option is out of bounds, unknown, or not honoured by the runtime.
        AudioError: the audio is neither bytes nor an array.
    """
    _check_audio(request)
    temperature = _temperature(request, capabilities, config)
    if request.timestamps and not capabilities.timestamps:
        raise OptionError(
            f"timestamps = true, but the runtime {capabilities.runtime} cannot give them; "
            "ask for timestamps = false"
        )
    if request.prompt.strip() and not capabilities.previous_text:
        raise OptionError(
            f"prompt is given, but the runtime {capabilities.runtime} cannot begin with text; "
            "leave it out"
        )
    prompt = tokenizer.prompt_ids(
        request.language, request.task, request.timestamps, request.prompt
    )
    if DETECT_LANGUAGE in prompt and not capabilities.detect_language:
        raise OptionError(
            f"language is not given, and the runtime {capabilities.runtime} cannot detect it; "
            "name the language"
        )
    options = DecodingOptions(
        timestamps=request.timestamps,
        temperature=temperature,
        max_tokens=_max_tokens(request, config, n_text_ctx - len(prompt)),
    )
    return Plan(prompt, _language(prompt, tokenizer), options, request.temperature is not None)


def _check_audio(request: Request) -> None:
    if isinstance(request.audio, bytes):
        if request.sample_rate is not None:
            raise OptionError(
                f"sample_rate = {request.sample_rate} came with a file's bytes, which state "
                "their own; leave it out, or send samples"
            )
    elif not isinstance(request.audio, np.ndarray):
        found = type(request.audio).__name__
        raise AudioError(f"audio is {found}; expected a file's bytes or an array of samples")
    elif request.sample_rate is None:
        raise OptionError("samples came without sample_rate; expected it in Hz")


def _temperature(request: Request, capabilities: Capabilities, config: TranscriberConfig) -> float:
    wanted = request.temperature
    if wanted is None:
        return config.temperatures[0]
    if not _is_number(wanted) or not 0.0 <= wanted <= 1.0:
        raise OptionError(f"temperature = {wanted!r}; expected a number from 0 to 1")
    if wanted > 0 and not capabilities.sampling:
        raise OptionError(
            f"temperature = {wanted}, but the runtime {capabilities.runtime} decodes greedily; "
            "expected 0"
        )
    return float(wanted)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _max_tokens(request: Request, config: TranscriberConfig, room: int) -> int:
    """New tokens for each window; `room` is what the prompt leaves of the context."""
    wanted = request.max_tokens
    if wanted is None:
        return min(config.max_tokens, room)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise OptionError(f"max_tokens = {wanted!r}; expected a whole number of at least 1")
    if wanted > config.max_tokens:
        raise OptionError(f"max_tokens = {wanted}; expected at most {config.max_tokens}")
    if wanted > room:
        raise OptionError(f"max_tokens = {wanted}, but the prompt leaves room for {room}")
    return wanted


def _language(prompt: tuple[int, ...], tokenizer: Tokenizer) -> str | None:
    """Code of the language that a prompt names, however the client wrote it."""
    if DETECT_LANGUAGE in prompt:
        return None
    if not tokenizer.facts.multilingual:
        return "en"
    return tokenizer.language_code(prompt[prompt.index(tokenizer.facts.sot) + 1])


class InFlight:
    """The state of one accepted request.

    Args:
        id: unique in the transcriber.
        plan: how to decode its windows.
        on_event: where news of it goes.
        accepted_s: monotonic time at which it was accepted.
        deadline_s: monotonic time at which it has taken too long.
    """

    def __init__(
        self,
        id: int,
        plan: Plan,
        on_event: Callable[[TranscriberEvent], None],
        accepted_s: float,
        deadline_s: float,
    ) -> None:
        self.id = id
        self.plan = plan
        self.on_event = on_event
        self.accepted_s = accepted_s
        self.deadline_s = deadline_s
        self.ended = False  # got its terminal event
        self.started_s: float | None = None  # monotonic time of the first job
        self.duration_s = 0.0
        self.segments: list[Segment] = []
        self._prompt = plan.prompt
        self._language = plan.language
        self._language_prob: float | None = None
        self._windows: list[Window] = []
        self._next = 0  # first window not handed out
        self._decoded: dict[int, Decoded] = {}
        self._stitched = 0  # windows whose segments are in `segments`
        self._encode_s = 0.0
        self._decode_s = 0.0

    @property
    def prompt(self) -> tuple[int, ...]:
        """Prompt ids of the next job; names the language once it has been found."""
        return self._prompt

    @property
    def ready(self) -> bool:
        """Whether a window can be handed out now."""
        if self._next >= len(self._windows):
            return False
        alone = DETECT_LANGUAGE in self._prompt
        return not alone or self._next == len(self._decoded)

    @property
    def complete(self) -> bool:
        """Whether every window is decoded and stitched."""
        return bool(self._windows) and self._stitched == len(self._windows)

    def set_windows(self, windows: list[Window]) -> None:
        """Take the decoded audio, cut into windows."""
        self._windows = windows
        self.duration_s = sum(window.duration_s for window in windows)

    def take_window(self) -> tuple[int, Window]:
        """Hand out the next window with its index; `ready` must hold."""
        assert self.ready, f"request {self.id} has no window to hand out"
        index = self._next
        self._next += 1
        return index, self._windows[index]

    def started(self) -> None:
        """A window of it is in the runtime."""
        if self.started_s is None:
            self.started_s = time.monotonic()

    def options(self, index: int, temperature: float) -> DecodingOptions:
        """How a window is decoded at a temperature.

        The seed depends on the window and the temperature alone, so the same request gets the same
        answer whenever and beside whatever it is sent.
        """
        seed = index * _SEEDS_PER_WINDOW + round(temperature * (_SEEDS_PER_WINDOW - 1))
        return dataclasses.replace(self.plan.options, temperature=temperature, seed=seed)

    def absorb(
        self,
        index: int,
        temperature: float,
        tokens: tuple[int, ...],
        scores: Scores,
        tokenizer: Tokenizer,
        config: TranscriberConfig,
    ) -> float | None:
        """Judge what a window's job sampled.

        Returns the temperature to decode the window at once more, or None: the window is done.
        """
        self._encode_s += scores.encode_s
        self._decode_s += scores.decode_s
        attempt = Attempt(
            tokens=tokens,
            avg_logprob=scores.avg_logprob,
            no_speech_prob=scores.no_speech_prob,
            temperature=temperature,
            compression_ratio=compression_ratio(tokenizer.decode(tokens)),
        )
        verdict = judge(attempt, config, self.plan.fixed_temperature)
        if DETECT_LANGUAGE in self._prompt:
            self._learn_language(scores, tokenizer, silence=verdict.outcome == "silence")
        if verdict.outcome == "retry":
            return verdict.temperature
        window = self._windows[index]
        silent = verdict.outcome == "silence"
        pieces = [] if silent else split_segments(tokens, tokenizer.facts, window.duration_s)
        self._decoded[index] = Decoded(window.start_s, window.duration_s, attempt, tuple(pieces))
        return None

    def _learn_language(self, scores: Scores, tokenizer: Tokenizer, silence: bool) -> None:
        token = scores.language
        assert token is not None, "the runtime was asked for the language and named none"
        self._language = tokenizer.language_code(token)
        self._language_prob = scores.language_prob
        if not silence:
            self._prompt = tuple(token if id == DETECT_LANGUAGE else id for id in self._prompt)

    def stitch_ready(self, tokenizer: Tokenizer) -> list[Segment]:
        """Segments that became final: of windows that are done and so are all before them."""
        fresh: list[Segment] = []
        while (window := self._decoded.get(self._stitched)) is not None:
            fresh += stitch([window], tokenizer.decode)
            self._stitched += 1
        self.segments += fresh
        return fresh

    def transcript(self) -> Transcript:
        """The whole answer; `complete` must hold."""
        assert self.complete and self.started_s is not None and self._language is not None
        timings = Timings(
            queue_s=self.started_s - self.accepted_s,
            encode_s=self._encode_s,
            decode_s=self._decode_s,
            total_s=time.monotonic() - self.accepted_s,
        )
        return Transcript(
            text=join_text(self.segments),
            language=self._language,
            language_prob=self._language_prob,
            duration=self.duration_s,
            segments=tuple(self.segments),
            timings=timings,
        )
