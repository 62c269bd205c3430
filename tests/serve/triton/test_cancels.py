"""Cancels by key in the real server, as separate requests."""

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.kserve.messages import cancel_of
from serve.wire.folder import engine_links, grpc_target
from tests.serving import ask_triton, audio_file, audio_request, outcomes, settled, wait_until

pytestmark = pytest.mark.server

AUDIO = audio_file(119.0)


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
    (answer,) = ask_triton(stub, audio_request(AUDIO, "0-early-1"))
    assert answer.error_message.startswith("CancelledError: the client cancelled the request")
    assert settled(server)["cancelled"] == before["cancelled"]


def test_a_stream_ends_when_another_takes_its_senders_place(server, stub):
    before = settled(server)
    answers = ask_triton(stub, audio_request(AUDIO, "0-gone-1", segments=True))
    assert not next(answers).error_message
    cancel(stub, "0-new-1")
    *_, last = answers
    assert last.error_message.startswith("CancelledError: ")
    expected = before["cancelled"] + 1
    wait_until(lambda: outcomes(server)["cancelled"] == expected, "it is not counted")
