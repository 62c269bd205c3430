"""What floods HTTP and WebSockets, by hand: each connection costs no more than its share."""

import contextlib
import http.client
import json
import socket

import pytest
from websockets.frames import Frame, Opcode

from serve.gateway.edge.connection import MAX_CONTROLS, MAX_FRAGMENTS
from tests.gateways import INFER, all_from, json_request, post, until
from tests.serve.gateway.live.sessions import session

CHUNKED = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def connections(running):
    return [one for server in running.gateway.http for one in server.server_state.connections]


def test_answers_do_not_wait_for_the_head_to_be_acknowledged(running):
    with running.connected(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        (one,) = connections(running)
        accepted = one.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ---------------------------------------------------------------- bodies that were refused


@pytest.mark.parametrize("more", [b"", b"1\r\nx\r\n" * 100_000, b"100000\r\n" + bytes(2**20)])
def test_a_refusal_before_its_body_is_the_last_of_its_connection(shared, more):
    with shared.connected(CHUNKED + b"1\r\nx\r\n") as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(more)
        received = all_from(connection)
    assert received.startswith(b"HTTP/1.1 404 ")
    assert b"connection: close" in received.lower()
    assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("more", [b"", b"1\r\nx\r\n"], ids=["is silent", "sends on"])
def test_who_stays_after_such_a_refusal_is_hung_up_on(shared, more, monkeypatch):
    for name in ("budget", "connection"):
        monkeypatch.setattr(f"serve.gateway.edge.{name}.LINGER_S", 0.3)
    with shared.connected(CHUNKED + b"1\r\nx\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 404"

        def is_hung_up_on():
            connection.sendall(more)
            return not connections(shared)

        with contextlib.suppress(ConnectionError):
            until(is_hung_up_on)


def test_a_refusal_of_a_whole_request_leaves_the_connection(shared):
    whole = CHUNKED + b"1\r\nx\r\n0\r\n\r\n"  # at once
    with shared.connected() as connection:
        for _ in range(2):
            connection.sendall(whole)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.headers["connection"]) == (404, None)
            answer.read()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000,
        b"GET /" + b"x" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        CHUNKED.replace(b"nothing", INFER[1:].encode()) + b"1\r\n{\r\n0\r\nX: " + b"x" * 200_000,
        CHUNKED.replace(b"nothing", INFER[1:].encode()) + b"1;" + b"x" * 200_000,
        b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["header", "address", "headers", "trailer", "chunk's extension", "two lengths"],
)
def test_heads_without_end_and_two_lengths_end_the_connection(shared, said):
    with shared.connected() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(said)
        received = all_from(connection)
    assert received.startswith(b"HTTP/1.1 4") or not received
    assert shared.ask("GET", "/v2/health/live")[0] == 200


def test_trailers_are_no_headers(shared):
    body = json.dumps(json_request()).encode()
    said = (
        f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"{len(body):x}\r\n"
    ).encode()
    with shared.connected(said + body + b"\r\n0\r\nContent-Encoding: gzip\r\n\r\n") as one:
        assert one.recv(12) == b"HTTP/1.1 200"


def test_an_upgrade_to_what_is_not_spoken_here_is_an_answer_and_the_end(shared):
    said = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    with shared.connected(said + b"\r\n") as connection:
        received = all_from(connection)
    assert received.startswith(b"HTTP/1.1 200 ") and b"connection: close" in received.lower()


def test_requests_one_behind_the_other_are_ended_with_their_client(running):
    body = json.dumps(json_request("wait")).encode()
    with running.connected(post(body) * 2):
        until(lambda: running.triton.requests)
    (key,) = running.triton.requests
    until(lambda: running.triton.cancelled == [key])


def test_who_takes_no_answers_is_hung_up_on_and_that_is_no_error(running, monkeypatch, caplog):
    monkeypatch.setattr("serve.gateway.edge.connection.SEND_S", 0.3)
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    with running.connected() as connection:
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            connection.sendall(asked)
        until(lambda: not connections(running))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# ---------------------------------------------------------------- crowds


def test_who_says_nothing_makes_room_for_who_does(start):
    running = start(max_inflight=1)
    most = running.gateway.http[0].limits.max_connections
    with contextlib.ExitStack() as others:
        for _ in range(most + 20):
            others.enter_context(running.connected())
        assert running.ask("GET", "/v2/health/live")[0] == 200
        until(lambda: len(connections(running)) <= most)


# ---------------------------------------------------------------- WebSockets


def frame(opcode, data, fin=True):
    """A client's frame."""
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.mark.parametrize(
    "said",
    [
        frame(Opcode.TEXT, b"{", fin=False)
        + frame(Opcode.CONT, b"  ", fin=False) * (MAX_FRAGMENTS + 1),
        frame(Opcode.TEXT, bytes(2**23))[: 3 * 2**20],
        frame(Opcode.PING, b"x") * (20 * MAX_CONTROLS),
    ],
    ids=["a message in a flood of frames", "a message that is never whole", "a flood of pings"],
)
def test_what_takes_too_much_room_or_time_ends_its_session(start, said):
    running = start(max_request_mb=2, max_inflight_mb=2)
    with session(running) as client:
        with contextlib.suppress(ConnectionError):
            client.socket.socket.sendall(said)
        assert client.end() == 1008
    until(lambda: running.services.admission.bytes == 0)
