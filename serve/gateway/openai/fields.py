"""A form's fields beside its file: OpenAI's, and our options under their own names.

A field that this server cannot honour is rejected by name. An unknown field is ignored, and the
answer says so; a name that is nearly a known one is a spelling mistake and is rejected. Every
option of a request is a field, so a new option is a new field by itself.
https://developers.openai.com/api/reference/resources/audio
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field as Bounds

from serve.contract.codec import from_json, nearest, parse_json, to_json
from serve.contract.config import OPTIONS
from serve.contract.errors import OptionError, shown
from serve.contract.fields import Finite
from serve.contract.messages import Request, Task
from serve.contract.options import SWITCH_CHOICES, Option, parse
from serve.contract.server_config import UnknownFields
from serve.gateway.errors import field_error
from serve.speech.cues import CUE_OPTIONS, CueOptions, check_bounds
from serve.speech.formats import SUBTITLES

Pairs = Iterable[tuple[str, str]]
"""Names and texts of a form's fields."""
_Texts = Mapping[str, Sequence[str]]  # by the field's name
Milliseconds = Annotated[int, Bounds(ge=0, le=1_000_000)]
Format = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
Granularity = Literal["word", "segment"]
_STREAMED: tuple[Format, ...] = ("json", "text", "verbose_json", "diarized_json")
_KNOWN = ("known_speaker_names", "known_speaker_references")  # which may hold commas
_STRATEGY = "chunking_strategy"
_NESTED = re.compile(rf"{_STRATEGY}\[(\w+)\]")
_INDEX = re.compile(r"\[[0-9]{0,4}\]$")  # of a list's field: keywords[] or keywords[0]
_MISSPELLED = 0.8  # similarity from which an unknown name is a known one with a mistake

_ASK_FOR_WORDS = "ask for timestamp_granularities[]=word with response_format=verbose_json"
_REFUSED = {
    "try_word_timestamps": "srt and vtt have the times of words by themselves",
    "word_timestamps": _ASK_FOR_WORDS,
    "token_logprobs": "ask for include[]=logprobs with response_format=json",
    "task": "translations have an address of their own, /v1/audio/translations",
}
"""Options of a request that are no fields of a form, and why not."""
_UNKNOWN = ("sample_rate", "voice", "unfinished")  # options of samples and of live text
_OPTIONS = {  # the meaning of one with choices names them
    name: option if option.choices == SWITCH_CHOICES else dataclasses.replace(option, choices=())
    for name, option in OPTIONS.items()
    if name not in (*_REFUSED, *_UNKNOWN)
}
_ALL = (
    Option("model", str, "a name that /v1/models lists, or that fits an alias"),
    Option("response_format", str, "default: json", choices=get_args(Format)),
    Option(
        "timestamp_granularities", str, "default: segment", many=True, choices=get_args(Granularity)
    ),
    Option("stream", bool, "send the text as it is found, as server-sent events; default: false"),
    Option(_STRATEGY, str, '"auto": VAD as configured; {"type": "server_vad"}: VAD of all audio'),
    Option("include", str, "logprobs, with json: of each token", many=True, choices=("logprobs",)),
    Option("keywords", str, "hotwords, one by one", many=True),
    *(
        dataclasses.replace(option, meaning=f"srt and vtt: {option.meaning}")
        for option in CUE_OPTIONS.values()
    ),
    *_OPTIONS.values(),
)
FIELDS = {option.name: option for option in _ALL}
"""All fields beside `file`, by their names."""
FIELDS["temperature"] = dataclasses.replace(
    FIELDS["temperature"], meaning="0 to 1; 0, the default, rises where the text looks wrong"
)


@dataclasses.dataclass(frozen=True)
class FormFields:
    """The fields of a form, without its file."""

    request: Request  # without audio
    model: str | None
    format: Format
    stream: bool
    segments: bool  # verbose_json holds them
    words: bool  # and these
    cues: CueOptions
    ignored: tuple[str, ...] = ()  # names of fields that are unknown

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each ignored field."""
        return tuple(f"the field {shown(name)} is unknown and was ignored" for name in self.ignored)


@dataclasses.dataclass(frozen=True)
class _ChunkingStrategy:
    """A `chunking_strategy` that is an object."""

    type: Literal["server_vad"]
    threshold: Finite | None = None
    prefix_padding_ms: Milliseconds | None = None
    silence_duration_ms: Milliseconds | None = None


def read_fields(pairs: Pairs, task: Task, unknown: UnknownFields = "ignore") -> FormFields:
    """Read a form's fields.

    Args:
        pairs: names and texts in their order, without the file.
        task: which the address names.
        unknown: the treatment of unknown fields; misspelled ones are always rejected.

    Raises:
        ApiError: one is unknown, malformed, or cannot be honoured.
    """
    form, ignored = _collect(pairs, unknown)
    format: Format = _value(form, "response_format") or "json"
    stream, logprobs = bool(_value(form, "stream")), bool(_many(form, "include"))
    granularities = _many(form, "timestamp_granularities")
    words = "word" in granularities
    cues = {name: value for name in CUE_OPTIONS if (value := _value(form, name)) is not None}
    for name, wanted, formats in (
        ("stream", stream, _STREAMED),
        ("include", logprobs, ("json",)),
        ("timestamp_granularities", words, ("verbose_json",)),
        *((name, True, SUBTITLES) for name in cues),
    ):
        if wanted and format not in formats:
            expected = f"{name} with response_format = {format}; expected {', '.join(formats)}"
            raise field_error(name, expected)
    for name, value in cues.items():
        try:
            check_bounds(name, value)
        except OptionError as error:
            raise field_error(name, f"{name} = {error}") from error
    cue_options = CueOptions(**cues)
    if not words and _value(form, "low_confidence") is not None:
        raise field_error("low_confidence", f"low_confidence marks words; {_ASK_FOR_WORDS}")
    request = Request(
        b"",
        task=task,
        word_timestamps=words or cue_options.needs_words,
        # A translation's words are not said in their order.
        try_word_timestamps=format in SUBTITLES and task == "transcribe",
        token_logprobs=logprobs,
        **_options(form, format),
    )
    segments = not words or "segment" in granularities
    model = _value(form, "model")
    return FormFields(request, model, format, stream, segments, words, cue_options, tuple(ignored))


def _options(form: _Texts, format: Format) -> dict[str, Any]:
    """Return the options of the request that a form has."""
    options = {name: _value(form, name) for name in _OPTIONS}
    options |= _chunking(form)
    if keywords := _many(form, "keywords"):  # OpenAI's name of our hotwords
        options["hotwords"] = ", ".join([*_many(form, "hotwords"), *keywords])
    if len(phrases := _many(form, "phrases")) > 1:  # a single text is split at commas
        options["phrases"] = tuple(phrases)
    options |= {name: tuple(_many(form, name)) or None for name in _KNOWN}
    if format == "diarized_json" and options["channels"] != "split":
        options["diarize"] = True
    if options["temperature"] == 0.0:
        options["temperature"] = None  # OpenAI's 0 rises by itself, ours stays
    return {name: value for name, value in options.items() if value is not None}


def _collect(pairs: Pairs, unknown: UnknownFields) -> tuple[dict[str, list[str]], list[str]]:
    """Return texts by the fields' names, and the names of unknown fields.

    The parts of a `chunking_strategy` become its JSON.

    Raises:
        ApiError: a name is nearly a known one, or none may be unknown, or came too often.
    """
    values: dict[str, list[str]] = {}
    strategy: dict[str, object] = {}
    ignored: dict[str, None] = {}  # a set in order: a job's JSON may have many
    for name, text in pairs:
        base = _INDEX.sub("", name)
        if part := _NESTED.fullmatch(name):
            strategy[part[1]] = text if part[1] == "type" else _number(text)
        elif base in _REFUSED:
            raise field_error(base, f"{base} cannot be honoured: {_REFUSED[base]}")
        elif base not in FIELDS or (base != name and not FIELDS[base].many):
            if name not in ignored:
                _require_far_from_known(name, base[:60], unknown)
                ignored[name] = None
        elif text:  # an empty field says nothing
            values.setdefault(base, []).append(text)
    if strategy:
        values.setdefault(_STRATEGY, []).append(to_json(strategy))
    for name, texts in values.items():
        if len(texts) > 1 and not FIELDS[name].many:
            raise field_error(name, f"{name} came {len(texts)} times; expected it once")
    return values, list(ignored)


def _require_far_from_known(name: str, base: str, unknown: UnknownFields) -> None:
    if unknown == "refuse" or difflib.get_close_matches(base, FIELDS, 1, _MISSPELLED):
        message = f"unknown field {shown(name)}{nearest(base, list(FIELDS))}"
        raise field_error(name[:60], message, "unknown_parameter")


def _value(form: _Texts, name: str) -> Any:
    """Return the value of a field; None: the form lacks it."""
    texts = form.get(name)
    return None if texts is None else read_field(FIELDS[name], ",".join(texts))


def _many(form: _Texts, name: str) -> Sequence[str]:
    """Return the texts of a field that may be repeated, or be a list in one text."""
    texts, choices = form.get(name, ()), FIELDS[name].choices
    if not choices:
        return texts
    texts = [part for text in texts for part in _listed(text)]
    for text in texts:
        if text not in choices:
            expected = f"{name}[] = {shown(text)}; expected {' or '.join(choices)}"
            raise field_error(name, expected)
    return texts


def read_field(field: Option, text: str) -> Any:
    """Read a field's value.

    Raises:
        ApiError: 400, the text is no such value.
    """
    try:
        return parse(field, text)
    except OptionError as error:
        raise field_error(field.name, str(error)) from error


def _listed(text: str) -> list[str]:
    """Split `word,segment`, or a JSON list of these."""
    try:
        items = parse_json(text) if text.startswith("[") else text.split(",")
    except ValueError:
        items = [text]
    return [str(item).strip() for item in items]


def _chunking(form: _Texts) -> dict[str, Any]:
    """Return a `chunking_strategy` as our options."""
    text = _value(form, _STRATEGY)
    if text in (None, "auto"):
        return {}
    wrong = functools.partial(field_error, _STRATEGY)
    vad = from_json(_ChunkingStrategy, text, _STRATEGY, error=wrong, advice='or "auto"')
    options = {
        "vad": "on",
        "vad_threshold": vad.threshold,
        "vad_pad_s": _seconds(vad.prefix_padding_ms),
        "vad_min_silence_s": _seconds(vad.silence_duration_ms),
    }
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if _value(form, name) not in (None, value):
            raise field_error(name, f"{name} says otherwise than {_STRATEGY}; expected one of them")
    return options


def _number(text: str) -> Any:
    """Return the number in a part of a `chunking_strategy`; no number stays a text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
