"""Requests as any KServe v2 client sends them, and the one ending that each must have.

Earshot's own client is not used: what is asked here is what others see.
"""

import contextlib
import dataclasses
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from eval.record import Check
from eval.server import post
from serve.wire.tensors import MODEL, STREAM_MODEL

Kind = Literal["answered", "refused", "failed", "lost"]
INFER_PATH = f"/v2/models/{MODEL}/infer"
_LIMIT_BYTES = 1 << 30
_OPTIONS = (
    ("grpc.max_receive_message_length", _LIMIT_BYTES),
    ("grpc.max_send_message_length", _LIMIT_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, as a new client has
)
# Statuses by which a server says "not now" or "not so much".
_REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
# What gRPC says where no server said anything: nothing else tells its statuses from a server's.
_OWN_WORDS = (
    "Deadline Exceeded",
    "failed to connect",
    "Socket closed",
    "Stream removed",
    "Connection reset",
    "Broken pipe",
    "GOAWAY",
)
_HTTP_REFUSALS = (408, 413, 429, 503)


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a request for its client.

    answered: with a transcript. refused: the server said that it is too much, or too much now.
    failed: the server said something else. lost: the server said nothing; the connection broke, or
    the client waited in vain.
    """

    kind: Kind
    text: str  # the transcript, or what was said
    seconds: float
    waited_in_vain: bool = False

    def __str__(self) -> str:
        """Write a line about it."""
        return f"{self.kind} after {self.seconds:.1f} s: {self.text[:200]}"


@dataclasses.dataclass(frozen=True)
class Addresses:
    """The addresses that a server listens on, host:port, and the API key to send; "" for none."""

    http: str
    grpc: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that carry the key."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


def by_grpc(at: Addresses, audio: bytes, timeout_s: float, **options: str) -> Ending:
    """Send one ModelInfer over a connection of its own."""
    with channel_to(at) as channel:
        return infer(channel, audio, timeout_s, at.headers, **options)


def infer(
    channel: grpc.Channel,
    audio: bytes,
    timeout_s: float,
    headers: dict[str, str],
    **options: str,
) -> Ending:
    """Send one ModelInfer."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = _request(MODEL, audio, options)
    return _ended_by_grpc(
        lambda: _text(stub.ModelInfer(request, timeout=timeout_s, metadata=tuple(headers.items())))
    )


def by_stream(at: Addresses, audio: bytes, timeout_s: float) -> Ending:
    """Send one request to the streaming model; its text is that of its last message."""

    def last() -> str:
        finals = []
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = iter([_request(STREAM_MODEL, audio, {})])
        metadata = tuple(at.headers.items())
        call = stub.ModelStreamInfer(requests, timeout=timeout_s, metadata=metadata)
        for message in call:
            if message.error_message:
                raise _StreamError(message.error_message)
            if "TIMINGS" in {output.name for output in message.infer_response.outputs}:
                finals.append(_text(message.infer_response))
        if len(finals) != 1:
            raise _StreamError(f"INTERNAL: the stream had {len(finals)} last messages")
        return finals[0]

    with channel_to(at) as channel:
        return _ended_by_grpc(last)


def by_http(at: Addresses, audio: bytes, timeout_s: float) -> Ending:
    """Send one POST over a connection of its own."""
    head, tail = http_body(audio)
    headers = {"Inference-Header-Content-Length": str(len(head))} | at.headers
    began = time.monotonic()
    try:
        answer, body = post(at.http, INFER_PATH, head + tail, headers, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    return ended_by_http(answer.status, body, time.monotonic() - began)


def http_body(audio: bytes) -> tuple[bytes, bytes]:
    """Return the JSON of a request with a file, and the binary data behind it."""
    tail = len(audio).to_bytes(4, "little") + audio
    audio_input = {
        "name": "AUDIO",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(tail)},
    }
    return json.dumps({"inputs": [audio_input]}).encode(), tail


def lost(error: Exception, began_s: float) -> Ending:
    """Return the ending of a request whose connection broke, or that waited in vain."""
    seconds = time.monotonic() - began_s
    return Ending("lost", repr(error), seconds, isinstance(error, TimeoutError))


def ended_by_http(status: int, body: bytes, seconds: float) -> Ending:
    """Interpret KServe's HTTP answer."""

    def text(answer: Any) -> str:
        return str(next(out["data"][0] for out in answer["outputs"] if out["name"] == "TEXT"))

    return _ended(status, body, seconds, text)


def ended_by_openai(status: int, body: bytes, seconds: float) -> Ending:
    """Interpret an answer of OpenAI's API."""
    return _ended(status, body, seconds, lambda answer: str(answer["text"]))


def _ended(status: int, body: bytes, seconds: float, text: Callable[[Any], str]) -> Ending:
    content = body.decode("utf-8", "replace")
    if status == http.client.OK:
        with contextlib.suppress(ValueError, StopIteration, KeyError, TypeError):
            return Ending("answered", text(json.loads(content)), seconds)
    kind: Kind = "refused" if status in _HTTP_REFUSALS else "failed"
    return Ending(kind, f"{status} {content}", seconds)


@contextlib.contextmanager
def crowd(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads for clients; leaving does not wait for them: the server's end ends them."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="soak")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def endings(calls: Sequence["Future[Ending]"]) -> list[Ending]:
    """Wait for all; each has a time limit of its own."""
    return [call.result() for call in calls]


def counted(all_endings: Sequence[Ending]) -> str:
    """Count how many ended how, with the first of each kind that is no answer."""
    parts = []
    for kind in ("answered", "refused", "failed", "lost"):
        of_kind = [ending for ending in all_endings if ending.kind == kind]
        if of_kind:
            example = "" if kind == "answered" else f" (first {of_kind[0]})"
            parts.append(f"{len(of_kind)} {kind}{example}")
    return ", ".join(parts) or "nothing was sent"


def all_answered(all_endings: Sequence[Ending]) -> Check:
    """Check that every request has its transcript."""
    good = all(ending.kind == "answered" for ending in all_endings)
    return Check("every request is answered", good, counted(all_endings))


# ---------------------------------------------------------------- gRPC


class _StreamError(Exception):
    """A stream's message that is an error: Triton puts it into the message, with its class."""


def channel_to(at: Addresses) -> grpc.Channel:
    """Open a connection of its own, not one that is shared with others of this process."""
    return grpc.insecure_channel(at.grpc, options=_OPTIONS)


def _request(model: str, audio: bytes, options: dict[str, str]) -> Any:
    request = pb.ModelInferRequest(model_name=model)
    texts = {name: text.encode() for name, text in options.items()}
    for name, data in {"AUDIO": audio, **texts}.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    return request


def _text(response: Any) -> str:
    index = next(i for i, output in enumerate(response.outputs) if output.name == "TEXT")
    return bytes(response.raw_output_contents[index][4:]).decode()


def _ended_by_grpc(call: Callable[[], str]) -> Ending:
    began = time.monotonic()
    try:
        return Ending("answered", call(), time.monotonic() - began)
    except _StreamError as error:
        busy = str(error).startswith(("OverloadedError", "DeadlineError", "UnavailableError"))
        return Ending("refused" if busy else "failed", str(error), time.monotonic() - began)
    except grpc.RpcError as error:
        return _ending_of(error, time.monotonic() - began)


def _ending_of(error: Any, seconds: float) -> Ending:
    """Interpret a gRPC error; where the status did not come from the server, it is lost."""
    code, text = error.code(), f"{error.code().name} {error.details()}"
    if any(words in text for words in _OWN_WORDS):
        return Ending("lost", text, seconds, code is grpc.StatusCode.DEADLINE_EXCEEDED)
    return Ending("refused" if code in _REFUSALS else "failed", text, seconds)
