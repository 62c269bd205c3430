"""The real server: answers, refusals, cancels, company, metrics, start and end."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve.contract.errors import AudioError, CancelledError, EarshotError, OverloadedError
from serve.contract.messages import Request, RequestFinished, SegmentReady
from serve.gateway.kserve.messages import cancel_of
from serve.speech.languages import LANGUAGE_NAMES
from serve.wire import tensors
from serve.wire.client import TritonClient
from serve.wire.folder import engine_links, grpc_target
from tests.serving import (
    CLIP,
    LONG,
    accepted,
    ask_triton,
    audio_file,
    audio_request,
    http_inputs,
    metrics_page,
    outcomes,
    settled,
)
from tests.waits import WAIT_S, wait_until

pytestmark = pytest.mark.server


# ---------------------------------------------------------------- answers


def test_an_answer_by_grpc_is_whole_and_says_where_time_went(client):
    transcript = client.transcribe(CLIP)
    assert transcript.duration == 1.0
    assert transcript.language in LANGUAGE_NAMES and 0 < transcript.language_prob <= 1
    assert transcript.text == "".join(s.text for s in transcript.segments).strip()
    for segment in transcript.segments:
        assert 0 <= segment.start <= segment.end <= 1.0
        assert segment.tokens and segment.avg_logprob < 0 and 0 <= segment.no_speech_prob <= 1
    timings = transcript.timings
    assert 0 < timings.encode_s <= timings.total_s and 0 < timings.decode_s <= timings.total_s


def comparable(transcript):
    """All but how long it took; a CPU rounds scores by how many windows it decodes at a time."""
    segments = tuple(
        dataclasses.replace(
            segment,
            avg_logprob=round(segment.avg_logprob, 4),
            no_speech_prob=round(segment.no_speech_prob, 4),
        )
        for segment in transcript.segments
    )
    return dataclasses.replace(transcript, segments=segments, timings=None)


def test_http_and_stream_give_the_same_answer_as_grpc(server, client):
    expected = client.transcribe(LONG, language="en")
    assert expected.language_prob is None and len(expected.segments) >= 3

    *pieces, last = client.stream(Request(audio=LONG, language="en"))
    assert isinstance(last, RequestFinished)
    assert [type(piece) for piece in pieces] == [SegmentReady] * len(expected.segments)
    assert tuple(piece.segment for piece in pieces) == last.transcript.segments

    inputs = http_inputs(Request(audio=LONG, language="en"))
    with triton_http.InferenceServerClient(server.http, network_timeout=WAIT_S) as http:
        by_http = tensors.transcript_from_outputs(http.infer("whisper", inputs).as_numpy)
    for found in (last.transcript, by_http):
        assert comparable(found) == comparable(expected)


def test_a_request_has_the_beam_that_it_asks_for_beside_others(client):
    options = [{}, {"beam_size": 4}, {"best_of": 4, "temperature": 0.8}]
    asked = [Request(audio=LONG, language="en", **each) for each in options]
    alone = [client.start(request).result().text for request in asked]
    assert len(set(alone)) == 3, "a search finds what the likeliest token alone does not"
    together = [client.start(request) for request in asked * 2]
    assert [call.result().text for call in together] == alone * 2


def test_a_stream_can_be_asked_for_the_answer_alone(server):
    request = infer_request("whisper_stream", AUDIO=CLIP, STREAM=False)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request]), timeout=WAIT_S))
    names = [{output.name for output in answer.infer_response.outputs} for answer in answers]
    assert len(names) == 1 and "TIMINGS" in names[0]


# ---------------------------------------------------------------- refusals


def infer_request(model, **inputs):
    """A request as any KServe client may send it; a tuple is (datatype, shape, raw bytes)."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        if not isinstance(value, tuple):
            value = encoded(name, value)
        datatype, shape, raw = value
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def encoded(name, value):
    if isinstance(value, np.ndarray):
        return "FP32", value.shape, value.astype("<f4").tobytes()
    if isinstance(value, bool):
        return "BOOL", [1], bytes([value])
    if isinstance(value, int):
        return "INT32", [1], value.to_bytes(4, "little", signed=True)
    return "BYTES", [1], len(value).to_bytes(4, "little") + value


NAN = np.full(1600, np.nan, np.float32)
WAV = audio_file(2.0, "WAV")
INVALID = {
    "nothing": ({}, "AUDIO"),
    "truncated WAV": ({"AUDIO": WAV[: len(WAV) // 2]}, "audio is cut short"),
    "NaN": ({"SAMPLES": NAN, "SAMPLE_RATE": 16_000}, "NaN"),
    "unknown option": ({"AUDIO": CLIP, "VOLUME": 3}, "VOLUME"),
    "torn BYTES": ({"AUDIO": ("BYTES", [1], b"\xff\xff\xff\x7fabc")}, "AUDIO"),
}


@pytest.mark.parametrize("inputs, message", INVALID.values(), ids=INVALID)
def test_bad_input_is_refused_by_name_and_the_server_goes_on(server, client, inputs, message):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(infer_request("whisper", **inputs), timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
        assert message in refused.value.details()

        (answer,) = stub.ModelStreamInfer(
            iter([infer_request("whisper_stream", **inputs)]), timeout=WAIT_S
        )
        assert message in answer.error_message
    assert client.transcribe(CLIP).duration == 1.0


@pytest.mark.nightly
def test_a_full_queue_refuses_and_recovers(server, client):
    before = settled(server)
    with ThreadPoolExecutor(150) as pool:
        with TritonClient(server.grpc, timeout_s=120) as leaving:
            ends = [pool.submit(error_of, leaving.start(Request(audio=LONG))) for _ in range(150)]
            # Told to the client, not only counted by the server: a cancel overtakes a refusal.
            told = (end.result() for end in as_completed(ends))
            assert any(isinstance(error, OverloadedError) for error in told), "nothing was refused"
        errors = [end.result() for end in ends]
    kinds = {type(error) for error in errors}
    assert kinds <= {OverloadedError, CancelledError, type(None)}, kinds
    settled(server)  # cancels take a moment to be seen
    assert client.transcribe(CLIP).duration == 1.0
    counts = settled(server)
    ended = {name: counts[name] - before[name] for name in counts}
    assert ended["rejected"] > 0 and ended["failed"] == ended["timed_out"] == 0
    assert sum(ended.values()) <= 151  # a call cancelled very early never reached the model


@pytest.mark.nightly
def test_large_requests_leave_no_memory_with_triton(server, client):
    (triton,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "tritonserver"
    ]
    before_mb = own_memory_mb(triton.pid)
    calls = [client.start(Request(audio=bytes(24 * 2**20))) for _ in range(8)]
    assert {type(error_of(call)) for call in calls} == {AudioError}
    wait_until(lambda: own_memory_mb(triton.pid) < before_mb + 64, "Triton keeps the messages")


def own_memory_mb(pid):
    """Memory of a process that it shares with no other."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024


def error_of(call):
    try:
        call.result()
    except EarshotError as error:
        return error
    return None


# ---------------------------------------------------------------- clients that go


def test_a_cancelled_stream_and_a_cancelled_call_free_their_slots(server, client):
    before = settled(server)
    audio = audio_file(119.0)
    stream = client.stream(Request(audio=audio))
    next(stream)
    requests = accepted(server)
    with TritonClient(server.grpc, timeout_s=120) as leaving:
        calls = [leaving.start(Request(audio=audio)) for _ in range(30)]
        wait_until(lambda: accepted(server) > requests + 5, "no request arrived")
        stream.close()
    assert any(isinstance(error_of(call), CancelledError) for call in calls)
    wait_until(lambda: outcomes(server)["cancelled"] > before["cancelled"], "none was cancelled")
    after = settled(server)
    assert after["failed"] == before["failed"] and after["timed_out"] == before["timed_out"]


@pytest.fixture
def stub(server):
    """Of Triton itself, which only the gateway reaches; the gateway takes no keys."""
    with grpc.insecure_channel(grpc_target(engine_links(server.folder, 1)[0])) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def cancel(stub, key):
    (answer,) = ask_triton(stub, cancel_of(key))
    assert not answer.error_message and not answer.infer_response.outputs


def test_a_call_whose_cancel_came_first_is_refused(server, stub):
    before = settled(server)
    cancel(stub, "0-early-1")
    (answer,) = ask_triton(stub, audio_request(audio_file(119.0), "0-early-1"))
    assert answer.error_message.startswith("CancelledError: the client cancelled the request")
    assert settled(server)["cancelled"] == before["cancelled"]


@pytest.mark.nightly
def test_a_stream_ends_when_another_takes_its_senders_place(server, stub):
    before = settled(server)
    answers = ask_triton(stub, audio_request(audio_file(119.0), "0-gone-1", segments=True))
    assert not next(answers).error_message
    cancel(stub, "0-new-1")
    *_, last = answers
    assert last.error_message.startswith("CancelledError: ")
    expected = before["cancelled"] + 1
    wait_until(lambda: outcomes(server)["cancelled"] == expected, "it is not counted")


# ---------------------------------------------------------------- metrics


def test_metrics_tell_what_was_done(server, client):
    client.transcribe(LONG)
    settled(server)
    page = metrics_page(server)
    values = dict(re.findall(r'^(earshot_\w+){device="cpu"} (\S+)$', page, re.MULTILINE))
    for name in ("windows_total", "tokens_total", "audio_seconds_total", "busy_seconds_total"):
        assert float(values[f"earshot_{name}"]) > 0, name
    for name in ("encode_seconds_total", "decode_seconds_total", "batch_size", "rtfx"):
        assert float(values[f"earshot_{name}"]) > 0, name
    for name in ("queue_depth", "busy_slots", "pending_requests"):
        assert float(values[f"earshot_{name}"]) == 0, name
