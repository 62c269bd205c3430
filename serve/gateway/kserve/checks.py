"""Checks that a request is one for our models, so that Triton sees no other."""

import math
import reprlib
import struct
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from tritonclient.grpc import service_pb2

from serve.contract.codec import from_json
from serve.contract.messages import Phase, Segment, Timings
from serve.gateway import errors
from serve.gateway.models import Target
from serve.wire.tensors import INPUTS, NUMPY_TYPES, OUTPUTS, TensorSpec

_CONTENTS = {
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT32": "int_contents",
    "BOOL": "bool_contents",
}
EMPTY_FINAL = "triton_enable_empty_final_response"
LENGTH = struct.Struct("<I")
"""Stands before each element of a BYTES tensor."""
_FP64 = struct.Struct("<d")

_REASONS = {
    "shared_memory": "this server has no shared memory; send the tensor itself",
    "sequence": "the models keep nothing between requests; leave it out",
    "classification": "these outputs are no scores; leave it out",
}


def check_streamed(target: Target, streamed: bool) -> None:
    """Refuse a model of several answers where one can be sent.

    Raises:
        ApiError: it is one.
    """
    if target.segments and not streamed:
        name = target.client_name.removesuffix("_stream")
        raise errors.invalid(
            f"{target.client_name} answers in several messages, which need a gRPC stream "
            f"(ModelStreamInfer); here ask {name}"
        )


def check_request(
    request: service_pb2.ModelInferRequest, raw: Sequence[memoryview], streamed: bool
) -> None:
    """Refuse what the models cannot answer as it was asked.

    Args:
        request: without its raw tensors.
        raw: those, in the order of the inputs; empty where the inputs hold their values.
        streamed: whether several answers can be sent.

    Raises:
        ApiError: which part is wrong, and what was expected.
    """
    check_parameters("the request", request.parameters, (EMPTY_FINAL,) if streamed else ())
    check_names("inputs", [tensor.name for tensor in request.inputs], INPUTS)
    check_names("outputs", [output.name for output in request.outputs], OUTPUTS)
    for output in request.outputs:
        check_parameters(output.name, output.parameters)
    if raw and len(raw) != len(request.inputs):
        raise errors.invalid(
            f"the request has {len(request.inputs)} inputs and {len(raw)} raw_input_contents; "
            "expected one for each, or none"
        )
    for index, tensor in enumerate(request.inputs):
        check_parameters(tensor.name, tensor.parameters)
        check_tensor(tensor.name, tensor.datatype, tensor.shape)
        if raw:
            check_raw(tensor.name, tensor.shape, raw[index])
            if tensor.HasField("contents"):
                raise errors.invalid(f"{tensor.name} has contents beside raw_input_contents")
        else:
            check_contents(tensor)


def check_parameters(
    where: str, parameters: Mapping[str, object], known: Collection[str] = ()
) -> None:
    """Refuse parameters that would have no effect.

    Raises:
        ApiError: there is one that is not `known`.
    """
    for name in parameters:
        if name not in known:
            reason = next(
                (reason for part, reason in _REASONS.items() if name.startswith(part)),
                f"known: {', '.join(known)}" if known else "none is known",
            )
            raise errors.invalid(f"{where} has the parameter {reprlib.repr(name)}; {reason}")


def check_names(kind: str, names: Sequence[str], known: Mapping[str, TensorSpec]) -> None:
    """Refuse unknown and repeated names.

    Raises:
        ApiError: there is one.
    """
    for name in names:
        if name not in known:
            raise errors.invalid(f"{kind}: no {reprlib.repr(name)}; there are {', '.join(known)}")
    if len(set(names)) != len(names):
        raise errors.invalid(f"{kind}: {', '.join(names[:40])}; expected each name once")


def check_tensor(name: str, datatype: str, shape: Sequence[int]) -> None:
    """Refuse another datatype or shape than the input's.

    Raises:
        ApiError: it is another.
    """
    spec = INPUTS[name]
    fits = len(shape) == len(spec.dims) and all(
        size == expected or (expected == -1 and size >= 0)
        for size, expected in zip(shape, spec.dims, strict=True)
    )
    if datatype != spec.datatype or not fits:
        raise errors.invalid(
            f"{name} is {reprlib.repr(datatype)} of shape {reprlib.repr(list(shape))}; "
            f"expected {spec.datatype} of shape {list(spec.dims)}"
        )


def check_raw(name: str, shape: Sequence[int], raw: memoryview) -> None:
    """Refuse raw bytes that are more than the input may have, or not as many as its shape says.

    Raises:
        ApiError: they are more or less.
    """
    spec, count = INPUTS[name], math.prod(shape)
    if spec.max_bytes is not None and len(raw) > spec.max_bytes + LENGTH.size:
        raise errors.invalid(
            f"{name} has {len(raw)} raw bytes; expected at most {spec.max_bytes + LENGTH.size}"
        )
    if spec.datatype == "BYTES":
        expected = _texts_bytes(raw, count)
    else:
        expected = count * np.dtype(NUMPY_TYPES[spec.datatype]).itemsize
    if len(raw) != expected:
        raise errors.invalid(
            f"{name} has {len(raw)} raw bytes; expected {expected} for {spec.datatype} of shape "
            f"{list(shape)}"
        )


def _texts_bytes(raw: memoryview, count: int) -> int:
    """Add up the elements of a BYTES tensor: each is a length, and as many bytes."""
    size = 0
    for _ in range(count):
        if len(raw) < size + LENGTH.size:
            return size + LENGTH.size
        size += LENGTH.size + LENGTH.unpack_from(raw, size)[0]
    return size


def check_contents(tensor: service_pb2.ModelInferRequest.InferInputTensor) -> None:
    """Refuse values that are not as many as the tensor's shape says, or of another datatype.

    Raises:
        ApiError: they are more or less.
    """
    count = len(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
    expected = math.prod(tensor.shape)
    if count != expected:
        raise errors.invalid(
            f"{tensor.name} has {count} values in {_CONTENTS[tensor.datatype]}; expected "
            f"{expected} for shape {list(tensor.shape)}"
        )


def audio_s(answer: service_pb2.ModelInferResponse) -> float:
    """Read an answer's seconds of audio; 0 where it tells none, as where it is one segment."""
    raw = _output(answer, "DURATION")
    return 0.0 if raw is None else float(_FP64.unpack(raw)[0])


def segment_end_s(answer: service_pb2.ModelInferResponse) -> float:
    """Read the second at which the last segment of an answer ends; 0 where it tells none."""
    raw = _output(answer, "SEGMENTS")
    if raw is None:
        return 0.0
    segments = from_json(tuple[Segment, ...], raw[LENGTH.size :], "SEGMENTS", extra="ignore")
    return segments[-1].end if segments else 0.0


def queue_s(answer: service_pb2.ModelInferResponse) -> float | None:
    """Read how long an answer's request waited; None where it does not tell."""
    raw = _output(answer, "TIMINGS")
    return None if raw is None else from_json(Timings, raw[LENGTH.size :], "TIMINGS").queue_s


def phases(answer: service_pb2.ModelInferResponse) -> tuple[Phase, ...]:
    """Read the phases of an answer's time; none where it does not tell them."""
    raw = _output(answer, "PHASES")
    return () if raw is None else from_json(tuple[Phase, ...], raw[LENGTH.size :], "PHASES")


def _output(answer: service_pb2.ModelInferResponse, name: str) -> bytes | None:
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False):
        if output.name == name:
            return bytes(raw)
    return None
