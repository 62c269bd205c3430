"""Cancels by key in the real server: the key's way through Triton and the relay."""

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serve.triton import wire
from serve.triton.cancels import CancelClient
from serve.triton.folder import RELAY_SOCKET, grpc_target
from tests.serving import WAIT_S, accepted, audio_file, settled, wait_until

pytestmark = pytest.mark.server


@pytest.fixture
def cancels(server):
    client = CancelClient(server.folder / RELAY_SOCKET)
    wait_until(lambda: client.connected, "it does not connect")
    yield client
    client.close()


@pytest.fixture
def stub(server):
    """Of Triton itself, which only the gateway reaches; the gateway takes no keys."""
    with grpc.insecure_channel(grpc_target(server.folder)) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def named_request(model, key):
    audio = audio_file(119.0)
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="AUDIO", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(audio).to_bytes(4, "little") + audio)
    request.parameters[wire.KEY_PARAMETER].string_param = key
    return request


def test_a_call_ends_with_its_key(server, stub, cancels):
    """One of many, so that it surely waits when its cancel comes."""
    before, requests = settled(server), accepted(server)
    keys = [cancels.new_key() for _ in range(60)]
    calls = [stub.ModelInfer.future(named_request(wire.MODEL, key), timeout=WAIT_S) for key in keys]
    wait_until(lambda: accepted(server) > requests + 5, "they never arrived")
    for key in keys:
        cancels.cancel(key)
    for call in calls:
        call.exception()  # waits for its end
    assert calls[-1].code() is grpc.StatusCode.CANCELLED
    assert "the client cancelled the request" in calls[-1].details()
    assert settled(server)["cancelled"] > before["cancelled"]


def test_a_call_whose_cancel_came_first_is_refused(server, stub, cancels):
    before, key = settled(server), cancels.new_key()
    cancels.cancel(key)
    call = stub.ModelInfer.future(named_request(wire.MODEL, key), timeout=WAIT_S)
    assert call.code() is grpc.StatusCode.CANCELLED
    assert "the client cancelled the request" in call.details()
    assert settled(server)["cancelled"] == before["cancelled"]


def test_a_stream_ends_with_its_sender(server, stub, cancels):
    before = settled(server)
    answers = stub.ModelStreamInfer(
        iter([named_request(wire.STREAM_MODEL, cancels.new_key())]), timeout=WAIT_S
    )
    assert not next(answers).error_message
    cancels.close()
    *_, last = answers
    assert last.error_message.startswith("CancelledError: ")
    assert settled(server)["cancelled"] == before["cancelled"] + 1
