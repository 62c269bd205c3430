"""The settings of a session, as OpenAI's transcription sessions have them, and their checks.

An update has only the settings that change. A warning names the settings without effect here and
all unknown keys. An error names a wrong value of a known key.
https://developers.openai.com/api/docs/guides/realtime-transcription
"""

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from serve.contract.codec import from_table, split_unknown, text_that
from serve.contract.errors import OptionError, shown
from serve.gateway.errors import ApiError
from serve.speech.languages import language_code, named_language

_MAX_PROMPT_CHARS = 2**16
_MAX_S = 60.0
_MAX_NAMED = 20  # unknown keys that a warning names


def _whole(value: object) -> object:
    """Turn 500.0 into 500: JSON of some languages has no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _none_if_blank(value: object) -> object:
    """Turn an empty text into None: clients send it for a language that is not set."""
    return None if isinstance(value, str) and not value.strip() else value


Whole = BeforeValidator(_whole)
"""Annotate an integer that may be written with a point and zeros behind it."""

_CODES = 'a code such as "en", a tag such as "en-US"'
Language = Annotated[str, text_that(language_code, f"{_CODES}, or a name")]
LanguageOrAuto = Annotated[
    str,
    text_that(
        lambda text: named_language(text) is None or language_code(text),
        f'{_CODES}, a name, or "auto"',
    ),
]
Milliseconds = Annotated[int, Whole, Field(ge=0, le=round(_MAX_S * 1000))]
Rate = Annotated[Literal[16_000, 24_000], Whole]
Delay = Literal["minimal", "low", "medium", "high", "xhigh"]
_DELAY_FACTORS = {"medium": 1.5, "high": 2.0, "xhigh": 3.0}
SettingWarning = dict[Literal["param", "message"], str]
"""A warning of settings or keys without effect; `param` has their names, separated by commas."""
HYPOTHESIS = "earshot.hypothesis"
"""Our event that `include` may name; it has the text that is not final yet."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of audio."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Rate | None = None  # Hz; of audio/pcm alone, None: 24 kHz


@dataclasses.dataclass(frozen=True)
class Transcription:
    """The settings of transcription."""

    model: str | None = None  # None: the server's
    # None, "auto" and "": detected in each utterance
    language: Annotated[LanguageOrAuto | None, BeforeValidator(_none_if_blank)] = None
    languages: tuple[Language, ...] | None = None  # to choose from; None: as configured
    prompt: Annotated[str, Field(max_length=_MAX_PROMPT_CHARS)] | None = None
    keywords: tuple[str, ...] | None = None  # OpenAI's name for phrases
    phrases: tuple[str, ...] | None = None  # ours
    delay: Delay | None = None  # until words are final; None: minimal

    @property
    def boosted(self) -> tuple[str, ...]:
        """The phrases to boost, by either name; (): as configured."""
        return (*(self.keywords or ()), *(self.phrases or ()))

    @property
    def delay_factor(self) -> float:
        """The factor of the times between decodings and until words are final."""
        return _DELAY_FACTORS.get(self.delay or "", 1.0)


@dataclasses.dataclass(frozen=True)
class ServerVad:
    """The settings by which the server finds the ends of utterances."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5  # the probability of speech
    prefix_padding_ms: Milliseconds = 300  # before an utterance that belong to it
    silence_duration_ms: Milliseconds = 500  # after which it ends


@dataclasses.dataclass(frozen=True)
class Input:
    """The settings of the audio."""

    format: Format = Format(rate=24_000)
    transcription: Transcription = Transcription()
    turn_detection: ServerVad | None = ServerVad()  # None: the client commits
    noise_reduction: None = None


@dataclasses.dataclass(frozen=True)
class _Audio:
    input: Input = Input()


@dataclasses.dataclass(frozen=True)
class SessionSettings:
    """The settings of a session."""

    type: Literal["transcription"] = "transcription"
    audio: _Audio = _Audio()
    include: tuple[Literal["earshot.hypothesis"], ...] | None = ()

    @property
    def input(self) -> Input:
        """The settings of the audio."""
        return self.audio.input


class EventError(ApiError):
    """A client's event is wrong, or cannot be done now.

    Args:
        message: the value found, and the value expected.
        code: OpenAI's name of such errors.
        param: the field that is wrong.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(OptionError(message))
        self.status = dataclasses.replace(self.status, code=code)
        self.param = param


_INPUT = "session.audio.input"
_LOGPROBS = "item.input_audio_transcription.logprobs"
_TURNS = f"{_INPUT}.turn_detection"
_IGNORED = (
    *("session.client_secret", "session.modalities", f"{_INPUT}.noise_reduction"),
    *(f"{_TURNS}.eagerness", f"{_TURNS}.create_response", f"{_TURNS}.interrupt_response"),
    f"{_TURNS}.idle_timeout_ms",
)
"""OpenAI's settings that never have an effect here. A warning names them."""
# OpenAI's models without voice activity detection: turn_detection is null, and clients commit. If
# the server found the end of the same turn first, their commit would be an error.
# https://developers.openai.com/api/docs/guides/realtime-vad
_WITHOUT_TURNS = ("gpt-realtime-whisper", "gpt-live-transcribe")
_LOCATION = re.compile(r"session: ([\w.\[\]]+)")  # where the codec's messages name a setting


def updated(
    settings: SessionSettings,
    changes: object,
    check_model: Callable[[str], object] = str,
    begun: bool = False,
) -> tuple[SessionSettings, list[SettingWarning]]:
    """Apply a client's `session.update`.

    Args:
        settings: the settings before.
        changes: `session` of the update.
        check_model: refuses the name of a model that is not served.
        begun: whether audio has come.

    Returns:
        The new settings, and warnings of settings and keys without effect.

    Raises:
        EventError: a value is wrong, or cannot be honoured; nothing is changed.
    """
    if not isinstance(changes, dict):
        raise EventError("session is no object", "invalid_value", "session")
    changes, warnings = _without_ignored(changes)
    changes, unknown = split_unknown(SessionSettings, changes)
    if unknown:
        warnings.append(unknown_keys({f"session.{key}": near for key, near in unknown.items()}))
    table = merged(_with_turns(settings, changes), changes)
    after = from_table(SessionSettings, table, "session", error=_wrong_setting)
    format, transcription = after.input.format, after.input.transcription
    if format.type != "audio/pcm" and format.rate is not None:
        raise _wrong_setting("session: audio.input.format.rate is given; G.711 has 8 kHz always")
    if named_language(transcription.language) is not None and transcription.languages:
        raise _wrong_setting(
            "session: audio.input.transcription.languages came beside language; expected one"
        )
    if transcription.model is not None:
        try:
            check_model(transcription.model)
        except ApiError as error:
            param = f"{_INPUT}.transcription.model"
            raise EventError(str(error), "model_not_found", param) from None
    if format != settings.input.format and begun:
        message = "the format cannot change once audio has come; open another session"
        raise EventError(message, "invalid_value", f"{_INPUT}.format")
    return after, warnings


def _wrong_setting(message: str) -> EventError:
    location = _LOCATION.match(message)
    return EventError(message, "invalid_value", f"session.{location[1]}" if location else None)


def unknown_keys(keys: Mapping[str, str]) -> SettingWarning:
    """Warn of unknown keys.

    Args:
        keys: their names, each with the known key that it resembles, or an empty text.
    """
    shown_keys = dict(itertools.islice(keys.items(), _MAX_NAMED))
    rest = f" and {len(keys) - len(shown_keys)} more" if len(keys) > len(shown_keys) else ""
    names = [f"{key} (did you mean {near}?)" if near else key for key, near in shown_keys.items()]
    message = f"unknown, without effect: {', '.join(names)}{rest}"
    return {"param": ", ".join(shown_keys), "message": message}


def as_session(settings: SessionSettings) -> dict[str, Any]:
    """Return settings as a client gets them."""
    table = dataclasses.asdict(settings)
    if settings.input.format.rate is None:
        del table["audio"]["input"]["format"]["rate"]
    return table


def _with_turns(settings: SessionSettings, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's table with the turn detection of the model that an update names.

    It is null for a model without voice activity detection, and the default for any other.
    """
    session = as_session(settings)
    model = _table(changes, "audio", "input", "transcription").get("model")
    before = settings.input.transcription.model or ""
    if isinstance(model, str) and _has_turns(model) != _has_turns(before):
        turns = dataclasses.asdict(ServerVad()) if _has_turns(model) else None
        session["audio"]["input"]["turn_detection"] = turns
    return session


def _has_turns(model: str) -> bool:
    return not model.lower().startswith(_WITHOUT_TURNS)


def _without_ignored(changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[SettingWarning]]:
    """Return changes without the settings that have no effect, and warnings of these."""
    session = copy.deepcopy(dict(changes))
    warnings: list[SettingWarning] = []

    def warn(path: str, value: object) -> None:
        warnings.append({"param": path, "message": f"{path} = {shown(value)} has no effect"})

    include = session.get("include")
    if isinstance(include, list) and _LOGPROBS in include:
        warn("session.include", _LOGPROBS)
        session["include"] = [name for name in include if name != _LOGPROBS]
    input = _table(session, "audio", "input")
    turns = _table(input, "turn_detection")
    if turns.get("type") == "semantic_vad":
        warn(f"{_TURNS}.type", turns["type"])
        turns["type"] = "server_vad"
    for path in _IGNORED:
        _, *parents, key = path.split(".")
        value = _table(session, *parents).pop(key, None)
        if value not in (None, False):
            warn(path, value)
    if _table(input, "transcription").get("model", "-") in (None, ""):  # it stays as it is
        del input["transcription"]["model"]
    if input.get("transcription", "-") is None:
        del input["transcription"]
        warn(f"{_INPUT}.transcription", None)
    return session, warnings


def _table(root: Any, *keys: str) -> dict[str, Any]:
    """Return the table at these keys; a new one if there is none."""
    for key in keys:
        root = root.get(key) if isinstance(root, dict) else None
    return root if isinstance(root, dict) else {}


def merged(old: Any, new: Any) -> Any:
    """Merge two tables; the new one's keys replace those of the old one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    table = dict(old)
    for key, value in new.items():
        table[key] = value if key == "format" else merged(old.get(key), value)
    return table
