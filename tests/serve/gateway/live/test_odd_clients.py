"""Sessions with clients that do things otherwise, and handshakes that come to nothing."""

import base64
import contextlib
import os
import socket
import struct
import threading

import pytest

from tests.gateways import WAIT_S, until
from tests.serve.gateway.live.sessions import LIVE, LoudIsSpeech, refused_session, session, sound

SPEECH = sound(3.3)


@pytest.fixture
def opened(start, loud_is_speech):
    """Open a session by an address with a query."""
    running = start(live=LIVE)
    with contextlib.ExitStack() as stack:
        yield lambda query: stack.enter_context(session(running, query))


def input_of(event):
    return event["session"]["audio"]["input"]


# ---------------------------------------------------------------- what is sent


def test_unknown_keys_of_events_and_parameters_of_the_url_are_ignored(opened):
    """Azure's, with a model's name that is an alias."""
    query = "?api-version=2025-04-01-preview&deployment=gpt-4o-transcribe&intent=transcription"
    client = opened(f"{query}&model=gpt-realtime")
    headers = client.socket.response.headers
    assert headers["x-earshot-ignored"] == "api-version, deployment"
    assert headers["x-earshot-model"] == "demo"
    client.say("session.update", session={"type": "transcription", "voice": "alloy"}, reason="new")
    (warning,) = client.until("session.updated")["warnings"]
    assert warning["param"] == "session.voice"


def test_keywords_are_boosted_as_phrases_are(talk):
    client = talk(turn_detection=None)
    client.set(transcription={"keywords": ["Zoë", "Karenina^2"], "phrases": ["oboe"]})
    assert "warnings" not in client.until("session.updated")
    client.audio(SPEECH)
    client.commit()
    asked = client.running.triton.inputs[-1]
    assert all(text in asked["PHRASES"] for text in ("Zoë", "Karenina^2", "oboe"))


def test_a_longer_delay_has_words_wait(talk):
    """With 1.3 s behind it a word is final by one decoding, with `xhigh` after three times that."""
    client = talk(turn_detection=None)
    client.set(transcription={"delay": "xhigh"})
    assert input_of(client.until("session.updated"))["transcription"]["delay"] == "xhigh"
    client.audio(sound(3.3))
    until(lambda: client.running.triton.ended)
    client.say("session.update", session={})
    client.until("session.updated")
    assert not any(event["type"].endswith(".delta") for event in client.events)
    assert client.commit() == "one two three"


# ---------------------------------------------------------------- models without turns


def test_a_client_that_never_commits_gets_deltas_and_no_end(opened):
    client = opened("?model=gpt-live-transcribe")
    client.set(transcription={"prompt": "one two three four five six", "language": "en"})
    client.audio(sound(3.3) + sound(2.0, level=0.0))
    item = client.until(".delta")["item_id"]
    client.say("session.update", session={})
    client.until("session.updated")
    kinds = {event["type"].rpartition(".")[2] for event in client.events}
    assert not kinds & {"committed", "completed", "speech_stopped"}
    client.say("input_audio_buffer.commit")
    done = client.until(".completed")
    assert done["transcript"].startswith("one two three") and done["item_id"] == item
    assert client.deltas(item) == done["transcript"]


# ---------------------------------------------------------------- handshakes


HANDSHAKE = (
    "GET /v1/realtime{query} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [("?intent=conversation", 400, "intent"), ("?model=gpt-9", 404, "model")],
)
def test_a_refused_handshake_is_no_error_of_the_server(shared, caplog, query, status, param):
    found, error = refused_session(shared, query)
    assert (found, error["param"]) == (status, param)
    until(lambda: not shared.gateway.http[0].server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(("query", "leave"), [("", "close"), ("?model=gpt-9", "reset")])
def test_a_client_that_leaves_during_the_handshake_is_no_error(
    start, loud_is_speech, monkeypatch, caplog, query, leave
):
    running, left = start(live=LIVE), threading.Event()

    class Slow(LoudIsSpeech):
        def __init__(self):
            left.wait(WAIT_S)

    monkeypatch.setattr("serve.gateway.live.route.VadModel", Slow)
    host, _, port = running.http.rpartition(":")
    server = running.gateway.http[0].server_state
    with socket.create_connection((host, int(port))) as client:
        key = base64.b64encode(os.urandom(16)).decode()
        client.sendall(HANDSHAKE.format(query=query, host=running.http, key=key).encode())
        if not query:
            until(lambda: running.services.admission.requests)
        if leave == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not server.connections)
    left.set()
    until(lambda: not server.tasks and not running.services.admission.requests)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
