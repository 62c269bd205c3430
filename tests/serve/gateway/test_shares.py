"""What one of several keys may have at a time, and what it leaves to the others."""

import contextlib
import json
import socket

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serve.config import LiveConfig
from serve.keys import add_key, hash_of
from tests.gateways import WAIT_S, json_request, until

INFER = "/v2/models/whisper/infer"


@pytest.fixture
def shared(start, tmp_path):
    """A gateway with two keys; alice's has these limits of its own."""

    def shared(live=None, others=("bob",), limits=None, **server):
        path = tmp_path / "keys.toml"
        add_key(path, "alice", {"sha256": hash_of("secret-alice"), **(limits or {})})
        for name in others:
            add_key(path, name, {"sha256": hash_of(f"secret-{name}")})
        return start(live=live, keys_file=str(path), **server)

    return shared


def key_of(name):
    return {"Authorization": f"Bearer secret-{name}"}


def streams(running, name, most):
    """So many, or as many as there may be."""
    url = f"ws://{running.http}/v1/realtime"
    for _ in range(most):
        try:
            yield connect(url, additional_headers=key_of(name), open_timeout=WAIT_S)
        except InvalidStatus as refused:
            assert refused.response.status_code == 429
            assert b"the key alice has used up its live_streams" in refused.response.body
            return


@pytest.mark.parametrize(
    ("limits", "others", "has"),
    [(None, ("bob",), 2), ({"live_streams": 1}, ("bob",), 1), ({"live_streams": 3}, ("bob",), 3)],
)
def test_a_key_leaves_live_streams_to_others(shared, limits, others, has):
    running = shared(LiveConfig(max_streams=4), others, limits)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(one) for one in streams(running, "alice", 4)]
        assert len(opened) == has
        (others_one,) = streams(running, "bob", 1)
        with others_one:
            assert json.loads(others_one.recv(timeout=WAIT_S))["type"] == "session.created"
    until(lambda: not len(running.door.streams))
    (again,) = streams(running, "alice", 1)
    again.close()


def test_a_key_alone_may_have_all(shared):
    running = shared(LiveConfig(max_streams=4), others=())
    with contextlib.ExitStack() as stack:
        assert len([stack.enter_context(one) for one in streams(running, "alice", 4)]) == 4


@pytest.mark.parametrize(("limits", "has"), [(None, 2), ({"requests_at_once": 1}, 1)])
def test_a_key_leaves_requests_to_others(shared, limits, has):
    running = shared(limits=limits, max_inflight=4)
    body = json.dumps(json_request("wait")).encode()
    head = (
        f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret-alice\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    host, _, port = running.http.rpartition(":")
    with contextlib.ExitStack() as stack:
        for number in range(1, has + 1):
            client = stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            client.sendall(head + body)
            until(lambda number=number: running.door.admission.requests == number)
        status, headers, answer = running.ask("POST", INFER, body, key_of("alice"))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"the key alice has used up its requests_at_once" in answer
        others = json.dumps(json_request()).encode()
        assert running.ask("POST", INFER, others, key_of("bob"))[0] == 200


def test_a_key_leaves_bytes_to_others(shared):
    running = shared(max_inflight_mb=8, max_request_mb=8)
    host, _, port = running.http.rpartition(":")
    size = 3 * 2**20
    with contextlib.ExitStack() as stack:

        def begin(name):
            client = stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            client.sendall(
                f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
                f"Authorization: Bearer secret-{name}\r\n\r\n[".encode()
            )
            return client

        begin("alice")
        until(lambda: running.door.admission.bytes == size)
        answer = begin("alice").recv(10_000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert running.door.admission.bytes == size
        begin("bob")
        until(lambda: running.door.admission.bytes == 2 * size)
