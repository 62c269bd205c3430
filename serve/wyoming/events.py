"""Events of the Wyoming protocol: a line of JSON, optional further JSON, and a payload.

    {"type": "audio-chunk", "data": {…}, "data_length": 49, "payload_length": 2048}

`data` is in the line, in the JSON after it, or partly in both.
"""

import asyncio
import dataclasses
from typing import Annotated, Any, TypeVar

from pydantic import Field

from serve.contract.codec import from_json, to_json
from serve.contract.errors import RequestError

MAX_LINE_BYTES = 2**16
MAX_DATA_BYTES = 2**16
MAX_PAYLOAD_BYTES = 2**20

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class WyomingEvent:
    """A message of the protocol."""

    type: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    payload: bytes = b""

    def write(self) -> bytes:
        """Return the bytes of the event."""
        data = to_json(self.data).encode()
        head = {"type": self.type, "data_length": len(data), "payload_length": len(self.payload)}
        return b"".join((to_json(head).encode(), b"\n", data, self.payload))


def data_of(event: WyomingEvent, kind: type[T]) -> T:
    """Read an event's data as a dataclass; unknown keys are ignored.

    Raises:
        RequestError: a value is missing or wrong.
    """
    where = event.type[:60]
    return from_json(kind, to_json(event.data), where, error=RequestError, extra="ignore")


@dataclasses.dataclass(frozen=True)
class _EventHeader:
    type: str
    data: dict[str, Any] | None = None
    data_length: Annotated[int, Field(ge=0, le=MAX_DATA_BYTES)] | None = None
    payload_length: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_BYTES)] | None = None


async def read_event(reader: asyncio.StreamReader) -> WyomingEvent | None:
    """Read the next event; return None if the client has disconnected.

    Args:
        reader: a reader with the limit `MAX_LINE_BYTES`.

    Raises:
        RequestError: the input is not an event, or too large.
    """
    try:
        line = await reader.readline()
        if not line:
            return None
        head = from_json(_EventHeader, line, "an event", error=RequestError, extra="ignore")
        data = head.data or {}
        if head.data_length:
            text = await reader.readexactly(head.data_length)
            where = f"data of {head.type[:60]}"
            data |= from_json(dict[str, Any], text, where, error=RequestError)
        payload = await reader.readexactly(head.payload_length or 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except ValueError as error:  # `readline` raises it if the line is too long
        raise RequestError(
            f"an event's line is longer than {MAX_LINE_BYTES} bytes; expected JSON and a newline"
        ) from error
    return WyomingEvent(head.type, data, payload)
