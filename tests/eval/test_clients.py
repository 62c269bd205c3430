"""Requests by every API, and the answers' kinds."""

import json
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from eval.clients import CLIENTS, Ask, answer_to, content_of, text_of
from eval.server import Addresses
from serve.speech import audio
from serve.speech.meter import AudioLimits

CLIP = (Path(__file__).parents[1] / "data" / "en_thanks.flac").read_bytes()
NOBODY = Addresses("127.0.0.1:1", "127.0.0.1:1")
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


class Status(grpc.RpcError):
    """How gRPC's client tells of a call's end."""

    def __init__(self, code, text):
        self.code, self.details = (lambda: code), (lambda: text)


def say(end):
    if isinstance(end, Exception):
        raise end
    return text_of(content_of(*end))


ANSWER = json.dumps({"outputs": [{"name": "TEXT", "data": ["hello"]}]}).encode()


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        ((200, ANSWER), "answered", "hello"),
        ((200, b"[" * 100), "failed", "200 ["),
        ((200, b'{"outputs": []}'), "failed", "200"),
        ((503, b"full"), "refused", "503 full"),
        ((413, b"large"), "refused", "413 large"),
        ((400, b"bad"), "failed", "400 bad"),
        ((500, b"\xff"), "failed", "500"),
        (Status(StatusCode.UNAVAILABLE, "OverloadedError: full"), "refused", "UNAVAILABLE Over"),
        (Status(StatusCode.RESOURCE_EXHAUSTED, "too large"), "refused", "RESOURCE_EXHAUSTED too"),
        (Status(StatusCode.UNAVAILABLE, "Socket closed"), "lost", "UNAVAILABLE Socket closed"),
        (Status(StatusCode.INVALID_ARGUMENT, "no audio"), "failed", "INVALID_ARGUMENT no audio"),
    ],
)
def test_a_status_is_a_kind_of_answer(end, kind, text):
    answer = answer_to(lambda: say(end))
    assert answer.kind == kind
    assert answer.text.startswith(text)
