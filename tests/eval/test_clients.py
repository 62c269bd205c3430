"""Requests by every API, and the answers' kinds."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from eval.clients import CLIENTS, Ask, answer_to, by_grpc, by_stream, content_of, text_of
from eval.server import Addresses
from serve.speech import audio
from serve.speech.meter import AudioLimits

CLIP = (Path(__file__).parents[1] / "data" / "en_thanks.flac").read_bytes()
NOBODY = Addresses("127.0.0.1:1", "127.0.0.1:1")
METHOD = "inference.GRPCInferenceService"
WITHOUT_JOBS = {name: send for name, send in CLIENTS.items() if name != "job"}


def ask_of(data, patience_s=60.0):
    samples = audio.join_blocks(audio.decode(CLIP, AudioLimits(60.0)))
    return Ask(data, patience_s=patience_s, samples=samples)


@pytest.mark.server
def test_every_api_gives_the_same_text_and_refuses_what_is_no_audio(server):
    addresses = Addresses(server.http, server.grpc)
    answers = {name: send(addresses, ask_of(CLIP)) for name, send in WITHOUT_JOBS.items()}
    assert {answer.kind for answer in answers.values()} == {"answered"}, answers
    live = answers.pop("live").text  # its audio is cut in another way
    assert live and len({answer.text for answer in answers.values()}) == 1, answers

    for name in WITHOUT_JOBS.keys() - {"live"}:
        answer = CLIENTS[name](addresses, ask_of(b"no audio"))
        assert answer.kind == "failed", (name, answer)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_request_without_a_server_is_lost(name):
    answer = CLIENTS[name](NOBODY, ask_of(CLIP, 5.0))
    assert (answer.kind, answer.waited_in_vain) == ("lost", False), answer


@pytest.fixture
def speaking():
    """A gRPC server that ends every call with a status; set `status`."""
    status = {}

    def abort(request, context):
        context.abort(status["code"], status["text"])

    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(abort),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(abort),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield status, Addresses("", f"127.0.0.1:{port}")
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
def test_a_status_is_a_kind_of_answer(speaking, send, code, text, kind):
    status, addresses = speaking
    status.update(code=code, text=text)
    answer = send(addresses, Ask(CLIP, patience_s=10.0))
    assert answer.kind == kind, answer


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
def test_an_http_status_is_a_kind_of_answer(status, body, kind, text):
    answer = answer_to(lambda: text_of(content_of(status, body)))
    assert answer.kind == kind
    assert answer.text.startswith(text)
