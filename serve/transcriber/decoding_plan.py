"""Check a request, and turn it into a plan for decoding it."""

import base64
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from serve.contract.codec import from_table
from serve.contract.config import OPTIONS, TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import AudioError, AudioLimitError, ConfigError, OptionError, shown
from serve.contract.fields import ShortEncoder
from serve.contract.manifest import Confidence, Manifest
from serve.contract.messages import SPEECH_OPTIONS, AudioFile, Request, SearchOptions, SpeechOptions
from serve.contract.options import Switch, as_switch, checked
from serve.runtime.protocol import Capabilities, DecodingOptions, Detection
from serve.speech.languages import CLOSE_LANGUAGES, Script, named_language, script_of
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Interval
from serve.transcriber.prompts import PromptTexts, checked_phrases, phrases_of, texts_of, trie_of

T = TypeVar("T", SearchOptions, SpeechOptions)

MIB = 1 << 20
MAX_AUDIO_MB = 768  # maximum MiB of a file or of samples, as sent
MAX_TIMES = 2048
MAX_SPEAKERS = 100
MAX_KNOWN_SPEAKERS = 16
# A window is decoded in the likeliest languages until their probabilities add up to
# LANGUAGE_CERTAINTY. The most likely text is kept.
LANGUAGE_CERTAINTY = 0.85
MAX_TRIED_LANGUAGES = 2
# If one language was detected for all windows, a later window with at least this probability of
# another language is decoded in that language, too. The more likely text is kept.
SWITCH_PROBABILITY = 0.5

_TRACK = re.compile(r"[1-9][0-9]{0,3}|[^\W\d][\w -]{0,30}", re.ASCII)
_SPEECH = SpeechOptions()
_COUNTS = ("num_speakers", "min_speakers", "max_speakers")
_TEXTS = ("prompt", "hotwords", "prefix")
_EXCLUSIVE = (
    *(("multilingual", "language"), ("languages", "language")),
    *(("voice", "vad"), ("voice", "clip_timestamps")),
    *(("channels", "diarize"), ("channels", "voice")),
)
"""Pairs of options of which a request may set one."""
_NEEDS = {
    **dict.fromkeys((*_COUNTS, "known_speaker_names"), "diarize"),
    "low_confidence": "word_timestamps",
}
"""Options that need another one to be true."""
_NEED_WORDS = ("word_timestamps", "token_logprobs", "diarize", "hallucination_silence_threshold")


@dataclasses.dataclass(frozen=True)
class Speakers:
    """The facts that a client states about a recording's speakers."""

    min_count: int = 1
    max_count: int | None = None  # None: no limit
    known: tuple[tuple[str, bytes], ...] = ()  # name and reference audio file of each known speaker


@dataclasses.dataclass(frozen=True)
class DecodingPlan:
    """The decoding plan of a request's windows."""

    # The end of every window's prompt, from start-of-transcript on; DETECT_LANGUAGE stands for a
    # language to detect.
    start: tuple[int, ...]
    language: str | None  # code; None: to be detected
    options: DecodingOptions
    # The request without its audio, for options that need no conversion.
    request: Request = dataclasses.field(default=Request(b""), compare=False)
    words: bool = False  # time words
    returns_words: bool = False  # return words
    confidence: Confidence | None = None  # calibration of word confidence; None: no confidence
    vad: Switch = "off"  # whether to skip audio without speech
    speech: SpeechOptions = _SPEECH  # VAD thresholds
    short_encoder: ShortEncoder = "off"  # see `TranscriberConfig.short_encoder`
    voice: tuple[Interval, ...] = ()  # the client's speech intervals; (): run VAD
    texts: PromptTexts = dataclasses.field(default_factory=PromptTexts)  # see `with_texts`
    detection: Detection = dataclasses.field(default_factory=Detection)  # language detection
    intervals: tuple[Interval, ...] = ()  # decode only these intervals; (): the whole audio
    repetitive: float = math.inf  # compression ratio above which a window is decoded again
    speakers: Speakers | None = None  # diarization; None: off
    channels: bool = False  # each audio channel is one speaker
    script: Script | None = None  # Chinese script; None: the prevailing one of the first text

    @property
    def returns_speakers(self) -> bool:
        """Whether segments have speakers; they then become final only with the last one."""
        return self.channels or self.speakers is not None


def audio_bytes(request: Request) -> int:
    """Count the bytes of a request's audio as sent."""
    if isinstance(request.audio, bytes | AudioFile):
        return len(request.audio)
    return request.audio.nbytes


def check_config(
    config: TranscriberConfig, capabilities: Capabilities, tokenizer: Tokenizer
) -> None:
    """Check the configuration for contradictions, and against the runtime's capabilities.

    Raises:
        ConfigError: keys contradict each other, or the engine or the runtime cannot honor one.
    """
    if not capabilities.sampling and any(t > 0 for t in config.temperatures):
        raise ConfigError(
            f"transcriber.temperatures = {list(config.temperatures)}, but the runtime "
            f"{capabilities.runtime} cannot sample; expected [0.0]"
        )
    for refusal in (
        capabilities.refusal(_search(config, capabilities)),
        _refusal_of_languages(config.languages, tokenizer, capabilities),
        _refusal_of_phrases(config.phrases, capabilities),
    ):
        if refusal is not None:
            raise ConfigError(f"transcriber.{refusal}")
    try:
        tokenizer.language_ids(config.languages)
    except OptionError as error:
        raise ConfigError(f"transcriber.languages: {error}") from error
    try:
        trie_of(checked_phrases(config.phrases), tokenizer)
    except OptionError as error:
        raise ConfigError(f"transcriber.{error}") from error


def plan_request(
    request: Request,
    tokenizer: Tokenizer,
    capabilities: Capabilities,
    config: TranscriberConfig,
    manifest: Manifest,
) -> DecodingPlan:
    """Check a request's options and turn them into a plan; `with_texts` adds its texts later.

    Args:
        request: the request.
        tokenizer: the engine's tokenizer.
        capabilities: the runtime's capabilities.
        config: limits and defaults.
        manifest: the engine's manifest, for its sizes and its confidence calibration.

    Raises:
        OptionError: an option is out of bounds, unknown, or not supported by the runtime.
        AudioError: the audio is neither bytes nor an array, or too large.
    """
    _check_types(request)
    request = dataclasses.replace(
        request,
        language=named_language(request.language),
        vad=None if request.vad is None else as_switch("vad", request.vad),
        audio_track=request.audio_track.strip() if request.audio_track else None,
    )
    _check_audio(request)
    start = tokenizer.prompt_ids(request.language, request.task, request.timestamps)
    search = _from_request(request, _search(config, capabilities))
    vad = _vad(request, config)
    for refusal in (
        *_out_of_bounds(request, config, tokenizer, manifest.dims.n_text_ctx),
        *_contradictions(request, vad, config, manifest),
        *_unsupported(request, start, tokenizer, capabilities),
        capabilities.refusal(search),
        _refusal_of_phrases(phrases_of(request, config), capabilities),
    ):
        if refusal is not None:
            raise OptionError(refusal)
    needs_words = any(getattr(request, name) for name in _NEED_WORDS)
    return DecodingPlan(
        start=start,
        language=_language(start, tokenizer),
        options=DecodingOptions(
            timestamps=request.timestamps,
            temperature=float(
                config.temperatures[0] if request.temperature is None else request.temperature
            ),
            **vars(search),
        ),
        request=dataclasses.replace(request, audio=b"", known_speaker_references=()),
        words=capabilities.words and (needs_words or request.try_word_timestamps),
        returns_words=request.word_timestamps
        or (request.try_word_timestamps and capabilities.words),
        # The calibration was fitted to transcripts, and does not hold for translations.
        confidence=manifest.confidence if request.task == "transcribe" else None,
        vad=vad,
        intervals=_intervals("clip_timestamps", request.clip_timestamps),
        voice=_intervals("voice", request.voice),
        speech=_from_request(request, _SPEECH),
        short_encoder=_short_encoder(request, capabilities, config),
        detection=_detection(request, tokenizer, config),
        repetitive=config.compression_ratio_threshold,
        speakers=_speakers(request),
        channels=request.channels == "split",
        script=_script(request, config),
    )


def with_texts(
    plan: DecodingPlan, tokenizer: Tokenizer, config: TranscriberConfig, n_text_ctx: int
) -> DecodingPlan:
    """Tokenize a request's texts and add them to its plan.

    `plan_request` does not add them, because it must not wait for the tokenizer. In sequential mode
    each window has a prompt of another length. `max_tokens` may then exceed the room for tokens.

    Args:
        plan: the result of `plan_request`.
        tokenizer: the engine's tokenizer.
        config: limits and defaults.
        n_text_ctx: the decoder's number of positions.

    Raises:
        OptionError: a text holds special tokens or is too long, or the texts leave too little room
            for `max_tokens`.
    """
    request, texts = plan.request, texts_of(plan.request, tokenizer, config)
    room = n_text_ctx - len(texts.prompt(plan.start, texts.before, texts.prefix))
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(config.max_tokens, room)
    elif max_tokens > room and request.mode == "parallel":
        raise OptionError(f"max_tokens = {max_tokens}, but the prompt leaves room for {room}")
    options = dataclasses.replace(plan.options, max_tokens=max_tokens, phrases=texts.phrases)
    return dataclasses.replace(plan, texts=texts, options=options)


def _check_types(request: Request) -> None:
    for name, option in OPTIONS.items():
        value = getattr(request, name)
        if value is option.default:
            continue
        checked(option, value)
        if option.choices and name != "vad" and value not in option.choices:
            raise OptionError(f"{name} = {shown(value)}; expected {' or '.join(option.choices)}")


def _check_audio(request: Request) -> None:
    """Check the type and size of a request's audio before it is decoded."""
    is_file = isinstance(request.audio, bytes | AudioFile)
    if not is_file and not isinstance(request.audio, np.ndarray):
        kind = type(request.audio).__name__
        raise AudioError(f"audio is {kind}; expected a file's bytes or an array of samples")
    if is_file != (request.sample_rate is None):
        raise OptionError(
            f"sample_rate = {request.sample_rate}; expected the rate in Hz of raw samples, and "
            "none for an audio file"
        )
    if audio_bytes(request) > MAX_AUDIO_MB * MIB:
        raise AudioLimitError(
            f"audio has {audio_bytes(request) / MIB:.1f} MiB; expected at most {MAX_AUDIO_MB}: "
            "send it in parts, compressed or at a lower sample rate"
        )
    for name in ("audio_track", "channels"):
        if not is_file and _is_set(request, name):
            raise OptionError(
                f"{_setting(request, name)}, but raw samples have one channel; leave it out, or "
                "send a file"
            )


def _is_set(request: Request, name: str) -> bool:
    """Return whether an option is neither its default, nor empty, nor off."""
    value = getattr(request, name)
    return value != OPTIONS[name].default and value not in ([], "off")


def _setting(request: Request, name: str) -> str:
    """Return an option and its value for an error message, such as "diarize = true"."""
    value = getattr(request, name)
    return f"{name} = {str(value).lower() if isinstance(value, bool) else shown(value)}"


def _contradictions(
    request: Request, vad: Switch, config: TranscriberConfig, manifest: Manifest
) -> Iterator[str]:
    """Yield a message for each option that contradicts another, the engine or the configuration."""
    for name, alternative in _EXCLUSIVE:
        if _is_set(request, name) and _is_set(request, alternative):
            yield (
                f"{_setting(request, name)} with {_setting(request, alternative)}; expected one of "
                "them"
            )
    for name, needed in _NEEDS.items():
        if _is_set(request, name) and not getattr(request, needed):
            yield f"{_setting(request, name)} needs {needed} = true"
    yield from (
        f"{_setting(request, name)}, but VAD is off; expected vad = true"
        for name in SPEECH_OPTIONS
        if vad == "off" and getattr(request, name) is not None
    )
    if request.task == "translate" and not config.translate:
        yield (
            "task = 'translate', but this server's engine was not trained to translate "
            "(transcriber.translate = false); expected task = 'transcribe', or use another server"
        )
    for name in ("diarize", "low_confidence"):
        if request.task == "translate" and _is_set(request, name):
            yield (
                f"{_setting(request, name)}, but a translation's words are in another order than "
                "the speech; expected task = transcribe"
            )
    if _is_set(request, "low_confidence") and manifest.confidence is None:
        yield (
            f"{_setting(request, 'low_confidence')}, but the engine has no confidence calibration; "
            "rebuild it with build.confidence, which `python -m eval trust` fits"
        )


def _out_of_bounds(
    request: Request, config: TranscriberConfig, tokenizer: Tokenizer, n_text_ctx: int
) -> Iterator[str]:
    """Yield a message for each option that is out of bounds."""
    bounds: dict[str, tuple[float, float]] = {
        **dict.fromkeys(("temperature", "low_confidence"), (0, 1)),
        **dict.fromkeys(_COUNTS, (1, MAX_SPEAKERS)),
        "hallucination_silence_threshold": (0, math.inf),
        "max_tokens": (1, config.max_tokens),
    }
    for name, (low, high) in bounds.items():
        value = getattr(request, name)
        if value is not None and not (low <= value <= high and value < math.inf):  # or NaN
            yield f"{name} = {shown(value)}; expected a number from {low} to {high}"
    count, max_count = request.num_speakers, request.max_speakers or math.inf
    min_count = request.min_speakers or 1
    if not min_count <= (count or min_count) <= (count or max_count) <= max_count:
        counts = (_setting(request, name) for name in _COUNTS if _is_set(request, name))
        yield f"{', '.join(counts)}; expected min_speakers <= num_speakers <= max_speakers"
    if len(request.draft) > n_text_ctx or not all(
        0 <= t < tokenizer.n_vocab for t in request.draft
    ):
        yield (
            f"draft = {shown(request.draft)}; expected at most {n_text_ctx} token ids below "
            f"{tokenizer.n_vocab}, from an answer of this engine"
        )
    if request.audio_track is not None and not _TRACK.fullmatch(request.audio_track):
        yield (
            f"{_setting(request, 'audio_track')}; expected a track number from 1 on, or a language "
            "such as es, spa or Spanish"
        )


def _unsupported(
    request: Request, start: tuple[int, ...], tokenizer: Tokenizer, capabilities: Capabilities
) -> Iterator[str | None]:
    """Yield a message for each option that the engine or the runtime does not support."""
    runtime = f"the runtime {capabilities.runtime}"
    if request.temperature and not capabilities.sampling:
        yield f"temperature = {request.temperature}, but {runtime} cannot sample; expected 0"
    if request.timestamps and not capabilities.timestamps:
        yield f"timestamps = true, but {runtime} has no timestamps; ask for timestamps = false"
    if request.short_encoder and not capabilities.short_windows:
        yield (
            f"short_encoder = true, but {runtime} on {capabilities.device} encodes whole windows; "
            "ask for short_encoder = false"
        )
    texts = [name for name in _TEXTS if getattr(request, name).strip()]
    if not capabilities.previous_text and (texts or request.mode == "sequential"):
        found = f"{texts[0]} is given" if texts else "mode = sequential"
        yield f"{found}, but {runtime} accepts no text in prompts; leave it out"
    if request.multilingual and not tokenizer.facts.multilingual:
        yield "multilingual = true, but this engine is English-only; leave it out"
    if not capabilities.detect_language and (request.multilingual or DETECT_LANGUAGE in start):
        yield f"language is not given, but {runtime} cannot detect languages; name the language"
    yield _refusal_of_languages(request.languages, tokenizer, capabilities)
    needs_words = [name for name in _NEED_WORDS if getattr(request, name)]
    if needs_words and not capabilities.words:
        reason = f"{runtime} cannot time words; serve an engine of the native runtime"
        if not tokenizer.facts.alignment_heads:
            reason = (
                "the engine has no alignment heads; rebuild it with `make build-engine`, which "
                "measures them"
            )
        setting = _setting(request, needs_words[0])
        yield f"{setting} needs words' times, but {reason}; or leave it out"


def _refusal_of_languages(
    languages: Sequence[str], tokenizer: Tokenizer, capabilities: Capabilities
) -> str | None:
    """Return why language detection cannot be limited to some languages; None if it can."""
    if not languages or (tokenizer.facts.multilingual and capabilities.languages):
        return None
    reason = f"the runtime {capabilities.runtime} cannot limit its language detection"
    if not tokenizer.facts.multilingual:
        reason = "this engine is English-only"
    return f"languages = {shown(list(languages))}, but {reason}; leave it out"


def _refusal_of_phrases(phrases: Sequence[str], capabilities: Capabilities) -> str | None:
    """Return why a runtime cannot boost the phrases; None if it can."""
    if phrases and not capabilities.phrases:
        return f"phrases is given, but the runtime {capabilities.runtime} cannot boost phrases"
    return None


def _vad(request: Request, config: TranscriberConfig) -> Switch:
    if request.vad is not None:
        return as_switch("vad", request.vad)
    # The client has chosen the parts to decode.
    client_intervals = request.voice or (request.clip_timestamps and config.vad == "auto")
    return "off" if client_intervals else config.vad


def _short_encoder(
    request: Request, capabilities: Capabilities, config: TranscriberConfig
) -> ShortEncoder:
    """Return the `short_encoder` mode; "auto" was measured, and applies, only to transcripts."""
    if request.short_encoder is not None:
        return "on" if request.short_encoder else "off"
    needs_full_windows = not capabilities.short_windows or request.task != "transcribe"
    return "off" if needs_full_windows and config.short_encoder == "auto" else config.short_encoder


def _from_request(request: Request, defaults: T) -> T:
    """Return `defaults` with the request's options of the same names."""
    options = vars(defaults)
    overrides = {name: value for name in options if (value := getattr(request, name)) is not None}
    if not overrides:
        return defaults
    return from_table(type(defaults), options | overrides, "the request", error=OptionError)


def _search(config: TranscriberConfig, capabilities: Capabilities) -> SearchOptions:
    """Return the default search options."""
    best_of = 1 if capabilities.beam_sizes else config.beam_size
    return SearchOptions(beam_size=config.beam_size, best_of=best_of)


def _detection(request: Request, tokenizer: Tokenizer, config: TranscriberConfig) -> Detection:
    """Return the options of language detection; those without detection if a language is named."""
    if request.language is not None:
        return Detection()
    languages = tokenizer.language_ids(request.languages or config.languages)
    detection = Detection(languages, LANGUAGE_CERTAINTY, MAX_TRIED_LANGUAGES)
    if request.multilingual:  # each window detects its own language
        return detection
    known = tokenizer.facts.languages
    close = tuple(
        frozenset(known[code] for code in codes if code in known) for codes in CLOSE_LANGUAGES
    )
    return dataclasses.replace(detection, switch=SWITCH_PROBABILITY, close_languages=close)


def _language(start: tuple[int, ...], tokenizer: Tokenizer) -> str | None:
    """Return the code of the language that a prompt names; None if it must be detected."""
    if DETECT_LANGUAGE in start:
        return None
    return tokenizer.language_code(start[1]) if tokenizer.facts.multilingual else "en"


def _script(request: Request, config: TranscriberConfig) -> Script | None:
    """Return the first Chinese script that the request's language tags name."""
    tags = (request.language,) if request.language else request.languages or config.languages
    return next((script for tag in tags if (script := script_of(tag))), None)


def _intervals(name: str, times: Sequence[float]) -> tuple[Interval, ...]:
    """Return the intervals of audio that an option names.

    Args:
        name: the option's name.
        times: start, end, start, … in seconds; a missing last end means the end of the audio.

    Raises:
        OptionError: the times do not increase, or are too many.
    """
    if len(times) > MAX_TIMES:
        raise OptionError(
            f"{name} has {len(times)} numbers; expected at most {MAX_TIMES}: send the audio in "
            "parts"
        )
    ends = [*times[1::2], math.inf]  # one too many if the last end is given
    intervals = tuple((float(s), float(e)) for s, e in zip(times[::2], ends, strict=False))
    previous_end_s = 0.0
    for start_s, end_s in intervals:
        if not previous_end_s <= start_s < end_s:  # also false for NaN
            raise OptionError(
                f"{name} has {start_s:g} to {end_s:g} s after {previous_end_s:g} s; expected "
                "start, end, start, end, … in seconds, each end after its start and each start "
                "no earlier than the end before it"
            )
        previous_end_s = end_s
    return intervals


def _speakers(request: Request) -> Speakers | None:
    """Return the diarization options of a request; None if it does not ask for diarization.

    Raises:
        OptionError: the known speakers are too many, names are empty or repeated, there is not one
            reference for each, or a reference is not a data URL.
    """
    names, references = request.known_speaker_names, request.known_speaker_references
    if len(names) != len(references) or len(names) > MAX_KNOWN_SPEAKERS:
        raise OptionError(
            f"known_speaker_names has {len(names)} and known_speaker_references {len(references)}; "
            f"expected the same number of both, at most {MAX_KNOWN_SPEAKERS}"
        )
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise OptionError(f"known_speaker_names = {shown(list(names))}; expected distinct names")
    known = tuple(zip(names, map(_reference_file, references), strict=True))
    if not request.diarize:
        return None
    count = request.num_speakers
    return Speakers(count or request.min_speakers or 1, count or request.max_speakers, known)


def _reference_file(url: str) -> bytes:
    """Read a reference recording from a data URL (RFC 2397)."""
    head, comma, data = url.partition(",")
    try:
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return base64.b64decode(data, validate=True)
    except ValueError:
        pass  # the error is raised below
    raise OptionError(
        f"known_speaker_references has {shown(url)}; expected data URLs in base64, such as "
        "data:audio/wav;base64,UklGR…"
    )
