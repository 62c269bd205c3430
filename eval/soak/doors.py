"""The gateway's other doors: OpenAI's API, its events as they come, and live text."""

import base64
import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterable

import soxr
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

from eval.gateway.ways import form
from eval.server import post
from eval.soak.client import Addresses, Ending, by_grpc, by_http, by_stream, ended_by_openai, lost
from eval.soak.files import File
from serve.contract.codec import to_json
from serve.speech.features import SAMPLE_RATE

PATH = "/v1/audio/transcriptions"
_JOBS = "/v1/audio/jobs"
_ASK_AGAIN_S = 0.5
_PHRASES = itertools.count()
_LIVE_RATE = 24_000  # Hz, of 16-bit samples
_DONE = "transcript.text.done"

Door = Callable[[Addresses, File, float], Ending]
"""Sends a file with a time limit in seconds, and waits for the ending."""


def by_form(at: Addresses, data: bytes, timeout_s: float, **fields: str) -> Ending:
    """Send one POST of a form over a connection of its own."""
    body, kind = form(data, **fields)
    began = time.monotonic()
    try:
        answer, text = post(at.http, PATH, body, kind | at.headers, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    took_s = time.monotonic() - began
    events = "text/event-stream" in (answer.getheader("Content-Type") or "")
    return _of_events(text, took_s) if events else ended_by_openai(answer.status, text, took_s)


def _of_events(stream: bytes, seconds: float) -> Ending:
    """Interpret a stream of events: the one event that has the whole text."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return _only(
        [event["text"] for event in events if event.get("type") == _DONE],
        [to_json(event) for event in events if "error" in event],
        seconds,
    )


def by_live(at: Addresses, file: File, timeout_s: float) -> Ending:
    """Send one utterance over a WebSocket, which the client ends itself."""
    began = time.monotonic()
    try:
        with connect(
            f"ws://{at.http}/v1/realtime?intent=transcription",
            open_timeout=timeout_s,
            close_timeout=1,
            additional_headers=at.headers,
            max_size=None,
            compression=None,
        ) as socket:
            for message in utterance(file):
                socket.send(message)
            finals, errors = list[str](), list[str]()
            while not finals and not errors:
                left_s = max(0.0, began + timeout_s - time.monotonic())
                _hear(json.loads(socket.recv(timeout=left_s)), finals, errors)
            socket.send(to_json({"type": "input_audio_buffer.commit"}))  # of nothing: an error
            while len(errors) < 1:  # behind everything else that is said of the utterance
                left_s = max(0.0, began + timeout_s - time.monotonic())
                _hear(json.loads(socket.recv(timeout=left_s)), finals, errors)
    except InvalidStatus as error:  # no WebSocket became of it
        refusal = error.response
        return ended_by_openai(refusal.status_code, refusal.body or b"", time.monotonic() - began)
    except (OSError, WebSocketException) as error:
        return lost(error, began)
    return _only(finals, [] if finals else errors, time.monotonic() - began)


def by_job(at: Addresses, file: File, timeout_s: float) -> Ending:
    """Post a job, wait for its end, and read its result."""
    began = time.monotonic()
    body, kind = form(file.data, response_format="json")
    try:
        answer, text = post(at.http, _JOBS, body, kind | at.headers, timeout_s)
        if answer.status != http.client.ACCEPTED:
            return ended_by_openai(answer.status, text, time.monotonic() - began)
        job = json.loads(text)
        while job["status"] not in ("completed", "failed", "cancelled"):
            if time.monotonic() - began > timeout_s:
                return lost(TimeoutError(f"the job is {job['status']}"), began)
            time.sleep(_ASK_AGAIN_S)
            status, text = _get(at, f"{_JOBS}/{job['id']}", timeout_s)
            if status != http.client.OK:
                return ended_by_openai(status, text, time.monotonic() - began)
            job = json.loads(text)
        status, text = _get(at, f"{_JOBS}/{job['id']}/result", timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return lost(error, began)
    return ended_by_openai(status, text, time.monotonic() - began)


def _get(at: Addresses, path: str, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(at.http, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=at.headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def utterance(file: File) -> Iterable[str]:
    """Yield the messages by which a live session says a file and ends it."""
    samples = soxr.resample(file.samples, SAMPLE_RATE, _LIVE_RATE)
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


def _only(texts: list[str], errors: list[str], seconds: float) -> Ending:
    if len(texts) == 1 and not errors:
        return Ending("answered", texts[0], seconds)
    busy = any("unavailable" in error.lower() or "overloaded" in error.lower() for error in errors)
    text = "; ".join(errors) or f"INTERNAL: {len(texts)} whole texts"
    return Ending("refused" if busy and not texts else "failed", text, seconds)


DOORS: dict[str, Door] = {
    "KServe gRPC": lambda at, file, limit_s: by_grpc(at, file.data, limit_s),
    "KServe HTTP": lambda at, file, limit_s: by_http(at, file.data, limit_s),
    "KServe stream": lambda at, file, limit_s: by_stream(at, file.data, limit_s),
    "OpenAI": lambda at, file, limit_s: by_form(at, file.data, limit_s),
    "SSE": lambda at, file, limit_s: by_form(at, file.data, limit_s, stream="true"),
    "live": by_live,
    "job": by_job,
    # Each list is another one, and its weight is too small to change a text.
    "phrases": lambda at, file, limit_s: by_form(
        at, file.data, limit_s, phrases=f"Zanzibar {next(_PHRASES)}^0.0001"
    ),
}
"""Every way to a text, by its name."""
