"""The events of OpenAI's transcription sessions, of clients and of the server.

They conform to the types of the package `openai` (`openai.types.realtime`).
"""

import binascii
import secrets
import time
from collections.abc import Sequence
from typing import Any

from serve.contract.codec import parse_json
from serve.contract.errors import shown
from serve.gateway.edge.budget import EVENT_S, JSON_S_PER_BYTE
from serve.gateway.errors import ApiError
from serve.gateway.live.settings import EventError, SessionSettings, SettingWarning, as_session

Event = dict[str, Any]

MAX_SESSION_S = 3600.0
CONTENT = 0
"""The index of the only part of an item."""
BUFFER = "input_audio_buffer"
"""The beginning of the types of events about audio that is not an item yet."""
_TRANSCRIPTION = "conversation.item.input_audio_transcription"
OBJECT = "realtime.transcription_session"
"""The type of a session, as an object of OpenAI's API."""
DELTA = f"{_TRANSCRIPTION}.delta"
"""The type of an event of final text."""
_MAX_CHARS = 100_000  # an event without audio
_MARKS = ',"{['  # JSON has one for each key and value
_MAX_MARKS = 10_000  # in an event: parsing that many takes 15 ms
_MARK_S = 2e-6  # the event loop's time for each mark
_AUDIO_MARKS = 1000  # maximum in an event with audio; base64 has none
_MAX_ID_CHARS = 512  # a client's event_id
_SPACES = " \t\r\n\v\f"
_TO_BASE64 = str.maketrans("-_", "+/", _SPACES)  # from the alphabet of URLs, and without spaces
UPDATE, APPEND, COMMIT = "session.update", f"{BUFFER}.append", f"{BUFFER}.commit"
_KEYS = {UPDATE: ("session",), APPEND: ("audio",), COMMIT: (), f"{BUFFER}.clear": ()}
"""By type: the keys that a client's event must have beside `type`."""


def cost_s(text: str) -> float:
    """Estimate the seconds of the event loop that parsing a client's event takes."""
    return EVENT_S + JSON_S_PER_BYTE * len(text) + _MARK_S * min(_marks(text), _MAX_MARKS)


def _marks(text: str) -> int:
    return sum(map(text.count, _MARKS))


def read_event(text: str) -> Event:
    """Parse a client's event; see `check_event`.

    Raises:
        EventError: it is no JSON object, or too large.
    """
    # Marks are counted first: parsing a million keys would hold up the event loop for a second.
    marks, long = _marks(text), len(text) > _MAX_CHARS
    if long and marks > _AUDIO_MARKS:
        raise _too_long(len(text))
    if marks > _MAX_MARKS:
        found = f"the message has {marks} commas, quotation marks and opening brackets"
        expected = f"expected at most {_MAX_MARKS}: send fewer settings"
        raise EventError(f"{found}; {expected}", "invalid_event")
    try:
        table = parse_json(text)
    except ValueError as error:
        raise EventError(f"the message is not JSON: {error}", "invalid_json") from None
    if not isinstance(table, dict):
        raise EventError(f"the message is {shown(table)}; expected an object", "invalid_event")
    return table


def _too_long(chars: int) -> EventError:
    message = f"the message has {chars} characters; expected at most {_MAX_CHARS}, but for {APPEND}"
    return EventError(message, "invalid_event")


def check_event(event: Event, chars: int) -> None:
    """Check the type of a client's event, and that it has the keys of this type.

    Args:
        event: the event.
        chars: the text's length.

    Raises:
        EventError: it is not an event of a transcription session, or too long.
    """
    if chars > _MAX_CHARS and event.get("type") != APPEND:
        raise _too_long(chars)
    kind, event_id = event.get("type"), event.get("event_id")
    if not isinstance(kind, str) or kind not in _KEYS:
        message = f"type = {shown(kind)}; a transcription session takes {', '.join(_KEYS)}"
        raise EventError(message, "invalid_value", "type")
    if not (event_id is None or (isinstance(event_id, str) and len(event_id) <= _MAX_ID_CHARS)):
        message = f"event_id = {shown(event_id)}; expected at most {_MAX_ID_CHARS} characters"
        raise EventError(message, "invalid_value", "event_id")
    for key in _KEYS[kind]:
        if key not in event:
            raise EventError(f"{kind}: {key} is missing", "missing_required_parameter", key)


def read_audio(text: object) -> bytes:
    """Decode the audio of an `input_audio_buffer.append`.

    Args:
        text: base64 in either alphabet, with or without line breaks and padding.

    Raises:
        EventError: it is no such text.
    """
    if not isinstance(text, str):
        raise EventError(f"audio = {shown(text)}; expected base64", "invalid_value", "audio")
    text = text.translate(_TO_BASE64).rstrip("=")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:
        raise EventError(f"audio is not base64: {error}", "invalid_value", "audio") from None


def new_id(prefix: str) -> str:
    """Return a unique id."""
    return f"{prefix}_{secrets.token_hex(10)}"


def error(error: ApiError, code: str | None, event_id: str | None = None) -> Event:
    """Return the event of an error.

    Args:
        error: the error.
        code: OpenAI's name of such errors.
        event_id: the id of the client's event that caused it.
    """
    return event("error", error={**_error(error, code), "event_id": event_id})


def session(kind: str, id: str, settings: SessionSettings) -> Event:
    """Return the event of a session that was created or updated."""
    expires_at = round(time.time() + MAX_SESSION_S)
    about = {"id": id, "object": OBJECT, "expires_at": expires_at}
    return event(kind, session={**about, **as_session(settings)})


def with_warnings(table: Event, warnings: Sequence[SettingWarning]) -> Event:
    """Add warnings in a field of ours, since strict clients know no event for them."""
    return {**table, "warnings": warnings} if warnings else table


def committed(item_id: str, previous_id: str | None) -> list[Event]:
    """Return the events of an utterance that has ended and becomes an item."""
    item = {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }
    return [
        event(f"{BUFFER}.committed", item_id=item_id, previous_item_id=previous_id),
        event("conversation.item.added", item=item, previous_item_id=previous_id),
        event("conversation.item.done", item=item, previous_item_id=previous_id),
    ]


def completed(item_id: str, transcript: str, seconds: float) -> Event:
    """Return the event of the whole text of an utterance."""
    about = {"item_id": item_id, "content_index": CONTENT, "transcript": transcript}
    usage = {"type": "duration", "seconds": round(seconds, 3)}
    return event(f"{_TRANSCRIPTION}.completed", **about, usage=usage)


def failed(item_id: str, error: ApiError) -> Event:
    """Return the event of an utterance with missing or incomplete text."""
    about = {"item_id": item_id, "content_index": CONTENT}
    return event(f"{_TRANSCRIPTION}.failed", **about, error=_error(error, error.reason))


def _error(error: ApiError, code: str | None) -> Event:
    kind, message = error.status.kind, str(error)
    return {"type": kind, "code": code, "message": message, "param": error.param}


def event(kind: str, **fields: Any) -> Event:
    """Return an event of this type with a new id."""
    return {"type": kind, "event_id": new_id("event"), **fields}
