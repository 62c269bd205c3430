"""The gateway before a real server."""

import http.client
import json

import grpc
import numpy as np
import pytest
import tritonclient.http as triton_http

from serve.contract.messages import Request
from serve.gateway.upstream.calls import SERVICE
from serve.wire import tensors
from tests.gateways import WAIT_S
from tests.serving import CLIP, http_inputs, wait_until

pytestmark = pytest.mark.server


@pytest.fixture
def ask(server):
    """Status and body of an HTTP request."""
    host, _, port = server.http.rpartition(":")

    def ask(method, path, body=None):
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        connection.request(method, path, body)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
        connection.close()
        return status, body

    return ask


def test_deeply_nested_json_does_it_no_harm(ask):
    for body in (b"[", b'{"inputs":', b'{"parameters":{"a":'):
        for times, why in ((10_000, b"recursion limit"), (200_000, b"marks and brackets")):
            status, answer = ask("POST", "/v2/models/whisper/infer", body * times)
            assert status == 400 and why in answer
    assert ask("GET", "/v2/health/ready")[0] == 200


def test_json_and_binary_data_say_the_same(server):
    inputs = http_inputs(Request(audio=CLIP, language="en"))
    client = triton_http.InferenceServerClient(server.http, network_timeout=WAIT_S)
    outputs = [
        triton_http.InferRequestedOutput(name, binary_data=False) for name in tensors.OUTPUTS
    ]
    as_json = client.infer(tensors.MODEL, inputs, outputs=outputs)
    as_bytes = client.infer(tensors.MODEL, inputs)
    client.close()
    assert as_json.as_numpy("TEXT")[0] == as_bytes.as_numpy("TEXT")[0].decode()
    assert as_json.as_numpy("DURATION") == as_bytes.as_numpy("DURATION") == np.float64(1.0)
    assert json.loads(as_json.as_numpy("TIMINGS")[0])


def test_the_page_is_told_what_the_engine_can_do(ask):
    def state():
        return json.loads(ask("GET", "/state")[1])

    def told():
        found = state()
        return found["status"] == "ready" and found["now"]

    wait_until(told, "the engine's numbers never came")
    found = state()
    assert "en" in found["offers"]["languages"]
    assert 0 <= found["now"]["slots_busy"] <= found["now"]["slots"] > 0


def test_shared_memory_and_settings_cannot_be_reached(server):
    with grpc.insecure_channel(server.grpc) as channel:
        for method in ("SystemSharedMemoryStatus", "RepositoryIndex", "ModelConfig", "LogSettings"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(SERVICE + method)(b"", timeout=WAIT_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
