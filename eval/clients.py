"""A client for each API of a server; every call ends in exactly one answer.

Earshot's own client is not used, so these are the requests of other users.
"""

import base64
import dataclasses
import functools
import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import grpc
import httpx2
import soxr
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect as connect_websocket

from eval.server import Addresses, request
from serve.contract.codec import to_json
from serve.contract.messages import Samples
from serve.speech.rate import SAMPLE_RATE
from serve.wire.tensors import MODEL, STREAM_MODEL

Kind = Literal["answered", "refused", "failed", "lost"]
INFER_PATH = f"/v2/models/{MODEL}/infer"
TRANSCRIPTIONS, JOBS = "/v1/audio/transcriptions", "/v1/audio/jobs"
LIVE = "/v1/realtime?intent=transcription"
PATIENCE_S = 60.0
_POLL_S = 0.5  # between two looks at a job
_LIVE_RATE = 24_000  # Hz, of 16-bit samples
_LIMIT_BYTES = 1 << 30
_OPTIONS = (
    ("grpc.max_receive_message_length", _LIMIT_BYTES),
    ("grpc.max_send_message_length", _LIMIT_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # its own connection, as a new client has
)
# Statuses by which a server says "not now" or "not so much".
_REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_HTTP_REFUSALS = (408, 413, 429, 503)
# gRPC's own words if the server said nothing; its statuses alone do not tell.
_OWN_WORDS = (
    *("Deadline Exceeded", "failed to connect", "Socket closed", "Stream removed"),
    *("Connection reset", "Broken pipe", "GOAWAY"),
)
_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        audio: the bytes of a file.
        options: fields of a form, or inputs of KServe.
        patience_s: the longest wait of the client.
        samples: float32 (n,), 16 kHz mono, the same audio for a live session.
    """

    audio: bytes
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patience_s: float = PATIENCE_S
    samples: Samples | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome of a request for its client.

    answered: with a transcript. refused: the server said that it is too much, or too much now.
    failed: the server said something else. lost: the server said nothing; the connection broke, or
    the client's patience ended.
    """

    kind: Kind
    text: str  # the transcript, or the server's words
    seconds: float
    waited_in_vain: bool = False
    retry_after_s: int | None = None  # of a refusal

    def __str__(self) -> str:
        return f"{self.kind} after {self.seconds:.1f} s: {self.text[:200]}"


Client = Callable[[Addresses, Ask], Answer]
"""Sends one request and waits for its answer."""


class NoTranscriptError(Exception):
    """The server answered with something other than a transcript."""

    def __init__(
        self, text: str, *, refused: bool = False, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text)
        self.kind: Kind = "refused" if refused else "failed"
        self.retry_after_s = retry_after_s


def answer_to(call: Callable[[], str]) -> Answer:
    """Make a call that returns a transcript; every error of server or connection is an answer."""
    kind: Kind = "answered"
    retry_after_s: int | None = None
    began_s, timed_out = time.monotonic(), False
    try:
        text = call()
    except NoTranscriptError as error:
        kind, text, retry_after_s = error.kind, str(error), error.retry_after_s
    except grpc.RpcError as error:
        status: Any = error  # of a call: it has a code
        text = f"{status.code().name} {status.details()}"
        kind = "refused" if status.code() in _REFUSALS else "failed"
        if any(words in text for words in _OWN_WORDS):
            kind, timed_out = "lost", status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    except (OSError, http.client.HTTPException, httpx2.TransportError, WebSocketException) as error:
        kind, text = "lost", repr(error)
        timed_out = isinstance(error, TimeoutError | httpx2.TimeoutException)
    return Answer(kind, text, time.monotonic() - began_s, timed_out, retry_after_s)


def _client(transcribe: Callable[[Addresses, Ask], str]) -> Client:
    """Make a client of a function that returns a transcript or raises."""

    @functools.wraps(transcribe)
    def client(server: Addresses, ask: Ask) -> Answer:
        return answer_to(lambda: transcribe(server, ask))

    return client


# ---------------------------------------------------------------- KServe


def channel_to(server: Addresses) -> grpc.Channel:
    """Open a new connection."""
    return grpc.insecure_channel(server.grpc, options=_OPTIONS)


@_client
def by_grpc(server: Addresses, ask: Ask) -> str:
    """Send one ModelInfer over a new connection."""
    with channel_to(server) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = tuple(server.headers.items())
        return _text(
            stub.ModelInfer(_message(MODEL, ask), timeout=ask.patience_s, metadata=metadata)
        )


@_client
def by_stream(server: Addresses, ask: Ask) -> str:
    """Send one request to the streaming model; its text is the last message's text."""
    finals, metadata = list[str](), tuple(server.headers.items())
    with channel_to(server) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages = iter([_message(STREAM_MODEL, ask)])
        for answer in stub.ModelStreamInfer(messages, timeout=ask.patience_s, metadata=metadata):
            if text := answer.error_message:  # Triton writes the error's class into the message
                busy = ("OverloadedError", "DeadlineError", "UnavailableError")
                raise NoTranscriptError(text, refused=text.startswith(busy))
            if "TIMINGS" in {output.name for output in answer.infer_response.outputs}:
                finals.append(_text(answer.infer_response))
    return _only(finals, [])


@_client
def by_http(server: Addresses, ask: Ask) -> str:
    """Send one POST of KServe over a new connection."""
    head, tail = http_body(ask.audio)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return text_of(send(server, ask, "POST", INFER_PATH, content=head + tail, headers=headers))


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


def text_of(content: str) -> str:
    """Return the text in the JSON of KServe or OpenAI's API; raises NoTranscriptError."""
    try:
        answer = json.loads(content)
        if "outputs" not in answer:
            return str(answer["text"])
        return str(next(out["data"][0] for out in answer["outputs"] if out["name"] == "TEXT"))
    except (ValueError, LookupError, TypeError, StopIteration):
        raise NoTranscriptError(f"200 {content}") from None


def _message(model: str, ask: Ask) -> Any:
    message = pb.ModelInferRequest(model_name=model)
    texts = {name: text.encode() for name, text in ask.options.items()}
    for name, data in {"AUDIO": ask.audio, **texts}.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    return message


def _text(response: Any) -> str:
    index = next(i for i, output in enumerate(response.outputs) if output.name == "TEXT")
    return bytes(response.raw_output_contents[index][4:]).decode()


def send(server: Addresses, ask: Ask, method: str, path: str, **content: Any) -> str:
    """Send a request with arguments of `httpx2.request`; return the text of the answer.

    Args:
        server: the server.
        ask: only its patience is used.
        method, path: of HTTP.
        content: further arguments of `httpx2.request`.

    Raises:
        NoTranscriptError: the status is neither 200 nor 202.
        httpx2.TransportError: there is no whole answer.
    """
    content["headers"] = {**content.get("headers", {}), **server.headers}
    answer = request(server.http, method, path, ask.patience_s, **content)
    return content_of(answer.status_code, answer.content, answer.headers.get("Retry-After", ""))


def content_of(status: int, body: bytes, retry_after: str = "") -> str:
    """Return the text of an answer with status 200 or 202; raises NoTranscriptError."""
    content = body.decode("utf-8", "replace")
    if status in (http.client.OK, http.client.ACCEPTED):
        return content
    after_s = int(retry_after) if retry_after.isdigit() else None
    refused = status in _HTTP_REFUSALS
    raise NoTranscriptError(f"{status} {content}", refused=refused, retry_after_s=after_s)


# ---------------------------------------------------------------- OpenAI's API, jobs


def form(ask: Ask, **options: str) -> dict[str, Any]:
    """Return a form with a file and fields as arguments of `httpx2.request`."""
    return {"data": {**ask.options, **options}, "files": {"file": ("audio", ask.audio)}}


@_client
def by_form(server: Addresses, ask: Ask) -> str:
    """Send one form over a new connection."""
    return text_of(send(server, ask, "POST", TRANSCRIPTIONS, **form(ask)))


@_client
def by_events(server: Addresses, ask: Ask) -> str:
    """Send one form, and read the transcript from its events."""
    content = send(server, ask, "POST", TRANSCRIPTIONS, **form(ask, stream="true"))
    lines = content.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    finals = [event["text"] for event in events if event.get("type") == "transcript.text.done"]
    return _only(finals, [to_json(event) for event in events if "error" in event])


def by_phrases(server: Addresses, ask: Ask) -> Answer:
    """Send one form with a unique list of phrases, too light to change the text."""
    phrase = {"phrases": f"Zanzibar {next(_NUMBERS)}^0.0001"}
    return by_form(server, dataclasses.replace(ask, options={**ask.options, **phrase}))


@_client
def by_job(server: Addresses, ask: Ask) -> str:
    """Post a job, wait for its end, and read its result."""
    deadline = time.monotonic() + ask.patience_s
    job = json.loads(send(server, ask, "POST", JOBS, **form(ask, response_format="json")))
    while job["status"] not in ("completed", "failed", "cancelled"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job is {job['status']}")
        time.sleep(_POLL_S)
        job = json.loads(send(server, ask, "GET", f"{JOBS}/{job['id']}"))
    return text_of(send(server, ask, "GET", f"{JOBS}/{job['id']}/result"))


# ---------------------------------------------------------------- live text


@_client
def by_live(server: Addresses, ask: Ask) -> str:
    """Send one utterance over a WebSocket, which the client ends itself."""
    deadline = time.monotonic() + ask.patience_s
    finals, errors = list[str](), list[str]()

    def read_until(done: Callable[[], object]) -> None:
        while not done():
            event = json.loads(socket.recv(timeout=max(0.0, deadline - time.monotonic())))
            kind = str(event["type"]).rpartition(".")[2]
            if kind == "completed":
                finals.append(str(event["transcript"]))
            elif kind in ("failed", "error"):
                errors.append(str(event["error"]))

    try:
        with live_session(server, ask.patience_s) as socket:
            for message in utterance(ask):
                socket.send(message)
            read_until(lambda: finals or errors)
            # A commit of nothing is an error, sent after everything about the utterance.
            socket.send(to_json({"type": "input_audio_buffer.commit"}))
            read_until(lambda: errors)
    except InvalidStatus as error:  # the server refused the WebSocket
        refusal = error.response
        retry_after = refusal.headers.get("Retry-After", "")
        content_of(refusal.status_code, refusal.body or b"", retry_after)
    return _only(finals, [] if finals else errors)


def live_session(server: Addresses, timeout_s: float) -> Any:
    """Open a WebSocket of live text."""
    return connect_websocket(
        f"ws://{server.http}{LIVE}",
        open_timeout=timeout_s,
        close_timeout=1,
        additional_headers=server.headers,
        max_size=None,
        compression=None,
    )


def utterance(ask: Ask) -> Iterable[str]:
    """Yield the messages that send a file to a live session and end its utterance."""
    assert ask.samples is not None
    samples = soxr.resample(ask.samples, SAMPLE_RATE, _LIVE_RATE)
    pcm = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    yield to_json({"type": "session.update", "session": session})
    yield to_json({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
    yield to_json({"type": "input_audio_buffer.commit"})


def _only(texts: Sequence[str], errors: Sequence[str]) -> str:
    """Return the only final text."""
    if len(texts) == 1 and not errors:
        return texts[0]
    busy = any("unavailable" in error.lower() or "overloaded" in error.lower() for error in errors)
    text = "; ".join(errors) or f"INTERNAL: {len(texts)} final texts; expected 1"
    raise NoTranscriptError(text, refused=busy and not texts)


CLIENTS: dict[str, Client] = {
    "KServe gRPC": by_grpc,
    "KServe HTTP": by_http,
    "KServe stream": by_stream,
    "OpenAI": by_form,
    "SSE": by_events,
    "live": by_live,
    "job": by_job,
    "phrases": by_phrases,
}
"""The client of each API by its name."""
