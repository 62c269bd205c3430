"""The client against a scripted KServe server in this process."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve.contract.errors import (
    AudioError,
    CancelledError,
    DeadlineError,
    EarshotError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from serve.contract.messages import Request, RequestFinished, SegmentReady
from serve.wire import tensors
from serve.wire.client import TritonClient
from tests.serving import SEGMENT, TRANSCRIPT
from tests.waits import WAIT_S


def reply(outputs):
    answer = service_pb2.ModelInferResponse(model_name="whisper")
    for name, values in outputs.items():
        datatype = tensors.OUTPUTS[name].datatype
        answer.outputs.add(name=name, datatype=datatype, shape=values.shape)
        raw = values.tobytes()
        if datatype == "BYTES":
            raw = b"".join(len(item).to_bytes(4, "little") + item for item in values)
        answer.raw_output_contents.append(raw)
    return answer


class Script(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers as it is told to; keeps what it was asked, and whether the client stayed."""

    def __init__(self):
        self.asked = []
        self.fail = None  # (code, words)
        self.outputs = tensors.transcript_outputs(TRANSCRIPT)
        self.hold = threading.Event()
        self.hold.set()
        self.left = threading.Event()

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name != self.fail)

    def ModelInfer(self, request, context):
        context.add_callback(self.left.set)
        self.asked.append(request)
        if self.fail is not None:
            context.abort(*self.fail)
        self.hold.wait(WAIT_S)
        return reply(self.outputs)

    def ModelStreamInfer(self, requests, context):
        context.add_callback(self.left.set)
        self.asked.append(next(requests))
        if self.fail is not None:
            yield service_pb2.ModelStreamInferResponse(error_message=self.fail[1])
            return
        for segment in TRANSCRIPT.segments:
            yield self.message(tensors.segment_outputs(segment))
        self.hold.wait(WAIT_S)
        yield self.message(self.outputs)

    def message(self, outputs):
        return service_pb2.ModelStreamInferResponse(infer_response=reply(outputs))


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def address(script):
    with ThreadPoolExecutor(16) as pool:
        server = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(script, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        script.hold.set()
        server.stop(None).wait(WAIT_S)


@pytest.fixture
def client(address):
    with TritonClient(address, timeout_s=WAIT_S) as client:
        yield client


def test_an_answer_arrives_whole_and_the_request_said_everything(client, script):
    assert client.transcribe(b"audio", language="es", max_tokens=9) == TRANSCRIPT
    (asked,) = script.asked
    assert asked.model_name == "whisper"
    assert [(i.name, i.datatype, list(i.shape)) for i in asked.inputs] == [
        ("AUDIO", "BYTES", [1]),
        ("LANGUAGE", "BYTES", [1]),
        ("MAX_TOKENS", "INT32", [1]),
    ]
    assert asked.raw_input_contents == [b"\5\0\0\0audio", b"\2\0\0\0es", b"\x09\0\0\0"]


def test_a_stream_gives_segments_before_the_answer_exists(client, script):
    script.hold.clear()
    events = client.stream(Request(audio=b"audio"))
    assert [next(events), next(events)] == [SegmentReady(SEGMENT)] * 2
    script.hold.set()
    assert list(events) == [RequestFinished(TRANSCRIPT)]
    assert script.asked[0].model_name == "whisper_stream"


@pytest.mark.parametrize(
    "code, words, kind, message",
    [
        ("INVALID_ARGUMENT", "AudioError: audio has 0 bytes", AudioError, "^audio has 0 bytes$"),
        ("INVALID_ARGUMENT", "unexpected shape for 'X'", RequestError, "^unexpected shape"),
        ("UNAVAILABLE", "OverloadedError: full", OverloadedError, "^full$"),
        ("UNAVAILABLE", "Socket closed", UnavailableError, "^server at 127.*: Socket closed$"),
        ("NOT_FOUND", "unknown model", UnavailableError, "unknown model"),
        ("CANCELLED", "gone", CancelledError, "cancelled"),
        ("INTERNAL", "EarshotError: internal error", EarshotError, "^internal error$"),
    ],
)
def test_errors_come_back_as_the_class_that_was_meant(client, script, code, words, kind, message):
    script.fail = (grpc.StatusCode[code], words)
    with pytest.raises(EarshotError, match=message) as found:
        client.transcribe(b"audio")
    assert type(found.value) is kind


def test_an_error_in_a_stream_is_raised(client, script):
    script.fail = (None, "AudioError: audio has 0 bytes")
    with pytest.raises(AudioError, match=r"^audio has 0 bytes$"):
        list(client.stream(Request(audio=b"")))


def test_a_stream_that_is_left_early_ends_at_the_server(client, script):
    script.hold.clear()
    events = client.stream(Request(audio=b"audio"))
    next(events)
    events.close()
    assert script.left.wait(WAIT_S)


@pytest.mark.parametrize("streamed", [False, True])
def test_waiting_has_an_end(address, script, streamed):
    script.hold.clear()
    with TritonClient(address, timeout_s=0.3) as client, pytest.raises(DeadlineError):
        if streamed:
            list(client.stream(Request(audio=b"audio")))
        else:
            client.transcribe(b"audio")
    assert script.left.wait(WAIT_S)


def test_ready_asks_for_the_model(client, script):
    assert client.ready()
    script.fail = "whisper"
    assert client.ready() is False


@pytest.mark.parametrize(
    "ending, cancels", [("whole", False), ("refused", False), ("left early", True)]
)
def test_only_a_stream_that_has_not_ended_is_cancelled(
    client, script, monkeypatch, ending, cancels
):
    """A cancel that meets its request's end can make Triton 24.10 keep it for ever."""
    started, seen = [], []
    start = triton_grpc.InferenceServerClient.start_stream
    stop = triton_grpc.InferenceServerClient.stop_stream

    def start_stream(self, *arguments, **options):
        started.append(self)
        start(self, *arguments, **options)

    def stop_stream(self, cancel_requests=False):
        if self in started:  # one of another test's may be collected meanwhile
            seen.append(cancel_requests)
        stop(self, cancel_requests)

    monkeypatch.setattr(triton_grpc.InferenceServerClient, "start_stream", start_stream)
    monkeypatch.setattr(triton_grpc.InferenceServerClient, "stop_stream", stop_stream)
    if ending == "refused":
        script.fail = (None, "AudioError: audio has 0 bytes")
    if ending == "left early":
        script.hold.clear()  # or its end may come first
    events = client.stream(Request(audio=b"audio"))
    if ending == "left early":
        next(events)
        events.close()
    else:
        with contextlib.suppress(AudioError):
            list(events)
    assert seen[0] is cancels  # closing the connection stops it once more


def test_hanging_up_ends_streams(address, script):
    script.hold.clear()
    client = TritonClient(address, timeout_s=WAIT_S)
    events = client.stream(Request(audio=b"audio"))
    assert [next(events).segment for _ in TRANSCRIPT.segments] == list(TRANSCRIPT.segments)
    client.close()
    for stream in (events, client.stream(Request(audio=b"audio"))):
        with pytest.raises(CancelledError):
            next(stream)
    assert script.left.wait(WAIT_S)


def test_a_server_that_says_nothing_is_told_from_none():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with TritonClient(address) as client:
            assert client.state(1.0) == "silent"
    with TritonClient(address) as client:
        assert client.state(WAIT_S) == "absent" and client.ready() is False
        for ask in (client.transcribe, lambda audio: list(client.stream(Request(audio)))):
            with pytest.raises(UnavailableError, match=f"server at {address}"):
                ask(b"audio")
