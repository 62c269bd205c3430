"""Requests by every way, and what their endings are called."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from eval.soak.client import (
    Addresses,
    Ending,
    by_grpc,
    by_http,
    by_stream,
    counted,
    ended_by_http,
)

CLIP = (Path(__file__).parents[2] / "data" / "en_thanks.flac").read_bytes()
NOBODY = Addresses("127.0.0.1:1", "127.0.0.1:1")
METHOD = "inference.GRPCInferenceService"
WAYS = (by_grpc, by_http, by_stream)


@pytest.mark.server
def test_every_way_has_the_same_answer(server):
    at = Addresses(server.http, server.grpc)
    found = [send(at, CLIP, 60.0) for send in WAYS]
    assert {ending.kind for ending in found} == {"answered"}, found
    assert len({ending.text for ending in found}) == 1, found


@pytest.mark.server
def test_every_way_is_told_what_is_wrong(server):
    at = Addresses(server.http, server.grpc)
    for send in WAYS:
        ending = send(at, b"no audio", 60.0)
        assert ending.kind == "failed", ending
        assert "AudioError" in ending.text


@pytest.mark.parametrize("send", WAYS, ids=lambda send: send.__name__)
def test_where_nobody_listens_a_request_is_lost(send):
    ending = send(NOBODY, CLIP, 5.0)
    assert (ending.kind, ending.waited_in_vain) == ("lost", False), ending


@pytest.fixture
def speaking():
    """A gRPC server that ends every call with a status; set `said`."""
    said = {}

    def abort(request, context):
        if said["code"] is None:
            context.cancel()
        context.abort(said["code"], said["text"])

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(abort),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(abort),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield said, Addresses("", f"127.0.0.1:{port}")
    server.stop(None)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "OverloadedError: the queue is full", "refused"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", "refused"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "lost"),
        (grpc.StatusCode.INVALID_ARGUMENT, "AudioError: no audio", "failed"),
    ],
)
@pytest.mark.parametrize("send", [by_grpc, by_stream], ids=lambda send: send.__name__)
def test_a_status_is_a_kind_of_ending(speaking, send, code, text, kind):
    said, at = speaking
    said.update(code=code, text=text)
    ending = send(at, CLIP, 10.0)
    assert ending.kind == kind, ending


ANSWER = json.dumps({"outputs": [{"name": "TEXT", "data": ["hello"]}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (200, ANSWER, "answered", "hello"),
        (200, b"[" * 100, "failed", "200 ["),
        (200, b'{"outputs": []}', "failed", "200"),
        (503, b"full", "refused", "503 full"),
        (413, b"large", "refused", "413 large"),
        (400, b"bad", "failed", "400 bad"),
        (500, b"\xff", "failed", "500"),
    ],
)
def test_an_http_status_is_a_kind_of_ending(status, body, kind, text):
    ending = ended_by_http(status, body, 0.1)
    assert ending.kind == kind
    assert ending.text.startswith(text)


def test_endings_are_counted_with_an_example_of_the_bad_ones():
    found = [Ending("answered", "a", 1), Ending("answered", "b", 1), Ending("lost", "gone", 2)]
    assert counted(found) == "2 answered, 1 lost (first lost after 2.0 s: gone)"
    assert counted([]) == "nothing was sent"
