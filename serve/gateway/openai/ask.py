"""Requests for the models, and their answers: KServe v2's messages <-> our own."""

from tritonclient.grpc import InferResult, service_pb2

from serve.contract.errors import EarshotError
from serve.contract.messages import Finished, Request, SegmentReady, Transcript
from serve.gateway import refusals
from serve.gateway.checks import LENGTH
from serve.gateway.envelope import Part, raw_part
from serve.wire import tensors


def request_parts(request: Request, audio: Part | None = b"") -> list[Part]:
    """A serialised `ModelInferRequest` for any model, in parts, of which `audio` itself is one.

    Args:
        request: with samples, or with bytes that count for nothing.
        audio: the bytes of a file, in place of these; None: they come beside the request.
    """
    message = service_pb2.ModelInferRequest()
    raw: list[Part] = []
    for name, tensor in tensors.request_to_inputs(request).items():
        spec = tensors.INPUTS[name]
        if name == "AUDIO" and audio is None:
            continue
        message.inputs.add(name=name, datatype=spec.datatype, shape=tensor.shape)
        if name == "AUDIO" and audio is not None:
            raw += raw_part(LENGTH.pack(len(audio)), audio)
        elif spec.datatype == "BYTES":
            raw += raw_part(*(piece for text in tensor for piece in (LENGTH.pack(len(text)), text)))
        else:
            raw += raw_part(tensor.tobytes())
    return [message.SerializeToString(), *raw]


def transcript(answer: service_pb2.ModelInferResponse) -> Transcript:
    """The transcript in an answer.

    Raises:
        Refusal: it holds none.
    """
    result = InferResult(answer)
    try:
        return tensors.transcript_from_outputs(result.as_numpy)
    except EarshotError as error:
        raise refusals.from_upstream("INTERNAL", tensors.error_to_text(error)) from error


def stream_event(answer: bytes) -> SegmentReady | Finished:
    """What a `ModelStreamInferResponse` says.

    Raises:
        Refusal: it is no answer.
    """
    result = InferResult(service_pb2.ModelStreamInferResponse.FromString(answer).infer_response)
    try:
        if tensors.is_whole(result.as_numpy):
            return Finished(tensors.transcript_from_outputs(result.as_numpy))
        (segment,) = tensors.segments_from_outputs(result.as_numpy)
    except EarshotError as error:
        raise refusals.from_upstream("INTERNAL", tensors.error_to_text(error)) from error
    return SegmentReady(segment)
