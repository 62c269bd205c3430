"""The socket between the two models' processes, both ends in one process."""

import os
import queue
import socket
import threading
from multiprocessing.connection import Client

import pytest

from serve.errors import OverloadedError, UnavailableError
from serve.messages import Failed, Finished, RequestHandle, SegmentReady
from serve.triton.relay import RelayClient, RelayServer
from tests.serving import SEGMENT, TRANSCRIPT

WAIT_S = 10


class Engine:
    """Stands for the transcriber: keeps what is started, and who cancels."""

    def __init__(self):
        self.started = queue.Queue()
        self.cancelled = queue.Queue()
        self.refusal = None

    def start(self, inputs, on_event):
        if self.refusal is not None:
            raise self.refusal
        self.started.put((inputs, on_event))
        return RequestHandle(lambda: self.cancelled.put(inputs["NAME"]))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relay"


@pytest.fixture
def server(engine, path):
    server = RelayServer(path, engine.start)
    yield server
    server.close()


@pytest.fixture
def client(server, path):
    client = RelayClient(path, WAIT_S)
    yield client
    client.close()


def start(client, engine, name):
    """Start a request; returns its handle, what it hears, and how to speak for the engine."""
    events = queue.Queue()
    handle = client.start({"NAME": name}, events.put)
    inputs, on_event = engine.started.get(timeout=WAIT_S)
    assert inputs == {"NAME": name}
    return handle, events, on_event


def test_events_reach_the_request_that_they_belong_to(client, engine):
    _, first, say_first = start(client, engine, "first")
    _, second, say_second = start(client, engine, "second")
    say_second(Finished(TRANSCRIPT))
    say_first(SegmentReady(SEGMENT))
    say_first(Finished(TRANSCRIPT))
    assert second.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    assert first.get(timeout=WAIT_S) == SegmentReady(SEGMENT)
    assert first.get(timeout=WAIT_S) == Finished(TRANSCRIPT)


def test_a_refusal_is_the_only_event(client, engine):
    engine.refusal = OverloadedError("2 of 2")
    events = queue.Queue()
    client.start({"NAME": "refused"}, events.put)
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, Failed)
    assert type(event.error) is OverloadedError and str(event.error) == "2 of 2"


def test_a_cancel_reaches_its_request_alone_and_none_that_ended(client, engine):
    ended, events, say = start(client, engine, "ended")
    say(Finished(TRANSCRIPT))
    events.get(timeout=WAIT_S)
    start(client, engine, "runs on")
    handle, _, _ = start(client, engine, "cancelled")
    ended.cancel()
    handle.cancel()
    assert engine.cancelled.get(timeout=WAIT_S) == "cancelled"
    assert engine.cancelled.empty()


def test_a_client_that_is_gone_has_its_requests_cancelled(client, engine):
    for name in ("a", "b"):
        start(client, engine, name)
    client.close()
    assert {engine.cancelled.get(timeout=WAIT_S) for _ in range(2)} == {"a", "b"}


def test_an_engine_that_is_gone_fails_what_is_pending_and_what_comes(engine, path):
    """The other process dies: here its end of the connection is simply closed."""
    accepted = queue.Queue()

    class Dying(RelayServer):
        def _accept(self):
            accepted.put(self._listener.accept())

    server = Dying(path, engine.start)
    client = RelayClient(path, WAIT_S)
    connection = accepted.get(timeout=WAIT_S)
    events = queue.Queue()
    client.start({"NAME": "pending"}, events.put)
    connection.recv()
    connection.close()
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, Failed) and isinstance(event.error, UnavailableError)
    with pytest.raises(UnavailableError, match="is gone"):
        client.start({"NAME": "late"}, events.put)
    client.close()
    server.close()


def test_nothing_follows_the_last_event(client, engine):
    _, events, say = start(client, engine, "ended")
    say(Finished(TRANSCRIPT))
    say(Finished(TRANSCRIPT))
    _, others, say_other = start(client, engine, "other")
    say_other(Finished(TRANSCRIPT))
    assert others.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    assert events.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    assert events.empty()


def test_the_engine_hangs_up_on_a_client_that_is_gone(server, path):
    """Sockets that nobody closes would end what the process may have open."""
    with Client(str(path), "AF_UNIX") as connection:
        with socket.socket(fileno=os.dup(connection.fileno())) as other:
            other.shutdown(socket.SHUT_WR)
        assert connection.poll(WAIT_S)
        with pytest.raises(EOFError):
            connection.recv()


def test_closing_ends_threads_and_connections(engine, path):
    server = RelayServer(path, engine.start)
    client = RelayClient(path, WAIT_S)
    client.close()
    assert client._connection.closed and not client._thread.is_alive()
    server.close()
    assert not server._thread.is_alive() and not path.exists()


def test_a_slow_reader_does_not_hold_the_engine_up(server, engine, path):
    """Events for a client that reads nothing pile up beside the engine's thread, not on it."""
    reading = threading.Event()
    client = RelayClient(path, WAIT_S)
    client.start({"NAME": "slow"}, lambda event: reading.wait(WAIT_S))
    _, say = engine.started.get(timeout=WAIT_S)
    for _ in range(20_000):  # far more than a socket's buffer holds
        say(SegmentReady(SEGMENT))
    reading.set()
    client.close()


def test_waiting_for_an_engine_has_an_end(path):
    with pytest.raises(UnavailableError, match=r"did not start within 0\.2 s"):
        RelayClient(path, 0.2)


def test_a_client_may_come_before_the_engine(engine, path):
    found = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(RelayClient(path, WAIT_S)))
    thread.start()
    server = RelayServer(path, engine.start)
    client = found.get(timeout=WAIT_S)
    start(client, engine, "early")
    thread.join()
    client.close()
    server.close()
