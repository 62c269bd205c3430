"""Check a request's diarization options: speakers per channel, or by voice.

Check a request's options, and turn them into a plan for decoding it.
"""

import base64
import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar, get_args

from serve.contract.codec import from_table
from serve.contract.config import OPTIONS, TranscriberConfig
from serve.contract.engine import DETECT_LANGUAGE
from serve.contract.errors import ConfigError, OptionError, shown
from serve.contract.fields import ShortEncoder
from serve.contract.manifest import Confidence, Manifest
from serve.contract.messages import (
    SPEECH_OPTIONS,
    AudioFile,
    Channels,
    Mode,
    Request,
    SearchOptions,
    SpeechOptions,
)
from serve.contract.options import Switch, as_switch
from serve.runtime.protocol import Capabilities, DecodingOptions, Detection
from serve.speech.languages import Script, named_language, script_of
from serve.speech.tokenizer import Tokenizer
from serve.speech.windows import Stretch
from serve.transcriber.audio import audio_track_of, check_audio, is_number, stretches_of
from serve.transcriber.languages import check_languages, detection_of
from serve.transcriber.prompts import (
    NO_TEXTS,
    PromptTexts,
    check_phrases,
    mode_of,
    no_texts,
    phrases_of,
    refusal_of_phrases,
    refusal_of_text,
)

MOST_SPEAKERS = 100
MOST_KNOWN = 16
_COUNTS = ("num_speakers", "min_speakers", "max_speakers")
_TOLD = "diarize = true"


@dataclasses.dataclass(frozen=True)
class Speakers:
    """The facts that a client states about a recording's speakers."""

    num: int | None = None  # the exact number of speakers
    least: int | None = None
    most: int | None = None
    known: tuple[tuple[str, bytes], ...] = ()  # name and reference audio file of each

    @property
    def names(self) -> tuple[str, ...]:
        """The known speakers' names."""
        return tuple(name for name, _ in self.known)


def speakers_of(request: Request) -> Speakers | None:
    """Read the diarization options of a request; None if it does not ask for diarization.

    Raises:
        OptionError: options contradict each other, or a name or a reference is invalid.
    """
    known = _known_speakers(request.known_speaker_names, request.known_speaker_references)
    counts = {name: getattr(request, name) for name in _COUNTS}
    for name, count in counts.items():
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_SPEAKERS):
            raise OptionError(f"{name} = {shown(count)}; expected 1 to {MOST_SPEAKERS}")
        if count is not None and not request.diarize:
            raise OptionError(f"{name} = {count} needs {_TOLD}")
    if not request.diarize:
        if known:
            raise OptionError(f"known_speaker_names needs {_TOLD}")
        return None
    if request.task == "translate":
        raise OptionError(
            "diarize = true, but a translation's words are in another order than the speech; "
            "expected task = transcribe"
        )
    num, least, most = counts.values()
    low, high = num or least or 1, num or most or MOST_SPEAKERS
    if not (least or 1) <= low <= high <= (most or MOST_SPEAKERS):
        given = ", ".join(f"{name} = {count}" for name, count in counts.items() if count)
        raise OptionError(f"{given}; expected min_speakers <= num_speakers <= max_speakers")
    return Speakers(num, least, most, known)


def has_channels(request: Request) -> bool:
    """Return whether a request asks for one speaker per audio channel.

    Raises:
        OptionError: `channels` is unknown, raw samples came, or `diarize` or `voice` is set too.
    """
    if request.channels not in get_args(Channels):
        expected = " or ".join(get_args(Channels))
        raise OptionError(f"channels = {shown(request.channels)}; expected {expected}")
    if request.channels == "mix":
        return False
    if not isinstance(request.audio, bytes | AudioFile):
        raise OptionError("channels = split, but raw samples have one channel; send a file")
    if request.diarize or request.voice:
        other = "diarize" if request.diarize else "voice"
        raise OptionError(f"channels = split came with {other}; expected one of them")
    return True


def _known_speakers(
    names: Sequence[str], references: Sequence[str]
) -> tuple[tuple[str, bytes], ...]:
    """Read the known speakers' names and reference files; these come as data URLs (RFC 2397).

    Raises:
        OptionError: there are too many, the two lists differ in length, names are empty or
            repeated, or a reference is not a data URL.
    """
    if len(names) != len(references) or len(names) > MOST_KNOWN:
        raise OptionError(
            f"known_speaker_names has {len(names)} and known_speaker_references {len(references)}; "
            f"expected the same number of both, at most {MOST_KNOWN}"
        )
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise OptionError(f"known_speaker_names = {shown(list(names))}; expected distinct names")
    return tuple(zip(names, map(_file_of, references), strict=True))


def _file_of(url: str) -> bytes:
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


T = TypeVar("T", SearchOptions, SpeechOptions)

_SPEECH = SpeechOptions()


def words_of(
    request: Request, silence_s: float, tokenizer: Tokenizer, capabilities: Capabilities
) -> bool:
    """Return whether to time words, for the client or for an option that needs them.

    Raises:
        OptionError: words are needed, but the engine or the runtime cannot time them.
    """
    tried = request.try_word_timestamps
    needed = request.word_timestamps or request.token_logprobs or silence_s or request.diarize
    if capabilities.words:
        return bool(needed or tried)
    if not needed:
        return False
    if request.word_timestamps:
        what, without = "word_timestamps = true", "word_timestamps = false"
    elif request.token_logprobs:
        what, without = "token_logprobs = true needs words' times", "token_logprobs = false"
    elif request.diarize:
        what, without = "diarize = true needs words' times", "diarize = false"
    else:
        name = "hallucination_silence_threshold"
        what, without = f"{name} = {silence_s:g} needs words with times", f"{name} = 0"
    if not tokenizer.facts.alignment_heads:
        raise OptionError(
            f"{what}, but the engine has no alignment heads, which word timestamps need; rebuild "
            "it with `make build-engine`, which measures them"
        )
    raise OptionError(
        f"{what}, but the runtime {capabilities.runtime} cannot time words; serve an engine of the "
        f"native runtime, or ask for {without}"
    )


def low_confidence_of(request: Request, confidence: Confidence | None) -> float | None:
    """Return the confidence below which words are marked; None if no words are marked.

    Raises:
        OptionError: the value is not a probability, or the words have no confidence.
    """
    low = request.low_confidence
    if low is None:
        return None
    if not is_number(low) or not 0.0 <= low <= 1.0:
        raise OptionError(f"low_confidence = {shown(low)}; expected a number from 0 to 1")
    if not request.word_timestamps:
        raise OptionError(
            f"low_confidence = {low:g} needs words with times; expected word_timestamps = true"
        )
    if request.task == "translate":
        raise OptionError(
            f"low_confidence = {low:g}, but the words of a translation have no confidence; leave "
            "it out"
        )
    if confidence is None:
        raise OptionError(
            f"low_confidence = {low:g}, but the engine has no confidence calibration; rebuild it "
            "with build.confidence, which `python -m eval trust` fits"
        )
    return float(low)


@dataclasses.dataclass(frozen=True)
class DecodingPlan:
    """The decoding plan of a request's windows."""

    # The end of every window's prompt, from start-of-transcript on; DETECT_LANGUAGE stands for a
    # language to detect.
    start: tuple[int, ...]
    language: str | None  # code; None: to be detected
    options: DecodingOptions
    fixed_temperature: bool  # the client chose the temperature: no fallback
    words: bool = False  # time words
    tells_words: bool = False  # return words
    tells_logprobs: bool = False  # return tokens' log-probabilities, which needs timed words
    confidence: Confidence | None = None  # calibration of word confidence; None: no confidence
    low_confidence: float | None = None  # mark words below this confidence; None: mark none
    hallucination_silence_s: float = 0.0  # silence around dropped segments; 0: drop none
    vad: Switch = "off"  # whether to skip audio without speech
    speech: SpeechOptions = dataclasses.field(default_factory=SpeechOptions)  # VAD thresholds
    draft: tuple[int, ...] = ()  # draft tokens of the first window
    short_encoder: ShortEncoder = "off"  # see `TranscriberConfig.short_encoder`
    unfinished: bool = False  # more audio will follow in another request
    voice: tuple[Stretch, ...] = ()  # the client's speech intervals; (): run VAD
    mode: Mode = "parallel"
    texts: PromptTexts = NO_TEXTS
    multilingual: bool = False  # each window has its own language
    detection: Detection = dataclasses.field(default_factory=Detection)  # language detection
    stretches: tuple[Stretch, ...] = ()  # decode only these intervals; (): the whole audio
    partial: bool = False  # accept truncated audio
    audio_track: str = ""  # number or language; empty: the file's default track
    repetitive: float = math.inf  # compression ratio above which a window is decoded again
    speakers: Speakers | None = None  # diarization; None: off
    channels: bool = False  # each audio channel is one speaker
    script: Script | None = None  # Chinese script; None: the prevailing one of the first text

    @property
    def tells_speakers(self) -> bool:
        """Whether segments have speakers; they then become final only with the last one."""
        return self.channels or self.speakers is not None


def check_config(
    config: TranscriberConfig, capabilities: Capabilities, tokenizer: Tokenizer
) -> None:
    """Check the configuration for contradictions, and against the runtime's capabilities.

    Raises:
        ConfigError: keys contradict each other, or the runtime cannot honor one.
    """
    if not capabilities.sampling and any(t > 0 for t in config.temperatures):
        raise ConfigError(
            f"transcriber.temperatures = {list(config.temperatures)}, but the runtime "
            f"{capabilities.runtime} cannot sample; expected [0.0]"
        )
    refusal = capabilities.refusal(_search(config, capabilities))
    if refusal is not None:
        raise ConfigError(f"transcriber.{refusal}")
    check_languages(config, tokenizer, capabilities)
    check_phrases(config, tokenizer, capabilities)


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
    _check_basics(request, config)
    request = dataclasses.replace(request, language=named_language(request.language))
    options = _options(request, capabilities, config)
    silence_s = _hallucination_silence(request)
    detection = detection_of(request, tokenizer, capabilities, config)
    start = _start(request, tokenizer, capabilities)
    n_text_ctx = manifest.dims.n_text_ctx
    plan = DecodingPlan(
        start=start,
        language=_language(start, tokenizer),
        options=options,
        fixed_temperature=request.temperature is not None,
        words=words_of(request, silence_s, tokenizer, capabilities),
        tells_words=request.word_timestamps or (request.try_word_timestamps and capabilities.words),
        tells_logprobs=request.token_logprobs,
        # The calibration was fitted to transcripts, and does not hold for translations.
        confidence=manifest.confidence if request.task == "transcribe" else None,
        low_confidence=low_confidence_of(request, manifest.confidence),
        hallucination_silence_s=silence_s,
        vad=_vad(request, config),
        stretches=stretches_of("clip_timestamps", request.clip_timestamps),
        voice=_voice(request),
        speech=_speech(request, config),
        draft=_draft(request, tokenizer, n_text_ctx),
        short_encoder=_short_encoder(request, capabilities, config),
        unfinished=request.unfinished,
        mode=_mode(request, capabilities, config),
        multilingual=request.multilingual,
        detection=detection,
        partial=request.partial,
        audio_track=audio_track_of(request),
        repetitive=config.compression_ratio_threshold,
        speakers=speakers_of(request),
        channels=has_channels(request),
        script=_script(request, config),
    )
    return with_texts(plan, no_texts(tokenizer, config), request, config, n_text_ctx)


def with_texts(
    plan: DecodingPlan,
    texts: PromptTexts,
    request: Request,
    config: TranscriberConfig,
    n_text_ctx: int,
) -> DecodingPlan:
    """Add a request's texts to its plan. `plan_request` must not wait for their tokenization.

    Args:
        plan: the result of `plan_request`.
        texts: the result of `texts_of`.
        request: the request, for its `max_tokens`.
        config: limits and defaults.
        n_text_ctx: the decoder's number of positions.

    Raises:
        OptionError: the prompt leaves too little room for `max_tokens`.
    """
    free_positions = n_text_ctx - len(texts.prompt(plan.start, texts.before, texts.prefix).ids)
    max_tokens = _max_tokens(request, config, plan.mode, free_positions)
    options = dataclasses.replace(plan.options, max_tokens=max_tokens, phrases=texts.phrases)
    return dataclasses.replace(plan, texts=texts, options=options)


def _check_basics(request: Request, config: TranscriberConfig) -> None:
    check_audio(request)
    for name, option in OPTIONS.items():
        value = getattr(request, name)
        if option.kind is bool and not isinstance(value, bool) and value is not option.default:
            raise OptionError(f"{name} = {shown(value)}; expected true or false")
    if request.task == "translate" and not config.translate:
        raise OptionError(
            "task = 'translate', but this server's engine was not trained to translate "
            "(transcriber.translate = false); expected task = 'transcribe', or use another server"
        )


def _mode(request: Request, capabilities: Capabilities, config: TranscriberConfig) -> Mode:
    """Return the decoding mode; reject texts and phrases that the runtime does not support."""
    mode = mode_of(request)
    refusal = refusal_of_text(request, mode, capabilities)
    # `texts_of` reads phrases again to tokenize them; invalid ones are rejected here, on arrival.
    if refusal is None:
        refusal = refusal_of_phrases(phrases_of(request, config), capabilities)
    if refusal is not None:
        raise OptionError(refusal)
    return mode


def _start(request: Request, tokenizer: Tokenizer, capabilities: Capabilities) -> tuple[int, ...]:
    start = tokenizer.prompt_ids(request.language, request.task, request.timestamps, "")
    if DETECT_LANGUAGE in start and not capabilities.detect_language:
        raise OptionError(
            f"language is not given, and the runtime {capabilities.runtime} cannot detect it; "
            "name the language"
        )
    return start


def _hallucination_silence(request: Request) -> float:
    wanted = request.hallucination_silence_threshold
    if not is_number(wanted) or not 0.0 <= wanted < math.inf:
        raise OptionError(
            f"hallucination_silence_threshold = {shown(wanted)}; expected seconds, or 0 for off"
        )
    return float(wanted)


def _voice(request: Request) -> tuple[Stretch, ...]:
    voice = stretches_of("voice", request.voice)
    listens = request.vad is not None and as_switch("vad", request.vad) != "off"
    if voice and (listens or request.clip_timestamps):
        other = "vad" if listens else "clip_timestamps"
        raise OptionError(f"voice came with {other}; expected one of them")
    return voice


def _vad(request: Request, config: TranscriberConfig) -> Switch:
    if request.vad is None and request.voice:
        return "off"
    if request.vad is None and request.clip_timestamps and config.vad == "auto":
        return "off"  # the client has chosen what is worth decoding
    if request.vad is None:
        return config.vad
    return as_switch("vad", request.vad)


def _speech(request: Request, config: TranscriberConfig) -> SpeechOptions:
    """Return the VAD thresholds; reject them if VAD is off."""
    for name in SPEECH_OPTIONS:
        if _vad(request, config) == "off" and getattr(request, name) is not None:
            raise OptionError(
                f"{name} = {shown(getattr(request, name))}, but VAD is off; expected vad = true"
            )
    return _from_request(request, _SPEECH)


def _short_encoder(
    request: Request, capabilities: Capabilities, config: TranscriberConfig
) -> ShortEncoder:
    """Return the `short_encoder` mode; "auto" was measured, and applies, only to transcripts."""
    if request.short_encoder and not capabilities.short_windows:
        raise OptionError(
            f"short_encoder = true, but the runtime {capabilities.runtime} on "
            f"{capabilities.device} encodes whole windows; ask for short_encoder = false"
        )
    if request.short_encoder is not None:
        return "on" if request.short_encoder else "off"
    whole = not capabilities.short_windows or request.task != "transcribe"
    return "off" if whole and config.short_encoder == "auto" else config.short_encoder


def _draft(request: Request, tokenizer: Tokenizer, n_text_ctx: int) -> tuple[int, ...]:
    draft, n_vocab = request.draft, tokenizer.n_vocab
    good = isinstance(draft, tuple) and all(type(t) is int and 0 <= t < n_vocab for t in draft)
    if not good or len(draft) > n_text_ctx:
        raise OptionError(
            f"draft = {shown(draft)}; expected at most {n_text_ctx} token ids below {n_vocab}, "
            "from an answer of this engine"
        )
    return draft


def _temperature(request: Request, capabilities: Capabilities, config: TranscriberConfig) -> float:
    wanted = request.temperature
    if wanted is None:
        return config.temperatures[0]
    if not is_number(wanted) or not 0.0 <= wanted <= 1.0:  # also true for NaN
        raise OptionError(f"temperature = {shown(wanted)}; expected a number from 0 to 1")
    if wanted > 0 and not capabilities.sampling:
        raise OptionError(
            f"temperature = {wanted}, but the runtime {capabilities.runtime} decodes greedily; "
            "expected 0"
        )
    return float(wanted)


def _from_request(request: Request, defaults: T) -> T:
    """Merge the options of a request with `defaults`, which has fields of the same names."""
    names = [field.name for field in dataclasses.fields(defaults)]
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    if not given:
        return defaults
    options = {**dataclasses.asdict(defaults), **given}
    return from_table(type(defaults), options, "the request", error=OptionError)


def _search(config: TranscriberConfig, capabilities: Capabilities) -> SearchOptions:
    """Return the default search options."""
    best_of = 1 if capabilities.beam_sizes else config.beam_size
    return SearchOptions(beam_size=config.beam_size, best_of=best_of)


def _options(
    request: Request, capabilities: Capabilities, config: TranscriberConfig
) -> DecodingOptions:
    """Return the decoding options of all windows, without those that depend on texts."""
    temperature = _temperature(request, capabilities, config)
    search = _from_request(request, _search(config, capabilities))
    refusal = capabilities.refusal(search)
    if refusal is not None:
        raise OptionError(refusal)
    if request.timestamps and not capabilities.timestamps:
        raise OptionError(
            f"timestamps = true, but the runtime {capabilities.runtime} has no timestamps; "
            "ask for timestamps = false"
        )
    return DecodingOptions(
        timestamps=request.timestamps, temperature=temperature, **dataclasses.asdict(search)
    )


def _max_tokens(
    request: Request, config: TranscriberConfig, mode: Mode, free_positions: int
) -> int:
    """Return the maximum number of new tokens per window.

    In sequential mode the prompts grow with the text, and the context limits a window's tokens.

    Args:
        request: the request.
        config: limits and defaults.
        mode: the decoding mode.
        free_positions: decoder positions that the prompt leaves free.
    """
    wanted = request.max_tokens
    if wanted is None:
        return min(config.max_tokens, free_positions)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise OptionError(f"max_tokens = {shown(wanted)}; expected a whole number of at least 1")
    if wanted > config.max_tokens:
        raise OptionError(f"max_tokens = {wanted}; expected at most {config.max_tokens}")
    if wanted > free_positions and mode == "parallel":
        raise OptionError(f"max_tokens = {wanted}, but the prompt leaves room for {free_positions}")
    return wanted


def _language(start: tuple[int, ...], tokenizer: Tokenizer) -> str | None:
    """Return the code of the language that a prompt names; None if it must be detected."""
    if DETECT_LANGUAGE in start:
        return None
    if not tokenizer.facts.multilingual:
        return "en"
    return tokenizer.language_code(start[1])


def _script(request: Request, config: TranscriberConfig) -> Script | None:
    """Return the first Chinese script that the request's language tags name."""
    named = (request.language,) if request.language else request.languages or config.languages
    return next((script for tag in named if (script := script_of(tag))), None)
