"""One client for every way into a server; every call ends in exactly one answer.

Earshot's own client is not used, so that requests are those of other users.
"""

import base64
import contextlib
import dataclasses
import http.client
import io
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import grpc
import soundfile
import soxr
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect as connect_websocket

from eval.record import Check
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
_ASK_AGAIN_S = 0.5
_LIVE_RATE = 24_000  # Hz, of 16-bit samples
_LIMIT_BYTES = 1 << 30
_OPTIONS = (
    ("grpc.max_receive_message_length", _LIMIT_BYTES),
    ("grpc.max_send_message_length", _LIMIT_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, as a new client has
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
        patience_s: the seconds that the client waits.
        samples: float32 (n,), 16 kHz mono, the same audio for a live session.
    """

    audio: bytes
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patience_s: float = PATIENCE_S
    samples: Samples | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a request for its client.

    answered: with a transcript. refused: the server said that it is too much, or too much now.
    failed: the server said something else. lost: the server said nothing; the connection broke, or
    the client waited in vain.
    """

    kind: Kind
    text: str  # the transcript, or what was said
    seconds: float
    waited_in_vain: bool = False
    retry_after_s: int | None = None  # of a refusal

    def __str__(self) -> str:
        """Write one line."""
        return f"{self.kind} after {self.seconds:.1f} s: {self.text[:200]}"


Client = Callable[[Addresses, Ask], Answer]
"""Sends one request and waits for its answer."""


# ---------------------------------------------------------------- KServe


def by_grpc(at: Addresses, ask: Ask) -> Answer:
    """Send one ModelInfer over a connection of its own."""
    with channel_to(at) as channel:
        return infer(channel, at, ask)


def infer(channel: grpc.Channel, at: Addresses, ask: Ask) -> Answer:
    """Send one ModelInfer."""
    stub, message = service_pb2_grpc.GRPCInferenceServiceStub(channel), _message(MODEL, ask)
    metadata = tuple(at.headers.items())
    return _ended_by_grpc(
        lambda: _text(stub.ModelInfer(message, timeout=ask.patience_s, metadata=metadata))
    )


def by_stream(at: Addresses, ask: Ask) -> Answer:
    """Send one request to the streaming model; its text is that of its last message."""

    def last() -> str:
        finals = []
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        messages, metadata = iter([_message(STREAM_MODEL, ask)]), tuple(at.headers.items())
        for answer in stub.ModelStreamInfer(messages, timeout=ask.patience_s, metadata=metadata):
            if answer.error_message:
                raise _StreamError(answer.error_message)
            if "TIMINGS" in {output.name for output in answer.infer_response.outputs}:
                finals.append(_text(answer.infer_response))
        if len(finals) != 1:
            raise _StreamError(f"INTERNAL: the stream had {len(finals)} last messages")
        return finals[0]

    with channel_to(at) as channel:
        return _ended_by_grpc(last)


def by_http(at: Addresses, ask: Ask) -> Answer:
    """Send one POST of KServe over a connection of its own."""
    head, tail = http_body(ask.audio)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return _posted(at, INFER_PATH, head + tail, headers, ask, ended_by_http)


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


def channel_to(at: Addresses) -> grpc.Channel:
    """Open a connection of its own."""
    return grpc.insecure_channel(at.grpc, options=_OPTIONS)


class _StreamError(Exception):
    """A stream's message that is an error: Triton puts it into the message, with its class."""


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


def _ended_by_grpc(call: Callable[[], str]) -> Answer:
    began = time.monotonic()
    try:
        return Answer("answered", call(), time.monotonic() - began)
    except _StreamError as error:
        busy = str(error).startswith(("OverloadedError", "DeadlineError", "UnavailableError"))
        return Answer("refused" if busy else "failed", str(error), time.monotonic() - began)
    except grpc.RpcError as error:
        return _answer_of(error, time.monotonic() - began)


def _answer_of(error: Any, seconds: float) -> Answer:
    """Interpret a gRPC error; a status that did not come from the server is lost."""
    code, text = error.code(), f"{error.code().name} {error.details()}"
    if any(words in text for words in _OWN_WORDS):
        return Answer("lost", text, seconds, code is grpc.StatusCode.DEADLINE_EXCEEDED)
    return Answer("refused" if code in _REFUSALS else "failed", text, seconds)


# ---------------------------------------------------------------- OpenAI's API, jobs


def form(audio: bytes, options: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return a form with a file, and the header that says how to read it."""
    boundary = uuid.uuid4().hex
    start = f"--{boundary}\r\nContent-Disposition: form-data; name="
    fields = [f'{start}"{name}"\r\n\r\n{value}\r\n' for name, value in options.items()]
    head = "".join([*fields, f'{start}"file"; filename="audio"\r\n\r\n']).encode()
    body = head + audio + f"\r\n--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def by_form(at: Addresses, ask: Ask) -> Answer:
    """Send one form over a connection of its own."""
    body, headers = form(ask.audio, ask.options)
    return _posted(at, TRANSCRIPTIONS, body, headers, ask, ended_by_openai)


def by_events(at: Addresses, ask: Ask) -> Answer:
    """Send one form, and read the transcript from its events."""
    body, headers = form(ask.audio, {**ask.options, "stream": "true"})
    return _posted(at, TRANSCRIPTIONS, body, headers, ask, _ended_by_events)


def by_phrases(at: Addresses, ask: Ask) -> Answer:
    """Send one form with a list of phrases of its own, whose weight changes no text."""
    phrase = {"phrases": f"Zanzibar {next(_NUMBERS)}^0.0001"}
    return by_form(at, dataclasses.replace(ask, options={**ask.options, **phrase}))


def by_job(at: Addresses, ask: Ask) -> Answer:
    """Post a job, wait for its end, and read its result."""
    began = time.monotonic()
    body, headers = form(ask.audio, {**ask.options, "response_format": "json"})

    def send(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        sent = at.headers | (headers if body else {})
        status, _, text = request(at.http, method, path, body, sent, timeout_s=ask.patience_s)
        return status, text

    try:
        status, text = send("POST", JOBS, body)
        if status != http.client.ACCEPTED:
            return ended_by_openai(status, text, time.monotonic() - began)
        job = json.loads(text)
        while job["status"] not in ("completed", "failed", "cancelled"):
            if time.monotonic() - began > ask.patience_s:
                return lost(TimeoutError(f"the job is {job['status']}"), began)
            time.sleep(_ASK_AGAIN_S)
            status, text = send("GET", f"{JOBS}/{job['id']}")
            if status != http.client.OK:
                return ended_by_openai(status, text, time.monotonic() - began)
            job = json.loads(text)
        status, text = send("GET", f"{JOBS}/{job['id']}/result")
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    return ended_by_openai(status, text, time.monotonic() - began)


def _posted(
    at: Addresses,
    path: str,
    body: bytes,
    headers: dict[str, str],
    ask: Ask,
    interpret: Callable[[int, bytes, float], Answer],
) -> Answer:
    began = time.monotonic()
    try:
        status, sent, text = request(
            at.http, "POST", path, body, headers | at.headers, timeout_s=ask.patience_s
        )
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    answer = interpret(status, text, time.monotonic() - began)
    after = sent.get("Retry-After", "")
    return dataclasses.replace(answer, retry_after_s=int(after)) if after.isdigit() else answer


def lost(error: Exception, began_s: float) -> Answer:
    """Return the answer to a request whose connection broke, or that waited in vain."""
    seconds = time.monotonic() - began_s
    return Answer("lost", repr(error), seconds, isinstance(error, TimeoutError))


def ended_by_http(status: int, body: bytes, seconds: float) -> Answer:
    """Interpret KServe's HTTP answer."""

    def text(answer: Any) -> str:
        return str(next(out["data"][0] for out in answer["outputs"] if out["name"] == "TEXT"))

    return _ended(status, body, seconds, text)


def ended_by_openai(status: int, body: bytes, seconds: float) -> Answer:
    """Interpret an answer of OpenAI's API."""
    return _ended(status, body, seconds, lambda answer: str(answer["text"]))


def _ended(status: int, body: bytes, seconds: float, text: Callable[[Any], str]) -> Answer:
    content = body.decode("utf-8", "replace")
    if status == http.client.OK:
        with contextlib.suppress(ValueError, StopIteration, KeyError, TypeError):
            return Answer("answered", text(json.loads(content)), seconds)
    kind: Kind = "refused" if status in _HTTP_REFUSALS else "failed"
    return Answer(kind, f"{status} {content}", seconds)


def _ended_by_events(status: int, stream: bytes, seconds: float) -> Answer:
    """Interpret a stream of events: one event has the whole text."""
    if status != http.client.OK:
        return ended_by_openai(status, stream, seconds)
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return _only(
        [event["text"] for event in events if event.get("type") == "transcript.text.done"],
        [to_json(event) for event in events if "error" in event],
        seconds,
    )


# ---------------------------------------------------------------- live text


def by_live(at: Addresses, ask: Ask) -> Answer:
    """Send one utterance over a WebSocket, which the client ends itself."""
    began = time.monotonic()
    finals, errors = list[str](), list[str]()
    try:
        with connect_websocket(
            f"ws://{at.http}{LIVE}",
            open_timeout=ask.patience_s,
            close_timeout=1,
            additional_headers=at.headers,
            max_size=None,
            compression=None,
        ) as socket:

            def hear_until(done: Callable[[], object]) -> None:
                while not done():
                    left_s = max(0.0, began + ask.patience_s - time.monotonic())
                    _hear(json.loads(socket.recv(timeout=left_s)), finals, errors)

            for message in utterance(ask):
                socket.send(message)
            hear_until(lambda: finals or errors)
            socket.send(to_json({"type": "input_audio_buffer.commit"}))  # of nothing: an error
            hear_until(lambda: errors)  # it comes behind everything else about the utterance
    except InvalidStatus as error:  # no WebSocket became of it
        refusal = error.response
        return ended_by_openai(refusal.status_code, refusal.body or b"", time.monotonic() - began)
    except (OSError, WebSocketException) as error:
        return lost(error, began)
    return _only(finals, [] if finals else errors, time.monotonic() - began)


def utterance(ask: Ask) -> Iterable[str]:
    """Yield the messages by which a live session says a file and ends it."""
    assert ask.samples is not None
    samples = soxr.resample(ask.samples, SAMPLE_RATE, _LIVE_RATE)
    pcm = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    yield to_json({"type": "session.update", "session": session})
    yield to_json({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
    yield to_json({"type": "input_audio_buffer.commit"})


def _hear(event: dict[str, object], finals: list[str], errors: list[str]) -> None:
    kind = str(event["type"]).rpartition(".")[2]
    if kind == "completed":
        finals.append(str(event["transcript"]))
    elif kind in ("failed", "error"):
        errors.append(str(event["error"]))


def _only(texts: list[str], errors: list[str], seconds: float) -> Answer:
    if len(texts) == 1 and not errors:
        return Answer("answered", texts[0], seconds)
    busy = any("unavailable" in error.lower() or "overloaded" in error.lower() for error in errors)
    text = "; ".join(errors) or f"INTERNAL: {len(texts)} whole texts"
    return Answer("refused" if busy and not texts else "failed", text, seconds)


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
"""Every way to a text, by its name."""


# ---------------------------------------------------------------- answers together


def counted(answers: Sequence[Answer]) -> str:
    """Count the answers of each kind, with the first of each kind that is no transcript."""
    parts = []
    for kind in ("answered", "refused", "failed", "lost"):
        of_kind = [answer for answer in answers if answer.kind == kind]
        if of_kind:
            example = "" if kind == "answered" else f" (first {of_kind[0]})"
            parts.append(f"{len(of_kind)} {kind}{example}")
    return ", ".join(parts) or "nothing was sent"


def all_answered(answers: Sequence[Answer]) -> Check:
    """Check that every request has its transcript."""
    good = all(answer.kind == "answered" for answer in answers)
    return Check("every request is answered", good, counted(answers))


def wav(samples: Samples) -> bytes:
    """Write samples (float32 (n,), 16 kHz mono) as a WAV file of 16 bits."""
    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()
