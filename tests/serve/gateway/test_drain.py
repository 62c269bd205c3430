"""What comes while the gateway drains is answered, or refused with 503: no connection is cut."""

import contextlib
import http.client
import signal
import socket

import pytest

from tests.gateways import END, FILE, TRANSCRIPTIONS, WAIT_S, part, until
from tests.serve.gateway.test_run import Process

ASK = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def head(body):
    return (
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


def answer(connection):
    """Status and headers of the answer, and what comes behind it: nothing."""
    found = http.client.HTTPResponse(connection)
    found.begin()
    assert found.read()
    return found.status, found.headers


def refused(connection):
    """Whether a connection was refused with 503, and then closed in order."""
    status, headers = answer(connection)
    assert (status, headers["connection"]) == (503, "close")
    assert int(headers["retry-after"]) >= 1
    return connection.recv(1) == b""


@pytest.fixture
def connect():
    """Connect to an address, by "host:port" or as sockets have it."""
    with contextlib.ExitStack() as stack:

        def connect(address):
            if isinstance(address, str):
                host, _, port = address.rpartition(":")
                address = host, int(port)
            return stack.enter_context(socket.create_connection(address, WAIT_S))

        yield connect


def listens(address):
    try:
        socket.create_connection(address, WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def process(tmp_path):
    process = Process(tmp_path)
    until(lambda: listens(process.http))
    yield process
    process.end()


def test_the_process_refuses_who_uploads_or_has_just_come_until_they_know(process, connect):
    body = FILE + part("prompt", bytes(9 * 2**20)) + END
    held, upload = connect(process.http), connect(process.http)
    held.sendall(head(FILE + END) + FILE)  # its drain waits for this one
    idle = connect(process.http)
    idle.sendall(ASK)
    assert answer(idle)[0] == 200
    process.process.send_signal(signal.SIGTERM)

    def drains():
        with connect(process.http) as probe:
            probe.sendall(ASK)
            return answer(probe)[1]["connection"] == "close"

    until(drains)
    upload.sendall(head(body) + body[:1000])
    until(lambda: upload.recv(4096, socket.MSG_PEEK).endswith(b"}"))
    status, headers = answer(upload)
    assert (status, headers["connection"]) == (503, "close")
    fresh = connect(process.http)
    held.sendall(END)
    assert answer(held)[0] == 503  # there is no engine
    until(lambda: not listens(process.http))
    fresh.sendall(head(FILE + END) + FILE + END)
    assert refused(fresh)
    for begin in range(1000, len(body), 2**16):  # it does not look whether there is an answer
        upload.sendall(body[begin : begin + 2**16])
    assert upload.recv(1) == b""
    assert process.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("used", [False, True], ids=["connects", "asks again"])
def test_what_has_come_as_the_server_closes_is_answered(running, connect, used):
    before = connect(running.http)
    before.sendall(ASK)
    assert answer(before)[0] == 200
    running.services.admission.draining = True

    async def close():
        """In the loop, which has not seen these yet."""
        asks = before if used else connect(running.http)
        asks.sendall(head(FILE + END) + FILE + END)
        await running.gateway.http[0].close(WAIT_S)
        return asks

    assert refused(running.run(close()))


def test_who_is_idle_is_not_waited_for(running, connect):
    idle = connect(running.http)
    idle.sendall(ASK)
    assert answer(idle)[0] == 200
    running.run(running.gateway.http[0].close(100 * WAIT_S))
    assert idle.recv(1) == b""


def test_an_upload_that_is_not_whole_at_the_limit_is_refused(start, connect):
    running = start(drain_timeout_s=0.2)
    upload = connect(running.http)
    upload.sendall(head(FILE + END) + FILE)
    until(lambda: running.services.admission.requests)
    assert not running.run(running.gateway.drain())
    assert refused(upload)
