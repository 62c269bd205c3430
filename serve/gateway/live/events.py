"""The events of OpenAI's transcription sessions: what a client may say, and what it is told.

The types of the package `openai` (`openai.types.realtime`) are the measure.
"""

import binascii
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve.contract.codec import parse_json
from serve.contract.errors import shown
from serve.gateway.edge.budget import EVENT_S, JSON_S_PER_BYTE
from serve.gateway.errors import ApiError
from serve.gateway.live.settings import (
    HYPOTHESIS,
    SessionSettings,
    SettingError,
    SettingWarning,
    as_session,
    updated,
)

Event = dict[str, Any]

_CONTENT = 0  # index of the only part that an item has
_TRANSCRIPTION = "conversation.item.input_audio_transcription"
OBJECT = "realtime.transcription_session"
"""The type of a session, as an object of OpenAI's API."""
DELTA = f"{_TRANSCRIPTION}.delta"
"""Type of an event of final text."""
_MAX_CHARS = 100_000  # of an event but for audio
_MARKS = ',"{['  # of which JSON has one for each key and value
_MAX_MARKS = 10_000  # of them at most in an event: reading that many takes 15 ms
_MARK_S = 2e-6  # of the event loop, for each of them
_AUDIO_MARKS = 1000  # of them at most in an event of audio, whose base64 has none
_MAX_ID_CHARS = 512  # of a client's event_id
_MAX_KEY_CHARS = 60  # of an unknown key, where a warning names it
_SPACES = " \t\r\n\v\f"
_TO_BASE64 = str.maketrans("-_", "+/", _SPACES)  # from the alphabet of URLs, and without spaces
_APPEND = "input_audio_buffer.append"
UPDATE = "session.update"
_KEYS = {
    UPDATE: ("session",),
    _APPEND: ("audio",),
    "input_audio_buffer.commit": (),
    "input_audio_buffer.clear": (),
}
"""Keys that a client's events must have, besides `type` and perhaps `event_id`."""
_MAY = {"input_audio_buffer.commit": ("final",)}
"""Keys that mean nothing here and need no warning: vLLM's clients send them."""


class EventError(Exception):
    """A client's event is wrong, or cannot be done now.

    Args:
        message: what was found, what was expected.
        code: what OpenAI calls such errors.
        param: what in the event is wrong.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.event_id: str | None = None


@dataclasses.dataclass(frozen=True)
class ClientEvent:
    """A client's event."""

    type: str
    event_id: str | None
    fields: Mapping[str, Any]  # those of `_KEYS`; their values are not checked
    unknown: tuple[str, ...] = ()  # its other keys


def cost_s(text: str) -> float:
    """Estimate the seconds of the event loop that a client's event takes, before it is read."""
    return EVENT_S + JSON_S_PER_BYTE * len(text) + _MARK_S * min(_marks(text), _MAX_MARKS)


def _marks(text: str) -> int:
    return sum(map(text.count, _MARKS))


def read_event(text: str) -> ClientEvent:
    """Read what a client says.

    Raises:
        EventError: it is not an event of a transcription session.
    """
    # Counted first, for reading a million keys takes a second of everybody's.
    marks = _marks(text)
    if len(text) > _MAX_CHARS and marks > _AUDIO_MARKS:
        raise _too_long(text)
    if marks > _MAX_MARKS:
        raise EventError(
            f"the message has {marks} commas, quotation marks and opening brackets; expected at "
            f"most {_MAX_MARKS}: send fewer settings",
            "invalid_event",
        )
    try:
        event = parse_json(text)
    except ValueError as error:
        raise EventError(f"the message is not JSON: {error}", "invalid_json") from None
    if not isinstance(event, dict):
        raise EventError(f"the message is {shown(event)}; expected an object", "invalid_event")
    event_id = event.pop("event_id", None)
    try:
        if len(text) > _MAX_CHARS and event.get("type") != _APPEND:
            raise _too_long(text)
        return _checked(event, event_id)
    except EventError as error:
        error.event_id = event_id if isinstance(event_id, str) else None
        raise


def _too_long(text: str) -> EventError:
    return EventError(
        f"the message has {len(text)} characters; expected at most {_MAX_CHARS}, but for {_APPEND}",
        "invalid_event",
    )


def _checked(event: Event, event_id: object) -> ClientEvent:
    kind = event.pop("type", None)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise EventError(
            f"type = {shown(kind)}; a transcription session takes {', '.join(_KEYS)}",
            "invalid_value",
            "type",
        )
    if not (event_id is None or (isinstance(event_id, str) and len(event_id) <= _MAX_ID_CHARS)):
        raise EventError(
            f"event_id = {shown(event_id)}; expected at most {_MAX_ID_CHARS} characters",
            "invalid_value",
            "event_id",
        )
    for key in _KEYS[kind]:
        if key not in event:
            raise EventError(f"{kind}: {key} is missing", "missing_required_parameter", key)
    unknown = (str(key)[:_MAX_KEY_CHARS] for key in event if key not in _KEYS[kind])
    may = _MAY.get(kind, ())
    return ClientEvent(kind, event_id, event, tuple(key for key in unknown if key not in may))


def read_update(
    event: ClientEvent, before: SessionSettings, check_model: Callable[[str], object], begun: bool
) -> tuple[SessionSettings, list[SettingWarning]]:
    """Read an update: the session after it, and what of it has no effect.

    Args:
        event: the event.
        before: what the session is.
        check_model: refuses names of models that are not served.
        begun: whether audio has come.

    Raises:
        EventError: it says what is wrong or cannot be done; nothing is changed.
    """
    try:
        changes = event.fields["session"]
        if not isinstance(changes, dict):
            raise SettingError("session is no object", "session", "invalid_value")
        after, warnings = updated(before, changes)
        _check_change(after, before, check_model, begun)
    except SettingError as error:
        raise EventError(str(error), error.code, error.param) from None
    return after, list(warnings)


def _check_change(
    after: SessionSettings,
    before: SessionSettings,
    check_model: Callable[[str], object],
    begun: bool,
) -> None:
    """Refuse what a server or a stream cannot become."""
    if (name := after.input.transcription.model) is not None:
        try:
            check_model(name)
        except ApiError as refusal:
            param = "session.audio.input.transcription.model"
            raise SettingError(str(refusal), param, "model_not_found") from None
    if after.input.format != before.input.format and begun:
        raise SettingError(
            "the format cannot change once audio has come; open another session",
            "session.audio.input.format",
            "invalid_value",
        )


def read_audio(text: object) -> bytes:
    """Read the bytes of an `input_audio_buffer.append`.

    Args:
        text: base64 in either alphabet, with or without line breaks and padding.

    Raises:
        EventError: it is something else.
    """
    if not isinstance(text, str):
        raise EventError(f"audio = {shown(text)}; expected base64", "invalid_value", "audio")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # in most messages there is nothing to mend
        text = text.translate(_TO_BASE64).rstrip("=")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:
        raise EventError(f"audio is not base64: {error}", "invalid_value", "audio") from None


def new_id(prefix: str) -> str:
    """Make a name that nothing else has."""
    return f"{prefix}_{secrets.token_hex(10)}"


def error(error: EventError, event_id: str | None = None, kind: str = "") -> Event:
    """Tell that an event could not be done, or that the session cannot go on.

    Args:
        error: what went wrong.
        event_id: the client's, of its event that is at fault.
        kind: of the error, where it is not the client's.
    """
    return _event(
        "error",
        error={
            "type": kind or "invalid_request_error",
            "code": error.code,
            "message": str(error),
            "param": error.param,
            "event_id": event_id,
        },
    )


def session(event: str, id: str, settings: SessionSettings, expires_s: float) -> Event:
    """Tell of a session, created or updated; it expires so many seconds from now."""
    known = as_session(settings)
    expires_at = round(time.time() + expires_s)
    return _event(event, session={"id": id, "object": OBJECT, "expires_at": expires_at, **known})


def with_warnings(table: Event, warnings: Sequence[SettingWarning]) -> Event:
    """Add warnings in a field of ours, if there are any: strict clients know no event of them."""
    told = [dataclasses.asdict(warning) for warning in warnings]
    return {**table, "warnings": told} if told else table


def speech_started(item_id: str, at_ms: int) -> Event:
    """Tell that somebody speaks; the utterance's audio begins at that time of the stream."""
    return _event("input_audio_buffer.speech_started", item_id=item_id, audio_start_ms=at_ms)


def speech_stopped(item_id: str, at_ms: int) -> Event:
    """Tell that nobody speaks any more; the utterance ends at that time of the stream."""
    return _event("input_audio_buffer.speech_stopped", item_id=item_id, audio_end_ms=at_ms)


def committed(item_id: str, previous_id: str | None) -> list[Event]:
    """Tell that an utterance has ended, and is an item now."""
    item = {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
    return [
        _event("input_audio_buffer.committed", item_id=item_id, previous_item_id=previous_id),
        _event("conversation.item.added", item=item, previous_item_id=previous_id),
        _event("conversation.item.done", item=item, previous_item_id=previous_id),
    ]


def cleared() -> Event:
    """Tell that what was not committed is forgotten."""
    return _event("input_audio_buffer.cleared")


def delta(item_id: str, text: str) -> Event:
    """Tell more final text of an utterance."""
    return _event(DELTA, item_id=item_id, content_index=_CONTENT, delta=text)


def hypothesis(item_id: str, text: str) -> Event:
    """Tell what is heard beyond the deltas; the next one takes its place."""
    return _event(HYPOTHESIS, item_id=item_id, text=text)


def completed(item_id: str, transcript: str, seconds: float) -> Event:
    """Tell the whole text of an utterance of so many seconds."""
    return _event(
        f"{_TRANSCRIPTION}.completed",
        item_id=item_id,
        content_index=_CONTENT,
        transcript=transcript,
        usage={"type": "duration", "seconds": round(seconds, 3)},
    )


def failed(item_id: str, message: str, code: str | None, kind: str) -> Event:
    """Tell that an utterance has no text, or not all of it."""
    return _event(
        f"{_TRANSCRIPTION}.failed",
        item_id=item_id,
        content_index=_CONTENT,
        error={"type": kind, "code": code, "message": message, "param": None},
    )


def _event(kind: str, **fields: Any) -> Event:
    return {"type": kind, "event_id": new_id("event"), **fields}
