"""KServe v2's messages: checked and read without parsing their audio, and made of our requests.

A `ModelInferRequest` is a few small fields and the tensors' raw bytes, which may be hundreds
of megabytes. This module reads only the fields' tags and lengths. It cuts out the fields that
are not raw, parses and checks them, so that Triton gets no wrong request. The message itself goes
on unchanged.
"""

import math
import reprlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.internal import decoder, encoder, wire_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from serve.contract.codec import from_json
from serve.contract.errors import EarshotError
from serve.contract.messages import Phase, Priority, Request, Samples, Segment, Timings, Transcript
from serve.gateway import errors
from serve.gateway.limits import MAX_STRUCTURE_BYTES
from serve.gateway.models import Target
from serve.gateway.target import HEAD_BYTES, AudioLength, audio_of_file
from serve.speech.rate import SAMPLE_RATE
from serve.wire import tensors

LENGTH = struct.Struct("<I")
"""The length before each element of a BYTES tensor."""
EMPTY_FINAL = "triton_enable_empty_final_response"
SERVER_METADATA = {"name": "earshot", "version": "1", "extensions": ["binary_tensor_data"]}

_MAX_FIELDS = 256  # of the message itself; a request with every input has less than 40
_RAW_CONTENTS = 7  # number of the field raw_input_contents
_BYTES = wire_format.WIRETYPE_LENGTH_DELIMITED
_FIXED_BYTES = {wire_format.WIRETYPE_FIXED64: 8, wire_format.WIRETYPE_FIXED32: 4}
_CONTENTS = {
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT32": "int_contents",
    "BOOL": "bool_contents",
}
Chunk = bytes | memoryview
"""Bytes of a serialised message."""


# ------------------------------------------------------------ reading requests


def read_head(message: bytes) -> tuple[ModelInferRequest, Sequence[memoryview], int]:
    """Read a serialised `ModelInferRequest` without copying its tensors.

    Returns:
        The request without raw_input_contents; the raw_input_contents, as views of the message;
        and the number of the message's other bytes.

    Raises:
        ApiError: 400 or 413, it is malformed, or has too many or too large fields beside its raw
            tensors.
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
                f"more than {MAX_STRUCTURE_BYTES} bytes besides raw tensors; send tensors as these"
            )
    return parse(ModelInferRequest, bytes(structure)), raw, len(structure)


def parse(kind: Any, message: bytes) -> Any:
    """Parse a serialised message of the protobuf class `kind`.

    Raises:
        ApiError: 400, it is malformed.
    """
    try:
        return kind.FromString(message)
    except (DecodeError, ValueError) as error:
        raise _malformed(kind.DESCRIPTOR.name) from error


def audio_of_tensors(request: ModelInferRequest, contents: Sequence[Chunk]) -> AudioLength | None:
    """Return the length of a checked request's audio; None: it has no audio.

    Args:
        request: the request without its raw tensors.
        contents: the bytes of each input, see `check_request`.
    """
    inputs = dict(zip((tensor.name for tensor in request.inputs), contents, strict=True))
    if (samples := inputs.get("SAMPLES")) is not None:
        rate = inputs.get("SAMPLE_RATE", np.int32(SAMPLE_RATE).tobytes())  # without, it is rejected
        count = len(samples) / np.dtype(np.float32).itemsize
        return AudioLength(count / max(1, int(np.frombuffer(rate, np.int32)[0])))
    if (audio := inputs.get("AUDIO")) is None:
        return None
    file = audio[LENGTH.size :]
    return audio_of_file(bytes(file[:HEAD_BYTES]), len(file))


def model_metadata(target: Target) -> dict[str, Any]:
    """Return the inputs and outputs of a model, as JSON and `ModelMetadataResponse` have them."""
    described: dict[str, Any] = {"name": target.client_name, "versions": ["1"]}
    described["platform"] = "python"
    for kind, specs in (("inputs", tensors.INPUTS), ("outputs", tensors.OUTPUTS)):
        described[kind] = [
            {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.dims)}
            for spec in specs.values()
        ]
    return described


# ------------------------------------------------------------ checking requests


def check_request(request: ModelInferRequest, raw: Sequence[Chunk], streamed: bool) -> list[Chunk]:
    """Reject a request that the models cannot answer; return the raw bytes of each input.

    Args:
        request: the request without its raw tensors.
        raw: the raw tensors in the order of the inputs; empty if the inputs hold their values.
        streamed: whether several answers can be sent.

    Raises:
        ApiError: 400, the message names the wrong part and the expected one.
    """
    _check_parameters("the request", request.parameters, (EMPTY_FINAL,) if streamed else ())
    _check_names("inputs", request.inputs, tensors.INPUTS)
    _check_names("outputs", request.outputs, tensors.OUTPUTS)
    if raw and len(raw) != len(request.inputs):
        raise errors.invalid(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents; "
            "expected one for each, or none"
        )
    contents: list[Chunk] = []
    for index, tensor in enumerate(request.inputs):
        _check_type(tensor)
        if raw and tensor.HasField("contents"):
            raise errors.invalid(f"{tensor.name} has contents beside raw_input_contents")
        values = getattr(tensor.contents, _CONTENTS[tensor.datatype])
        contents.append(raw[index] if raw else raw_values(tensor.datatype, values))
        _check_size(tensor, contents[index])
    return contents


def _check_parameters(where: str, parameters: Iterable[str], known: Collection[str] = ()) -> None:
    """Reject parameters that are not `known`: they would have no effect."""
    for name in parameters:
        if name not in known:
            raise errors.invalid(
                f"{where} has the parameter {reprlib.repr(name)}; expected "
                f"{', '.join(known) or 'none'}: leave it out, and send tensors themselves"
            )


def _check_names(kind: str, named: Sequence[Any], known: Mapping[str, tensors.TensorSpec]) -> None:
    """Reject inputs or outputs with unknown or repeated names, or with parameters."""
    names = [one.name for one in named]
    for one in named:
        if one.name not in known:
            expected = f"there are {', '.join(known)}"
            raise errors.invalid(f"{kind}: no {reprlib.repr(one.name)}; {expected}")
        _check_parameters(one.name, one.parameters)
    if len(set(names)) != len(names):
        raise errors.invalid(f"{kind}: {', '.join(names[:40])}; expected each name once")


def _check_type(tensor: Any) -> None:
    """Reject a datatype or shape that is not the input's."""
    spec, shape = tensors.INPUTS[tensor.name], tensor.shape
    fits = len(shape) == 1 and shape[0] >= 0 and spec.dims[0] in (-1, shape[0])
    if tensor.datatype != spec.datatype or not fits:
        found = f"{reprlib.repr(tensor.datatype)} of shape {reprlib.repr(list(shape))}"
        expected = f"{spec.datatype} of shape {list(spec.dims)}"
        raise errors.invalid(f"{tensor.name} is {found}; expected {expected}")


def _check_size(tensor: Any, content: Chunk) -> None:
    """Reject an input beyond its limit, or with another number of bytes than its shape says."""
    spec, count, found = tensors.INPUTS[tensor.name], math.prod(tensor.shape), len(content)
    if spec.max_bytes is not None and found > (limit := spec.max_bytes + LENGTH.size):
        raise errors.invalid(f"{tensor.name} has {found} bytes; expected at most {limit}")
    if spec.datatype == "BYTES":
        size = _texts_bytes(content, count)
    else:
        size = count * np.dtype(tensors.NUMPY_TYPES[spec.datatype]).itemsize
    if found != size:
        expected = f"{size} for {spec.datatype} of shape {list(tensor.shape)}"
        raise errors.invalid(f"{tensor.name} has {found} bytes; expected {expected}")


def _texts_bytes(content: Chunk, count: int) -> int:
    """Return the bytes that the elements of a BYTES tensor take: each is a length and its bytes."""
    size = 0
    for _ in range(count):
        if len(content) < size + LENGTH.size:
            return size + LENGTH.size
        size += LENGTH.size + LENGTH.unpack_from(content, size)[0]
    return size


# ------------------------------------------------------------ making requests


def request_parts(
    request: Request, audio: Chunk | None = b"", samples: Sequence[Samples] = ()
) -> list[Chunk]:
    """Serialise a request as a `ModelInferRequest` without a model's name, in chunks.

    Audio is not copied.

    Args:
        request: the options; its audio is ignored, except for samples if `samples` is empty.
        audio: the bytes of a file; None: a file beside the request has them.
        samples: pieces of the audio of a request with samples, float32 (n,), n > 0.

    Raises:
        ApiError: 400, no tensor can hold an option's value.
    """
    try:
        inputs = tensors.request_to_inputs(request)
    except EarshotError as error:
        raise errors.ApiError(error) from error
    message = ModelInferRequest()
    raw: list[Chunk] = []
    for name, tensor in inputs.items():
        spec = tensors.INPUTS[name]
        if name == "AUDIO" and audio is None:
            continue
        shape = [sum(map(len, samples))] if name == "SAMPLES" and samples else tensor.shape
        message.inputs.add(name=name, datatype=spec.datatype, shape=shape)
        if name == "AUDIO" and audio is not None:
            raw += raw_chunks(LENGTH.pack(len(audio)), audio)
        elif name == "SAMPLES" and samples:
            raw += raw_chunks(*(piece.data.cast("B") for piece in samples))
        else:
            raw += raw_chunks(raw_values(spec.datatype, tensor))
    return [message.SerializeToString(), *raw]


def for_triton(
    parts: Sequence[Chunk],
    key: str,
    segments: bool,
    phases: bool = False,
    priority: Priority = "file",
) -> bytes:
    """Address a serialised request to the Triton of this run.

    Fields of protobuf may come in any order, and the last of two with the same name counts.

    Args:
        parts: the chunks of the request.
        key: the key with which it can be cancelled.
        segments: whether it is to be answered segment by segment.
        phases: whether the answer lists the request's phases.
        priority: its priority among the engine's requests.
    """
    named = ModelInferRequest(model_name=tensors.MODEL)
    named.parameters[tensors.KEY_PARAMETER].string_param = key
    if priority != "file":
        named.parameters[tensors.PRIORITY_PARAMETER].string_param = priority
    if segments:
        named.parameters[tensors.SEGMENTS_PARAMETER].bool_param = True
    if phases:
        named.parameters[tensors.PHASES_PARAMETER].bool_param = True
    return b"".join([*parts, named.SerializeToString()])


def cancel_of(key: str) -> bytes:
    """Serialise the request that cancels the request of this key."""
    request = ModelInferRequest(model_name=tensors.MODEL)
    request.parameters[tensors.CANCEL_PARAMETER].string_param = key
    return bytes(request.SerializeToString())


def raw_values(datatype: str, values: Iterable[Any]) -> bytes:
    """Serialise a tensor's values, which are bytes for the datatype BYTES."""
    if datatype == "BYTES":
        return b"".join(LENGTH.pack(len(value)) + value for value in values)
    return np.asarray(values, tensors.NUMPY_TYPES[datatype]).tobytes()


def raw_chunks(*pieces: Chunk) -> Iterator[Chunk]:
    """Serialise a raw tensor, in one or more pieces, as a field that follows the other fields."""
    size = encoder._VarintBytes(sum(map(len, pieces)))
    yield encoder.TagBytes(_RAW_CONTENTS, _BYTES) + size
    yield from pieces


# ------------------------------------------------------------ reading answers


def read_transcript(answer: ModelInferResponse) -> Transcript:
    """Read the transcript in an answer.

    Raises:
        EarshotError: it has none.
    """
    return tensors.transcript_from_outputs(InferResult(answer).as_numpy)


def read_streamed(answer: bytes) -> Segment | Transcript:
    """Read a `ModelStreamInferResponse`: one of the segments, or at the end the whole.

    Raises:
        EarshotError: it is malformed.
    """
    result = InferResult(service_pb2.ModelStreamInferResponse.FromString(answer).infer_response)
    if tensors.is_whole(result.as_numpy):
        return tensors.transcript_from_outputs(result.as_numpy)
    (segment,) = tensors.segments_from_outputs(result.as_numpy)
    return segment


def answer_figures(
    answer: ModelInferResponse,
) -> tuple[float, float, float | None, tuple[Phase, ...]]:
    """Read the figures of an answer that the gateway counts; the answer may lack outputs.

    Returns:
        The seconds of audio; 0: it is one segment, or does not tell. The second at which its last
        segment ends; 0: it has none. The seconds in the queue, if it tells, and its phases.
    """
    output = InferResult(answer).as_numpy
    duration, timings, phases = map(output, ("DURATION", "TIMINGS", "PHASES"))
    segments: tuple[Segment, ...] = ()
    if duration is None and output("SEGMENTS") is not None:
        segments = tensors.segments_from_outputs(output)
    return (
        0.0 if duration is None else float(duration[0]),
        segments[-1].end if segments else 0.0,
        None if timings is None else from_json(Timings, timings[0], "TIMINGS").queue_s,
        () if phases is None else from_json(tuple[Phase, ...], phases[0], "PHASES"),
    )


# ------------------------------------------------------------ protobuf


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, begin, begin of the payload and end of each field."""
    position, count = 0, 0
    while position < len(view):
        count += 1
        if count > _MAX_FIELDS:
            raise errors.invalid(f"the request has more than {_MAX_FIELDS} fields")
        begin = position
        try:
            tag, payload = decoder._DecodeVarint(view, begin)
            number, kind = wire_format.UnpackTag(tag)
            if kind == _BYTES:
                length, payload = decoder._DecodeVarint(view, payload)
                position = payload + length
            elif kind == wire_format.WIRETYPE_VARINT:
                _, position = decoder._DecodeVarint(view, payload)
            else:
                position = payload + _FIXED_BYTES[kind]
        except (DecodeError, IndexError, KeyError):
            raise _malformed() from None
        if position > len(view) or (number == _RAW_CONTENTS and kind != _BYTES):
            raise _malformed()
        yield number, begin, payload, position


def _malformed(kind: str = "ModelInferRequest") -> errors.ApiError:
    return errors.invalid(f"the message is not a valid KServe v2 {kind}")
