"""KServe v2 over HTTP, to and from the messages of KServe v2 over gRPC.

A request is JSON, or JSON and the raw bytes of its tensors after it (the binary tensor data
extension: the header `Inference-Header-Content-Length` says where they begin). What a request
says is checked as strictly as a config: an unknown key or parameter is refused by name.
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from tritonclient.grpc import service_pb2

from serve.contract.codec import from_json, to_json
from serve.contract.errors import RequestError
from serve.gateway import errors
from serve.gateway.errors import ApiError
from serve.gateway.kserve.checks import LENGTH, check_names, check_parameters, check_request
from serve.gateway.limits import MAX_JSON_BYTES, check_json
from serve.wire.tensors import INPUTS, NUMPY_TYPES, OUTPUTS

_MAX_FLOAT = float(np.finfo(np.float32).max)
_DEFAULT_BINARY = "binary_data_output"
_BINARY = "binary_data"
_BINARY_SIZE = "binary_data_size"

Parameters = Mapping[str, Any]
Float = Annotated[float, Field(ge=-_MAX_FLOAT, le=_MAX_FLOAT, allow_inf_nan=False)]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Dim = Annotated[int, Field(ge=0, lt=2**31)]
Shape = Annotated[tuple[Dim, ...], Field(max_length=8)]


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    shape: Shape
    parameters: Parameters = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Text(_Tensor):
    datatype: Literal["BYTES"]
    data: Annotated[list[str], Field(fail_fast=True)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Floats(_Tensor):
    datatype: Literal["FP32", "FP64"]
    data: Annotated[list[Float], Field(fail_fast=True)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ints(_Tensor):
    datatype: Literal["INT32"]
    data: Annotated[list[Int], Field(fail_fast=True)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bools(_Tensor):
    datatype: Literal["BOOL"]
    data: Annotated[list[bool], Field(fail_fast=True)] | None = None


_AnyTensor = Annotated[_Text | _Floats | _Ints | _Bools, Field(discriminator="datatype")]


@dataclasses.dataclass(frozen=True)
class _Output:
    name: str
    parameters: Parameters = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Request:
    inputs: Annotated[tuple[_AnyTensor, ...], Field(max_length=len(INPUTS))]
    outputs: Annotated[tuple[_Output, ...], Field(max_length=len(OUTPUTS))] = ()
    id: str = ""
    parameters: Parameters = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Translated:
    """A request over HTTP as one over gRPC."""

    request: service_pb2.ModelInferRequest  # without raw_input_contents
    raw: tuple[memoryview, ...]  # those; parts of the body where it has them
    binary: Mapping[str, bool]  # outputs that were asked for by name, and how they are wanted
    binary_default: bool  # how the others are


def json_bytes(body_bytes: int, header: str | None) -> int:
    """Return how many bytes of a body are JSON.

    Args:
        body_bytes: of the whole body, or of what is known of it.
        header: the value of `Inference-Header-Content-Length`, where there is one.

    Raises:
        ApiError: more than may be, or the header is wrong.
    """
    size = body_bytes
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) < 20):
            raise errors.invalid(
                "Inference-Header-Content-Length is no number; expected how many bytes of the "
                "body are JSON"
            )
        size = int(header)
    if size > MAX_JSON_BYTES:
        raise errors.too_large(
            f"the request has {size} bytes of JSON or more; expected at most {MAX_JSON_BYTES}: "
            "send tensors as binary data, or over gRPC"
        )
    return size


def request_from_http(name: str, version: str, body: bytes, json_size: int) -> Translated:
    """Read the body of a request to infer.

    Args:
        name: of the model, from the address; as is its version.
        version: empty for any.
        body: JSON, and binary tensors after it.
        json_size: so many bytes of the body are JSON.

    Raises:
        ApiError: what is wrong, and what was expected.
    """
    if not 0 < json_size <= len(body):
        raise errors.invalid(
            f"{json_size} bytes of JSON are expected in a body of {len(body)}; the body begins "
            "with JSON, and Inference-Header-Content-Length says how long it is"
        )
    content = _parse(body if json_size == len(body) else body[:json_size])
    check_parameters("the request", content.parameters, (_DEFAULT_BINARY,))
    # `check_request` does so again, at the end: until then messages name inputs and outputs.
    check_names("inputs", [tensor.name for tensor in content.inputs], INPUTS)
    check_names("outputs", [output.name for output in content.outputs], OUTPUTS)
    request = service_pb2.ModelInferRequest(model_name=name, model_version=version, id=content.id)
    binary = {}
    for output in content.outputs:
        request.outputs.add(name=output.name)
        check_parameters(output.name, output.parameters, (_BINARY,))
        if _BINARY in output.parameters:
            binary[output.name] = _flag(output.name, output.parameters, _BINARY)
    for tensor in content.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    raw = tuple(_contents(content.inputs, memoryview(body)[json_size:]))
    check_request(request, raw, streamed=False)
    default = _flag("the request", content.parameters, _DEFAULT_BINARY)
    return Translated(request, raw, binary, default)


def _parse(text: bytes) -> _Request:
    check_json(text, "the request")
    try:
        return from_json(_Request, text, "the request", error=RequestError)
    except RequestError as error:
        raise ApiError(error) from error


def _flag(where: str, parameters: Parameters, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise errors.invalid(f"{where}: the parameter {name} is not true or false")
    return value


def _contents(tensors: Iterable[_AnyTensor], binary: memoryview) -> list[memoryview]:
    """Return the raw bytes of each tensor; `binary` is what follows the JSON."""
    contents, begin = [], 0
    for tensor in tensors:
        check_parameters(tensor.name, tensor.parameters, (_BINARY_SIZE,))
        size = tensor.parameters.get(_BINARY_SIZE)
        if (size is None) == (tensor.data is None):
            raise errors.invalid(
                f"{tensor.name} has {'neither' if size is None else 'both'} data "
                f"{'nor' if size is None else 'and'} {_BINARY_SIZE}; expected one of them"
            )
        if tensor.data is not None:
            contents.append(memoryview(_raw(tensor)))
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not size >= 0:
            raise errors.invalid(f"{tensor.name}: {_BINARY_SIZE} is no number of bytes")
        contents.append(binary[begin : begin + size])
        begin += size
    if begin != len(binary):
        raise errors.invalid(
            f"the tensors have {begin} bytes of binary data, and {len(binary)} follow the JSON; "
            "expected as many"
        )
    return contents


def _raw(tensor: _AnyTensor) -> bytes:
    """Turn values from JSON into raw bytes."""
    data = tensor.data or ()
    if len(data) != math.prod(tensor.shape):
        raise errors.invalid(
            f"{tensor.name} has {len(data)} values; expected {math.prod(tensor.shape)} for "
            f"shape {list(tensor.shape)}"
        )
    if isinstance(tensor, _Text):
        encoded = [text.encode() for text in tensor.data or ()]
        return b"".join(LENGTH.pack(len(text)) + text for text in encoded)
    return np.asarray(data, NUMPY_TYPES[tensor.datatype]).tobytes()


def answer_to_http(
    answer: service_pb2.ModelInferResponse, request: Translated
) -> tuple[bytes, int | None]:
    """Write an answer as the body of an HTTP response.

    Args:
        answer: it.
        request: its request.

    Returns:
        The body, and how many bytes of it are JSON; None: all.
    """
    outputs, binary = [], []
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        described: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
        }
        if request.binary.get(output.name, request.binary_default):
            described["parameters"] = {_BINARY_SIZE: len(raw)}
            binary.append(raw)
        else:
            described["data"] = _values(output.datatype, raw)
        outputs.append(described)
    head = {"model_name": answer.model_name, "model_version": answer.model_version}
    if answer.id:
        head["id"] = answer.id
    text = to_json({**head, "outputs": outputs}).encode()
    return b"".join([text, *binary]), len(text) if binary else None


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return _texts(raw)
    values: npt.NDArray[Any] = np.frombuffer(raw, NUMPY_TYPES[datatype])
    if datatype == "FP32":  # by way of text, so that 0.2 is 0.2 and nothing beside it
        return [float(str(value)) for value in values]
    return list(values.tolist())


def _texts(raw: bytes) -> list[str]:
    texts, begin = [], 0
    while begin < len(raw):
        (size,) = LENGTH.unpack_from(raw, begin)
        begin += LENGTH.size
        texts.append(raw[begin : begin + size].decode())
        begin += size
    return texts
