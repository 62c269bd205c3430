"""KServe v2 over HTTP: its routes, and its JSON from and to the messages of KServe's gRPC.

    GET  /v2, /v2/health/live, /v2/health/ready
    GET  /v2/models/{name}[/versions/{version}][/ready]
    POST /v2/models/{name}[/versions/{version}]/infer

A request is JSON, or JSON followed by the tensors' raw bytes (the binary tensor data
extension: the header `Inference-Header-Content-Length` tells where they begin). It is checked as
strictly as a config: an unknown key or parameter is rejected by name.
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send
from tritonclient.grpc import InferResult, service_pb2

from serve.contract.codec import from_json, to_json
from serve.gateway import errors
from serve.gateway.context import RequestContext, Services
from serve.gateway.edge.budget import JSON_S_PER_BYTE, ConnectionBudget
from serve.gateway.edge.connection import BUDGET
from serve.gateway.edge.headers import RECORD
from serve.gateway.edge.uploads import while_client_waits, whole_body
from serve.gateway.engines import EngineRequest
from serve.gateway.kserve import messages
from serve.gateway.limits import EXPANSION, MAX_JSON_BYTES, Permit, check_json
from serve.wire.tensors import INPUTS, OUTPUTS

_MAX_FLOAT = float(np.finfo(np.float32).max)

Datatype = TypeVar("Datatype")
Value = TypeVar("Value")
Float = Annotated[float, Field(ge=-_MAX_FLOAT, le=_MAX_FLOAT, allow_inf_nan=False)]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Dim = Annotated[int, Field(ge=0, lt=2**31)]
Shape = Annotated[tuple[Dim, ...], Field(max_length=8)]
TensorParameters = dict[Literal["binary_data_size"], Annotated[int, Field(ge=0)] | None]
_HEADER = "Inference-Header-Content-Length"


def kserve_routes(services: Services) -> list[BaseRoute]:
    """Return the routes below /v2."""

    async def server_metadata(request: Request) -> Response:
        services.keys.of_request(request)
        return JSONResponse(messages.SERVER_METADATA)

    async def model_metadata(request: Request) -> Response:
        services.keys.of_request(request)
        return JSONResponse(messages.model_metadata(services.models.target(*_model(request))))

    async def ready(request: Request) -> Response:
        if request.path_params:
            services.models.target(*_model(request))
        if not await services.ready():
            raise errors.server_away()
        return Response()

    routes: list[BaseRoute] = [
        Route("/v2", server_metadata),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, model_metadata),
            Route(f"{model}/ready", ready),
            Route(f"{model}/infer", _InferRoute(services), methods=["POST"]),
        ]
    return routes


async def live(request: Request) -> Response:
    """Answer that the process is alive."""
    return Response()


def _model(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")


class _InferRoute:
    """The route of infer, as an ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, request = self._services, Request(scope, receive)
        async with RequestContext(services, scope["state"][RECORD], "http") as context:
            with context.admit() as permit:
                target = services.models.target(*_model(request), streamed=False)
                context.record.model = target.model
                translated = await _received(request, permit)
                sent = translated.request
                context.api_key.require_duration([output.name for output in sent.outputs])
                raw = (chunk for tensor in translated.raw for chunk in messages.raw_chunks(tensor))
                parts = [sent.SerializeToString(), *raw]
                audio = messages.audio_of_tensors(sent, translated.raw) if services.target else None
                call = context.start(EngineRequest(target, parts, audio=audio), permit)
            with call:
                answer = await while_client_waits(request, call.response())
            context.kserve_answered(answer)
            await answer_to_http(answer, translated)(scope, receive, send)


async def _received(request: Request, permit: Permit) -> "Translated":
    header = request.headers.get(_HEADER)
    body = await whole_body(request, permit, lambda size: json_bytes(size, header))
    json_size = json_bytes(len(body), header)
    permit.charge((EXPANSION - 1) * json_size)
    budget: ConnectionBudget = request.scope[BUDGET]
    await budget.pay(json_size * JSON_S_PER_BYTE)
    return request_from_http(body, json_size)


@dataclasses.dataclass(frozen=True)
class _Tensor(Generic[Datatype, Value]):
    name: str
    shape: Shape
    datatype: Datatype
    data: Annotated[list[Value], Field(fail_fast=True)] | None = None
    parameters: TensorParameters | None = None


_AnyTensor = Annotated[
    _Tensor[Literal["BYTES"], str]
    | _Tensor[Literal["FP32", "FP64"], Float]
    | _Tensor[Literal["INT32"], Int]
    | _Tensor[Literal["BOOL"], bool],
    Field(discriminator="datatype"),
]


@dataclasses.dataclass(frozen=True)
class _Output:
    name: str
    parameters: dict[Literal["binary_data"], bool | None] | None = None


@dataclasses.dataclass(frozen=True)
class _InferRequest:
    inputs: Annotated[tuple[_AnyTensor, ...], Field(max_length=len(INPUTS))]
    outputs: Annotated[tuple[_Output, ...], Field(max_length=len(OUTPUTS))] = ()
    id: str = ""
    parameters: dict[Literal["binary_data_output"], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Translated:
    """A request over HTTP as a message of gRPC."""

    request: service_pb2.ModelInferRequest  # without raw_input_contents
    raw: list[messages.Chunk]  # the inputs' bytes; binary data are views of the body
    binary: Mapping[str, bool]  # whether each output is wanted as binary data


def json_bytes(body_bytes: int, header: str | None) -> int:
    """Return how many bytes of a body are JSON, as `Inference-Header-Content-Length` says.

    Args:
        body_bytes: the size of the body, or of the part that is known.
        header: the header's value; None: all of the body is JSON.

    Raises:
        ApiError: 400, the header is wrong; 413, the JSON is too large.
    """
    if header is not None and not re.fullmatch("[0-9]{1,19}", header):
        raise errors.invalid(
            f"{_HEADER} is no number; expected how many bytes of the body are JSON"
        )
    size = body_bytes if header is None else int(header)
    if size > MAX_JSON_BYTES:
        raise errors.too_large(
            f"{size} bytes of JSON; expected at most {MAX_JSON_BYTES}: send tensors as binary data"
        )
    return size


def request_from_http(body: bytes, json_size: int) -> Translated:
    """Read the body of a request to infer; the URL names the model.

    Args:
        body: JSON, followed by binary tensors.
        json_size: the number of bytes of the body that are JSON.

    Raises:
        ApiError: 400, the request is wrong; the message names the value and the expected one.
    """
    if not 0 < json_size <= len(body):
        raise errors.invalid(
            f"{json_size} bytes of JSON are expected in a body of {len(body)}, see {_HEADER}"
        )
    text = body if json_size == len(body) else body[:json_size]
    check_json(text, "the request")
    content = from_json(_InferRequest, text, "the request", error=errors.invalid)
    request = service_pb2.ModelInferRequest(id=content.id)
    binary = dict.fromkeys(OUTPUTS, (content.parameters or {}).get("binary_data_output", False))
    for output in content.outputs:
        request.outputs.add(name=output.name)
        if (wanted := (output.parameters or {}).get("binary_data")) is not None:
            binary[output.name] = wanted
    for tensor in content.inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    raw = _contents(content.inputs, memoryview(body)[json_size:])
    messages.check_request(request, raw, streamed=False)
    return Translated(request, raw, binary)


def _contents(tensors: Iterable[_AnyTensor], binary: memoryview) -> list[messages.Chunk]:
    """Return the raw bytes of each tensor; `binary` follows the JSON."""
    contents: list[messages.Chunk] = []
    begin = 0
    for tensor in tensors:
        size = (tensor.parameters or {}).get("binary_data_size")
        if (size is None) == (tensor.data is None):
            raise errors.invalid(f"{tensor.name}: expected either data or binary_data_size")
        if tensor.data is not None:
            texts = tensor.datatype == "BYTES"
            values = [str(text).encode() for text in tensor.data] if texts else tensor.data
            contents.append(messages.raw_values(tensor.datatype, values))
        elif size is not None:
            contents.append(binary[begin : begin + size])
            begin += size
    if begin != len(binary):
        raise errors.invalid(
            f"{begin} bytes of binary data, and {len(binary)} follow the JSON; expected as many"
        )
    return contents


def answer_to_http(answer: service_pb2.ModelInferResponse, request: Translated) -> Response:
    """Write an answer to a request as an HTTP response."""
    outputs, binary, array = [], [], InferResult(answer).as_numpy
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        described: dict[str, Any] = {"name": output.name, "datatype": output.datatype}
        described["shape"] = list(output.shape)
        if request.binary[output.name]:
            described["parameters"] = {"binary_data_size": len(raw)}
            binary.append(raw)
        else:
            described["data"] = _values(array(output.name))
        outputs.append(described)
    head = {"model_name": answer.model_name, "model_version": answer.model_version}
    if answer.id:
        head["id"] = answer.id
    text = to_json({**head, "outputs": outputs}).encode()
    if not binary:
        return Response(text, media_type="application/json")
    headers, kind = {_HEADER: str(len(text))}, "application/octet-stream"
    return Response(b"".join([text, *binary]), headers=headers, media_type=kind)


def _values(array: npt.NDArray[Any]) -> list[Any]:
    if array.dtype == np.object_:
        return [text.decode() for text in array]
    if array.dtype == np.float32:  # via text, so that 0.2 is written as 0.2
        return [float(str(value)) for value in array]
    return list(array.tolist())
