"""A client's settings of its session: OpenAI's transcription session, checked part by part.

An update says only what changes. What of OpenAI's settings has no effect here is named in a
warning, what is wrong in an error.
https://developers.openai.com/api/docs/guides/realtime-transcription
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.contract.codec import from_table, text_that
from serve.contract.errors import OptionError, shown
from serve.speech.languages import language_code, named_language

_MAX_PROMPT_CHARS = 2**16
_MAX_S = 60.0

Language = Annotated[
    str,
    text_that(
        lambda text: language_code(text) is not None,
        'a code such as "en", a tag such as "en-US", or a name',
    ),
]
LanguageOrAuto = Annotated[
    str,
    text_that(
        lambda text: (code := named_language(text)) is None or language_code(code) is not None,
        'a code such as "en", a tag such as "en-US", a name, or "auto"',
    ),
]
Milliseconds = Annotated[int, Field(ge=0, le=round(_MAX_S * 1000))]
HYPOTHESIS = "earshot.hypothesis"
"""The event of ours that `include` may name, with what is heard and not final yet."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of audio."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Literal[16_000, 24_000] | None = None  # Hz; of audio/pcm alone, None: 24 kHz


@dataclasses.dataclass(frozen=True)
class Transcription:
    """The settings of how audio becomes text."""

    model: str | None = None  # None: the server's
    language: LanguageOrAuto | None = None  # None, "auto": found in each utterance
    languages: tuple[Language, ...] | None = None  # among these; None: as configured
    prompt: Annotated[str, Field(max_length=_MAX_PROMPT_CHARS)] | None = None
    phrases: tuple[str, ...] | None = None  # to come out right; None: as configured


@dataclasses.dataclass(frozen=True)
class ServerVad:
    """The settings by which the server finds utterances by itself."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5  # of speech's probability
    prefix_padding_ms: Milliseconds = 300  # kept from before it begins
    silence_duration_ms: Milliseconds = 500  # after which it has ended


@dataclasses.dataclass(frozen=True)
class Input:
    """All about the audio that comes in."""

    format: Format = Format(rate=24_000)
    transcription: Transcription = Transcription()
    turn_detection: ServerVad | None = ServerVad()  # None: the client says where utterances end
    noise_reduction: None = None


@dataclasses.dataclass(frozen=True)
class _Audio:
    input: Input = Input()


@dataclasses.dataclass(frozen=True)
class Settings:
    """A session as its client has it."""

    type: Literal["transcription"] = "transcription"
    audio: _Audio = _Audio()
    include: tuple[Literal["earshot.hypothesis"], ...] | None = ()

    @property
    def input(self) -> Input:
        """All about the audio that comes in."""
        return self.audio.input


@dataclasses.dataclass(frozen=True)
class SettingWarning:
    """A setting has no effect here."""

    param: str  # its name
    message: str


class SettingError(Exception):
    """A setting is wrong, or cannot be honoured.

    Args:
        message: what was found, and what was expected.
        param: its name, as far as it is known.
        code: what OpenAI calls such errors.
    """

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


_INPUT = "session.audio.input"
_LOGPROBS = "item.input_audio_transcription.logprobs"
_GONE = object()


@dataclasses.dataclass(frozen=True)
class _Ignored:
    """A setting of OpenAI's that has no effect here.

    Args:
        path: its name.
        why: what a client is told that asks for it.
        instead: from a value to what this server knows in its place, or `_GONE`; the same value:
            it is known.
        asks: whether a value asks for anything.
    """

    path: str
    why: str
    instead: Callable[[Any], Any] = lambda value: _GONE
    asks: Callable[[Any], bool] = lambda value: value not in (None, False)


_IGNORED = (
    _Ignored("session.client_secret", "keys are the server's operator's to make"),
    _Ignored("session.modalities", "a transcription session has text alone"),
    _Ignored(
        "session.include",
        "log-probabilities of live text are not told",
        lambda value: [name for name in value if name != _LOGPROBS] if _is_list(value) else value,
        lambda value: _is_list(value) and _LOGPROBS in value,
    ),
    _Ignored(f"{_INPUT}.noise_reduction", "there is none: audio is heard as it was sent"),
    _Ignored(
        f"{_INPUT}.turn_detection.type",
        "turns are found by voice activity, as by server_vad",
        lambda value: "server_vad" if value == "semantic_vad" else value,
        lambda value: value == "semantic_vad",
    ),
    _Ignored(f"{_INPUT}.turn_detection.eagerness", "silence_duration_ms says when a turn ends"),
    *(
        _Ignored(f"{_INPUT}.turn_detection.{name}", "a transcription session has no responses")
        for name in ("create_response", "interrupt_response", "idle_timeout_ms")
    ),
    _Ignored(
        f"{_INPUT}.transcription",
        "a transcription session transcribes; it stays as it is",
        lambda value: _GONE if value is None else value,
        lambda value: value is None,
    ),
    _Ignored(f"{_INPUT}.transcription.delay", "live.update_s says how soon audio is decoded"),
    _Ignored(f"{_INPUT}.transcription.keywords", "live text knows none; phrases may name them"),
)


# Models of OpenAI's that know no turns: their clients send no turn_detection, and commit, which
# would be an error where the server has found the same turn's end before.
_WITHOUT_TURNS = ("gpt-realtime-whisper", "gpt-live-transcribe")


def updated(
    settings: Settings, changes: Mapping[str, Any]
) -> tuple[Settings, tuple[SettingWarning, ...]]:
    """Apply a client's `session.update`, and warn of what has no effect.

    Raises:
        SettingError: it says what is wrong or cannot be honoured; nothing is changed.
    """
    if changes.get("type") == "realtime":
        raise SettingError(
            'session.type = "realtime"; this server transcribes and does not speak: '
            'expected "transcription"',
            "session.type",
            "unsupported_value",
        )
    changes, warnings = _without_ignored(changes)
    table = _merged(_with_turns(as_session(settings), changes), changes)
    try:
        changed = from_table(Settings, table, "session", error=OptionError)
        if changed.input.format.type != "audio/pcm" and changed.input.format.rate is not None:
            raise OptionError("session: audio.input.format.rate is given; G.711 has 8 kHz always")
        transcription = changed.input.transcription
        if named_language(transcription.language) is not None and transcription.languages:
            raise OptionError(
                "session: audio.input.transcription.languages came beside language; expected one"
            )
        return changed, warnings
    except OptionError as error:
        unknown = "unknown key" in str(error)
        code = "unknown_parameter" if unknown else "invalid_value"
        raise SettingError(str(error), None, code) from error


def as_session(settings: Settings) -> dict[str, Any]:
    """Describe settings as a client is told them."""
    table = dataclasses.asdict(settings)
    if settings.input.format.rate is None:
        del table["audio"]["input"]["format"]["rate"]
    return table


def _with_turns(session: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let the client of a model without turns end them itself, in a session's table."""
    value: Any = changes
    for key in ("audio", "input", "transcription", "model"):
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, str) and value.startswith(_WITHOUT_TURNS):
        session["audio"]["input"]["turn_detection"] = None
    return session


def _without_ignored(
    changes: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[SettingWarning, ...]]:
    """Return changes as this server knows them, and warnings of the others."""
    root = {"session": copy.deepcopy(dict(changes))}
    warnings = []
    for ignored in _IGNORED:
        *parents, key = ignored.path.split(".")
        table: Any = root
        for parent in parents:
            table = table.get(parent) if isinstance(table, dict) else None
        if not isinstance(table, dict) or key not in table:
            continue
        value = table.pop(key)
        if ignored.asks(value):
            message = f"{ignored.path} = {shown(value)} has no effect: {ignored.why}"
            warnings.append(SettingWarning(ignored.path, message))
        if (instead := ignored.instead(value)) is not _GONE:
            table[key] = instead
    return root["session"], tuple(warnings)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _merged(old: Any, new: Any) -> Any:
    """Merge tables, in which a later one's keys replace those of an earlier one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    merged = dict(old)
    for key, value in new.items():
        merged[key] = value if key == "format" else _merged(old.get(key), value)
    return merged
