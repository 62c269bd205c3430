"""What a client sets for its session: OpenAI's transcription session, checked part by part.

An update says only what changes. What this server cannot honour is refused by its name.
https://developers.openai.com/api/docs/guides/realtime-transcription
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from serve.codec import from_table, text_that
from serve.errors import OptionError, shown
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
"""What `include` may name: an event of ours, with what is heard and not final yet."""


@dataclasses.dataclass(frozen=True)
class Format:
    """How audio is written."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Literal[24_000] | None = None  # Hz; of audio/pcm alone


@dataclasses.dataclass(frozen=True)
class Transcription:
    """How audio becomes text."""

    model: str | None = None  # None: the server's
    language: LanguageOrAuto | None = None  # None, "auto": found in each utterance
    languages: tuple[Language, ...] | None = None  # among these; None: as configured
    prompt: Annotated[str, Field(max_length=_MAX_PROMPT_CHARS)] | None = None


@dataclasses.dataclass(frozen=True)
class ServerVad:
    """How the server finds utterances by itself."""

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
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "session.type",
        lambda value: value == "realtime",
        'this server transcribes and does not speak: expected "transcription"',
    ),
    (
        "session.include",
        lambda value: value not in (None, [], [HYPOTHESIS]),
        f'only ["{HYPOTHESIS}"] can be told: no log-probabilities of live text; leave it out',
    ),
    (
        f"{_INPUT}.noise_reduction",
        lambda value: value is not None,
        "there is no noise reduction; expected null",
    ),
    (
        f"{_INPUT}.turn_detection.type",
        lambda value: value == "semantic_vad",
        'turns are found by voice activity: expected "server_vad", or turn_detection = null',
    ),
    *(
        (
            f"{_INPUT}.turn_detection.{name}",
            lambda value: value not in (None, False),
            "a transcription session has no responses; leave it out",
        )
        for name in ("create_response", "interrupt_response", "idle_timeout_ms")
    ),
    (
        f"{_INPUT}.transcription",
        lambda value: value is None,
        "this session transcribes; leave it out to keep it as it is",
    ),
    *(
        (
            f"{_INPUT}.transcription.{name}",
            lambda value: value is not None,
            f"this server's models do not know {name}; leave it out",
        )
        for name in ("delay", "keywords")
    ),
)


_NEUTRAL = {path.rpartition(".")[2] for path, _, _ in _REFUSED} - {
    field.name for kind in (Settings, Input, ServerVad) for field in dataclasses.fields(kind)
}
"""Keys that `_REFUSED` names and this server has not; with such values they ask for nothing."""


def updated(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Settings with what a client's `session.update` says.

    Raises:
        SettingError: it says what is wrong or cannot be honoured; nothing is changed.
    """
    for path, refuses, why in _REFUSED:
        found, value = _at({"session": changes}, path)
        if found and refuses(value):
            raise SettingError(f"{path} = {shown(value)}; {why}", path, "unsupported_value")
    table = _merged(as_session(settings), _without_neutral(changes))
    try:
        changed = from_table(Settings, table, "session", error=OptionError)
        if changed.input.format.type != "audio/pcm" and changed.input.format.rate is not None:
            raise OptionError("session: audio.input.format.rate is given; G.711 has 8 kHz always")
        asked = changed.input.transcription
        if named_language(asked.language) is not None and asked.languages:
            raise OptionError(
                "session: audio.input.transcription.languages came beside language; expected one"
            )
        return changed
    except OptionError as error:
        unknown = "unknown key" in str(error)
        code = "unknown_parameter" if unknown else "invalid_value"
        raise SettingError(str(error), None, code) from error


def as_session(settings: Settings) -> dict[str, Any]:
    """Settings as a client is told them."""
    table = dataclasses.asdict(settings)
    if settings.input.format.rate is None:
        del table["audio"]["input"]["format"]["rate"]
    return table


def _at(table: Any, path: str) -> tuple[bool, Any]:
    """Whether nested tables have a value at a path, and which."""
    for key in path.split("."):
        if not isinstance(table, dict) or key not in table:
            return False, None
        table = table[key]
    return True, table


def _without_neutral(table: Any) -> Any:
    """Tables without these keys."""
    if not isinstance(table, dict):
        return table
    return {key: _without_neutral(value) for key, value in table.items() if key not in _NEUTRAL}


def _merged(old: Any, new: Any) -> Any:
    """Tables in which a later one's keys replace those of an earlier one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    merged = dict(old)
    for key, value in new.items():
        merged[key] = value if key == "format" else _merged(old.get(key), value)
    return merged
