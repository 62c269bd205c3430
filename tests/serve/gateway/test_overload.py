"""A latency target at the gateway's doors: who is refused is told so, and when to come back."""

import io
import json
import re

import grpc
import numpy as np
import pytest
import soundfile
from tritonclient.grpc import service_pb2

from serve.contract.config import RuntimeConfig
from serve.gateway.kserve.messages import audio_of_tensors
from serve.gateway.target import LatencyTarget, audio_of_file
from tests.gateways import INFER, WAIT_S, json_request, message, until

SLOTS = RuntimeConfig().slots
REFUSED = "OverloadedError: gateway.target_p99_s = 2 allows no further request"


@pytest.fixture
def full(start):
    """A gateway that has let in as much as it does before it knows how fast its engine is."""
    running = start(target_p99_s=2.0)
    calls = []
    for _ in range(SLOTS * 3):
        calls.append(running.call().future(message("wait"), timeout=WAIT_S))
        until(lambda: calls[-1].done() or len(running.triton.waiting) == len(calls))
        if calls[-1].done():
            return running, calls[:-1], calls[-1]
    raise AssertionError("nobody was refused")


def test_what_cannot_be_answered_in_time_is_refused_at_every_door_with_a_time(full):
    running, _, refused = full
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.details().startswith(REFUSED)
    assert "; there may be room in 1 s" in refused.details()
    assert dict(refused.trailing_metadata())["retry-after"] == "1"
    body = json.dumps(json_request()).encode()
    status, headers, answer = running.ask("POST", INFER, body)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(answer)["error"].startswith(REFUSED)
    page = running.page()
    assert 'earshot_gateway_refused_total{reason="latency_target"} 2.0' in page
    assert "earshot_gateway_target_seconds 2.0" in page


def test_there_is_room_again_when_answers_have_come_or_clients_have_gone(full):
    running, calls, _ = full
    calls.pop().cancel()
    until(lambda: len(running.triton.waiting) == len(calls))
    asked = []

    def is_admitted():
        """Ask again whenever the gateway has refused: it may learn late of the cancelled call."""
        if not asked or asked[-1].done():
            asked.append(running.call().future(message("wait"), timeout=WAIT_S))
        return len(running.triton.waiting) == len(calls) + 1

    until(is_admitted)
    running.triton.release()
    for call in (*calls, asked[-1]):
        assert service_pb2.ModelInferResponse.FromString(call.result()).outputs
    assert not re.search(r"earshot_gateway_target_rate{.*} 0\.0", running.page())


def test_without_a_target_no_header_of_audio_is_read(start, monkeypatch):
    """A hostile one costs milliseconds of the event loop."""
    monkeypatch.setattr("serve.gateway.kserve.messages.audio_of_tensors", None)
    monkeypatch.setattr("serve.gateway.openai.form.audio_of_file", None)
    running = start()
    assert running.call()(message())
    assert running.infer(json.dumps(json_request()).encode())[0] == 200
    assert running.transcribe()[0] == 200
    assert "earshot_gateway_target" not in running.page()


def test_files_tell_their_length_or_it_is_learnt():
    file = io.BytesIO()
    soundfile.write(file, np.zeros(48_000), 16_000, format="WAV", subtype="PCM_16")
    wav = file.getvalue()
    assert audio_of_file(wav[:1000], len(wav)).seconds == pytest.approx(3.0)
    audio = audio_of_file(b"OggS" + bytes(100), 40_000)
    target = LatencyTarget(2.0, SLOTS)
    before = target.seconds(audio)
    for _ in range(50):
        target.learn(audio, 20.0)
    assert before == pytest.approx(5.0)
    assert target.seconds(audio_of_file(b"OggS" + bytes(100), 8_000)) == pytest.approx(4.0)


def test_a_file_whose_header_is_wrong_is_left_to_the_engine():
    chunks = b"RIFF" + bytes(4) + b"WAVE" + b"LIST\0\0\0\0" * 2_000
    assert audio_of_file(chunks, len(chunks)).seconds is None


def test_samples_are_as_long_as_they_are_many():
    request = service_pb2.ModelInferRequest.FromString(message(samples=32_000))
    audio = audio_of_tensors(request, tuple(map(memoryview, request.raw_input_contents)))
    assert audio.seconds == 2.0
