"""KServe v2's messages as protobuf bytes: requests are looked into without parsing the audio in
them, and made of our own; answers are read as ours.

A `ModelInferRequest` is a few small fields and the tensors' raw bytes, which may be hundreds of
megabytes. Only the fields' tags and lengths are read here; what is not raw is cut out and parsed,
so that it can be checked, and the message itself goes on unchanged.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from tritonclient.grpc import InferResult, service_pb2

from serve.contract.errors import EarshotError
from serve.contract.messages import (
    Finished,
    Priority,
    Request,
    Samples,
    SegmentReady,
    Transcript,
)
from serve.gateway import errors
from serve.gateway.kserve.checks import LENGTH
from serve.gateway.limits import MAX_STRUCTURE_BYTES
from serve.wire import tensors
from serve.wire.tensors import (
    CANCEL_PARAMETER,
    KEY_PARAMETER,
    MODEL,
    PHASES_PARAMETER,
    PRIORITY_PARAMETER,
    SEGMENTS_PARAMETER,
)

_MAX_FIELDS = 256  # of the message itself; a request with every input has less than 40
_RAW_CONTENTS = 7  # number of the field raw_input_contents
_BYTES = 2  # wire type of what has a length
_FIXED_BYTES = {1: 8, 5: 4}  # by wire type
_MAX_VARINT_BYTES = 10

Chunk = bytes | memoryview


@dataclasses.dataclass(frozen=True)
class InferRequestHead:
    """A request without its audio."""

    request: service_pb2.ModelInferRequest  # without raw_input_contents
    structure_bytes: int  # of the message outside its raw tensors
    raw: tuple[memoryview, ...]  # the raw tensors, as they lie in the message


def read_envelope(message: bytes) -> InferRequestHead:
    """Look into a serialised `ModelInferRequest`.

    Raises:
        ApiError: it is none, or has too many or too large fields beside its raw tensors.
    """
    view = memoryview(message)
    structure, raw = bytearray(), []
    for number, begin, payload, end in _fields(view):
        if number == _RAW_CONTENTS:
            raw.append(view[payload:end])
        else:
            structure += view[begin:end]
        if len(structure) > MAX_STRUCTURE_BYTES:
            raise errors.too_large(
                f"the request has more than {MAX_STRUCTURE_BYTES} bytes outside "
                "raw_input_contents; send tensors there"
            )
    try:
        request = service_pb2.ModelInferRequest.FromString(bytes(structure))
    except Exception as error:  # protobuf's DecodeError has no home that all its versions share
        raise _malformed() from error
    return InferRequestHead(request, len(structure), tuple(raw))


def request_parts(
    request: Request, audio: Chunk | None = b"", samples: Sequence[Samples] = ()
) -> list[Chunk]:
    """Serialise a request as a `ModelInferRequest` for any model, in parts; audio is not copied.

    Args:
        request: the options; its audio is ignored, but for samples where none are given.
        audio: the bytes of a file; None: they come beside the request.
        samples: the audio in pieces, float32 (n,), n > 0 each; of a request with samples.

    Raises:
        ApiError: an option's value is one that no tensor can hold.
    """
    try:
        inputs = tensors.request_to_inputs(request)
    except EarshotError as error:
        raise errors.ApiError(error) from error
    message = service_pb2.ModelInferRequest()
    raw: list[Chunk] = []
    for name, tensor in inputs.items():
        spec = tensors.INPUTS[name]
        if name == "AUDIO" and audio is None:
            continue
        shape = [sum(map(len, samples))] if name == "SAMPLES" and samples else tensor.shape
        message.inputs.add(name=name, datatype=spec.datatype, shape=shape)
        if name == "AUDIO" and audio is not None:
            raw += raw_part(LENGTH.pack(len(audio)), audio)
        elif name == "SAMPLES" and samples:
            raw += raw_part(*(memoryview(piece).cast("B") for piece in samples))
        elif spec.datatype == "BYTES":
            raw += raw_part(*(piece for text in tensor for piece in (LENGTH.pack(len(text)), text)))
        else:
            raw += raw_part(tensor.tobytes())
    return [message.SerializeToString(), *raw]


def for_triton(
    parts: Sequence[Chunk],
    key: str,
    segments: bool,
    phases: bool = False,
    priority: Priority = "file",
) -> bytes:
    """Address a serialised request, in parts, to the Triton of this run.

    Fields of protobuf may come in any order, and the last of two with the same name counts.

    Args:
        parts: of the request.
        key: by which it can be cancelled.
        segments: whether it is for the model that answers segment by segment.
        phases: whether the answer is to tell those of its time.
        priority: among the engine's requests.
    """
    named = service_pb2.ModelInferRequest(model_name=MODEL)
    named.parameters[KEY_PARAMETER].string_param = key
    if priority != "file":
        named.parameters[PRIORITY_PARAMETER].string_param = priority
    if segments:
        named.parameters[SEGMENTS_PARAMETER].bool_param = True
    if phases:
        named.parameters[PHASES_PARAMETER].bool_param = True
    return b"".join([*parts, named.SerializeToString()])


def cancel_of(key: str) -> bytes:
    """Make a serialised request that cancels the one of this key."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.parameters[CANCEL_PARAMETER].string_param = key
    return bytes(request.SerializeToString())


def raw_parts(contents: Sequence[Chunk]) -> Iterator[Chunk]:
    """Serialise raw tensors as fields of a request, to come after its others."""
    for content in contents:
        yield from raw_part(content)


def raw_part(*pieces: Chunk) -> Iterator[Chunk]:
    """Serialise one raw tensor as a field; its bytes may come in pieces."""
    yield bytes([_RAW_CONTENTS << 3 | _BYTES]) + _varint_bytes(sum(map(len, pieces)))
    yield from pieces


def read_transcript(answer: service_pb2.ModelInferResponse) -> Transcript:
    """Read the transcript in an answer.

    Raises:
        ApiError: it holds none.
    """
    result = InferResult(answer)
    try:
        return tensors.transcript_from_outputs(result.as_numpy)
    except EarshotError as error:
        raise errors.from_upstream("INTERNAL", tensors.error_to_text(error)) from error


def stream_event(answer: bytes) -> SegmentReady | Finished:
    """Read a `ModelStreamInferResponse`.

    Raises:
        ApiError: it is no answer.
    """
    result = InferResult(service_pb2.ModelStreamInferResponse.FromString(answer).infer_response)
    try:
        if tensors.is_whole(result.as_numpy):
            return Finished(tensors.transcript_from_outputs(result.as_numpy))
        (segment,) = tensors.segments_from_outputs(result.as_numpy)
    except EarshotError as error:
        raise errors.from_upstream("INTERNAL", tensors.error_to_text(error)) from error
    return SegmentReady(segment)


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, begin, begin of the payload and end of each field."""
    position, count = 0, 0
    while position < len(view):
        count += 1
        if count > _MAX_FIELDS:
            raise errors.invalid(f"the request has more than {_MAX_FIELDS} fields")
        begin = position
        tag, position = _varint(view, position)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            payload, end = position, _varint(view, position)[1]
        elif kind == _BYTES:
            length, payload = _varint(view, position)
            end = payload + length
        elif kind in _FIXED_BYTES:
            payload, end = position, position + _FIXED_BYTES[kind]
        else:
            raise _malformed()
        if end > len(view) or (number == _RAW_CONTENTS and kind != _BYTES):
            raise _malformed()
        yield number, begin, payload, end
        position = end


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Read a number, and return it and the position after it."""
    value = 0
    for index, byte in enumerate(view[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise _malformed()


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _malformed() -> errors.ApiError:
    return errors.invalid("the message is no ModelInferRequest of KServe v2")
