"""The messages of the relay as bytes, and back: JSON and raw tensors, without code in them.

A frame is two lengths (unsigned, 4 bytes, big-endian: of the JSON, of all that follows it), the
JSON, and one tensor's bytes after the other as the JSON lists them. Reading is strict: whatever a
frame says is checked against types, limits and `serve.triton.wire.INPUTS` before it is used.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from serve.codec import from_json, to_json
from serve.errors import EarshotError, RequestError, shown
from serve.messages import Failed, Finished, Segment, SegmentReady, TranscriberEvent, Transcript
from serve.triton.wire import INPUTS, NUMPY_TYPES, Tensor, error_from_text, error_to_text

LENGTHS = struct.Struct(">II")
MAX_JSON_BYTES = 2**26  # an hour's transcript takes less than one
MAX_KEY_CHARS = 64

Key = Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)]
Id = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = bytes | memoryview


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of every connection: keys that begin with `owner` end with it."""

    owner: Key
    kind: Literal["hello"] = "hello"


@dataclasses.dataclass(frozen=True)
class Start:
    """A request with these inputs; its events carry its id, which the sender has chosen."""

    id: int
    inputs: Mapping[str, Tensor]
    key: str | None = None


@dataclasses.dataclass(frozen=True)
class Cancel:
    """End the request that came through this connection with this id."""

    id: Id
    kind: Literal["cancel"] = "cancel"


@dataclasses.dataclass(frozen=True)
class CancelKey:
    """End the request that has this key, whatever way it came, or will come."""

    key: Key
    kind: Literal["cancel_key"] = "cancel_key"


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened to a request."""

    id: int
    event: TranscriberEvent


Message = Hello | Start | Cancel | CancelKey | Event

# ---------------------------------------------------------------- what stands in the JSON


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(max_length=8)]
    bytes: Annotated[int, Field(ge=0, lt=2**32)]


@dataclasses.dataclass(frozen=True)
class _Start:
    id: Id
    key: Key | None
    tensors: Annotated[tuple[_Tensor, ...], Field(max_length=len(INPUTS))]
    kind: Literal["start"] = "start"


@dataclasses.dataclass(frozen=True)
class _Segment:
    id: Id
    segment: Segment
    kind: Literal["segment"] = "segment"


@dataclasses.dataclass(frozen=True)
class _Finished:
    id: Id
    transcript: Transcript
    kind: Literal["finished"] = "finished"


@dataclasses.dataclass(frozen=True)
class _Failed:
    id: Id
    error: str  # as `serve.triton.wire` puts errors
    kind: Literal["failed"] = "failed"


_Head = Hello | Cancel | CancelKey | _Start | _Segment | _Finished | _Failed


@dataclasses.dataclass(frozen=True)
class _AnyHead:
    """What `serve.codec` reads: the union needs a field to stand in."""

    message: Annotated[_Head, Field(discriminator="kind")]


def check_inputs(inputs: Mapping[str, Tensor], max_bytes: int) -> None:
    """Refuse inputs at which the other side would hang up, and so end other requests.

    Raises:
        RequestError: they are not the models', or have more than `max_bytes` together.
    """
    tensors = _listed(inputs)
    for tensor in tensors:
        _check_fit(tensor)
    size = sum(tensor.bytes for tensor in tensors)
    if size > max_bytes:
        raise RequestError(
            f"the request has {size} bytes; expected at most {max_bytes}: send less audio at a time"
        )


def encode(message: Message) -> list[Bytes]:
    """A message as the parts of a frame; a request's inputs have passed `check_inputs`.

    Tensors are not copied, so they must not change before the parts are sent.
    """
    text = _to_json(message)
    if len(text) > MAX_JSON_BYTES and isinstance(message, Event):
        error = EarshotError(f"the answer has {len(text)} bytes; send less audio at a time")
        text = _to_json(Event(message.id, Failed(error)))
    tensors = []
    if isinstance(message, Start):
        tensors = [_to_bytes(tensor) for tensor in message.inputs.values()]
    return [LENGTHS.pack(len(text), sum(map(len, tensors))), text, *tensors]


def _to_json(message: Message) -> bytes:
    head: _Head
    if isinstance(message, Start):
        head = _Start(message.id, message.key, _listed(message.inputs))
    elif isinstance(message, Event):
        head = _event_head(message.id, message.event)
    else:
        head = message
    return to_json(_AnyHead(head)).encode()


def _listed(inputs: Mapping[str, Tensor]) -> tuple[_Tensor, ...]:
    return tuple(
        _Tensor(name, tensor.shape, len(_to_bytes(tensor))) for name, tensor in inputs.items()
    )


def _event_head(id: int, event: TranscriberEvent) -> _Head:
    if isinstance(event, SegmentReady):
        return _Segment(id, event.segment)
    if isinstance(event, Finished):
        return _Finished(id, event.transcript)
    error = event.error
    if not isinstance(error, EarshotError):
        error = EarshotError(f"internal error: {shown(error)}")
    return _Failed(id, error_to_text(error))


def _to_bytes(tensor: Tensor) -> Bytes:
    """BYTES tensors of the models hold one element, so its length is the tensor's."""
    if tensor.dtype == np.object_:
        return bytes(tensor[0])
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def decode(text: Bytes, tensors: memoryview) -> Message:
    """The message that a frame's JSON and the bytes after it stand for; tensors are copies.

    Raises:
        EarshotError: it is none.
    """
    head = from_json(_AnyHead, bytes(text), "a frame of the relay", error=EarshotError).message
    if not isinstance(head, _Start) and len(tensors):
        raise EarshotError(f"{len(tensors)} bytes follow the message {head.kind}; expected none")
    match head:
        case _Start(id, key, listed):
            return Start(id, _tensors(listed, tensors), key)
        case _Segment(id, segment):
            return Event(id, SegmentReady(segment))
        case _Finished(id, transcript):
            return Event(id, Finished(transcript))
        case _Failed(id, error):
            return Event(id, Failed(error_from_text(error, "")))
        case _:
            return head


def _tensors(listed: Sequence[_Tensor], data: memoryview) -> dict[str, Tensor]:
    size = sum(tensor.bytes for tensor in listed)
    if size != len(data) or len({tensor.name for tensor in listed}) != len(listed):
        names = ", ".join(tensor.name for tensor in listed)
        raise EarshotError(
            f"a request lists tensors {names[:200]} of {size} bytes, but holds {len(data)}; "
            "expected each name once, and as many"
        )
    inputs, begin = {}, 0
    for tensor in listed:
        _check_fit(tensor)
        inputs[tensor.name] = _from_bytes(tensor, data[begin : begin + tensor.bytes])
        begin += tensor.bytes
    return inputs


def _check_fit(tensor: _Tensor) -> None:
    """Refuse what is no input of the models."""
    spec = INPUTS.get(tensor.name)
    if spec is None:
        raise RequestError(f"no input is named {shown(tensor.name)}")
    fits = len(spec.dims) == len(tensor.shape) and all(
        expected in (-1, found) for expected, found in zip(spec.dims, tensor.shape, strict=True)
    )
    if spec.datatype != "BYTES":
        item_bytes = np.dtype(NUMPY_TYPES[spec.datatype]).itemsize
        fits = fits and tensor.bytes == math.prod(tensor.shape) * item_bytes
    if not fits:
        raise RequestError(
            f"{tensor.name} has shape {list(tensor.shape)} in {tensor.bytes} bytes; "
            f"expected {spec.datatype} of shape {list(spec.dims)}"
        )


def _from_bytes(tensor: _Tensor, data: memoryview) -> Tensor:
    datatype = INPUTS[tensor.name].datatype
    if datatype == "BYTES":
        return np.array([bytes(data)], np.object_)
    return np.frombuffer(data, NUMPY_TYPES[datatype]).reshape(tensor.shape).copy()
