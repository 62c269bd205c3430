"""Ways to a transcript: straight to Triton, and through the gateway's doors."""

import contextlib
import http.client
import json
import uuid
from collections.abc import Callable, Iterator

import grpc
from tritonclient.grpc import service_pb2

from eval.server import post
from serve.contract.errors import EarshotError, UnavailableError
from serve.contract.messages import Request
from serve.gateway.envelope import read_transcript, request_parts, with_model
from serve.gateway.upstream.calls import SERVICE
from serve.wire.client import Client
from serve.wire.tensors import MODEL, error_from_text

TRITON, KSERVE, OPENAI = "straight to Triton", "KServe gRPC", "OpenAI's API"

Ask = Callable[[bytes], str]
"""Gives the text of a file's bytes."""


@contextlib.contextmanager
def by_grpc(address: str, timeout_s: float) -> Iterator[Ask]:
    """Go through the gateway's gRPC at this address."""
    with Client(address, timeout_s) as client:
        yield lambda audio: client.transcribe(audio).text


@contextlib.contextmanager
def straight(target: str, timeout_s: float) -> Iterator[Ask]:
    """Go straight to the Triton that a gRPC channel to `target` reaches."""
    with grpc.insecure_channel(target) as channel:
        # Its model answers by streams alone; one of a message each way is the same on the wire.
        infer = channel.unary_unary(f"{SERVICE}ModelStreamInfer")

        def ask(audio: bytes) -> str:
            message = b"".join(with_model(request_parts(Request(audio=b""), audio), MODEL))
            try:
                content = infer(message, timeout=timeout_s)
            except grpc.RpcError as error:
                raise UnavailableError(f"Triton at {target}: {error}") from error
            answer = service_pb2.ModelStreamInferResponse.FromString(content)
            if answer.error_message:
                raise error_from_text(answer.error_message, "")
            return read_transcript(answer.infer_response).text

        yield ask


def form(audio: bytes, **fields: str) -> tuple[bytes, dict[str, str]]:
    """Make a form with a file, and the header that says how to read it."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="audio"\r\n\r\n'
    body = "".join([*parts, head]).encode() + audio + f"\r\n--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


@contextlib.contextmanager
def by_form(address: str, timeout_s: float) -> Iterator[Ask]:
    """Go through OpenAI's API at this address, by one connection for each request, as curl does."""

    def ask(audio: bytes) -> str:
        body, kind = form(audio)
        try:
            answer, text = post(address, "/v1/audio/transcriptions", body, kind, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"the gateway at {address}: {error}") from error
        content = json.loads(text)
        if answer.status != 200:
            reason = content["error"]["message"]
            raise EarshotError(f"the gateway answered {answer.status}: {reason}")
        return str(content["text"])

    yield ask
