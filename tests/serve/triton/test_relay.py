"""The socket between the two models' processes, both ends in one process."""

import errno
import queue
import socket
import stat
import threading

import numpy as np
import pytest

from serve.errors import CancelledError, OverloadedError, RequestError, UnavailableError
from serve.messages import Failed, Finished, RequestHandle, SegmentReady
from serve.triton import channel, frames, relay
from serve.triton.cancels import CancelClient
from serve.triton.frames import CancelKey, Hello, Start
from serve.triton.keys import Keys
from serve.triton.relay import RelayClient, RelayServer
from tests.serving import SEGMENT, TRANSCRIPT, wait_until

WAIT_S = 10


class Engine:
    """Stands for the transcriber: keeps what is started, and who cancels."""

    def __init__(self):
        self.started = queue.Queue()
        self.cancelled = queue.Queue()
        self.refusal = None
        self.keys = Keys()

    def start(self, inputs, on_event, key):
        if key is None:
            return self._submit(inputs, on_event)
        return self.keys.submit(key, on_event, lambda on_event: self._submit(inputs, on_event))

    def _submit(self, inputs, on_event):
        if self.refusal is not None:
            raise self.refusal
        self.started.put((inputs, on_event))
        return RequestHandle(lambda: self.cancelled.put(name_of(inputs)))

    def serve(self, path):
        return RelayServer(path, self.start, self.keys.cancel, self.keys.cancel_owner)


def named(name):
    """Inputs by which a test tells its requests apart."""
    return {"PROMPT": np.array([name.encode()], np.object_)}


def name_of(inputs):
    return inputs["PROMPT"][0].decode()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relay"


@pytest.fixture
def server(engine, path):
    server = engine.serve(path)
    yield server
    server.close()


@pytest.fixture
def client(server, path):
    client = RelayClient(path, WAIT_S)
    yield client
    client.close()


@pytest.fixture
def raw(server, path):
    """Connections that say what a test wants."""
    connections = []

    def raw(*messages):
        connection = channel.connect(path, WAIT_S)
        connection.settimeout(WAIT_S)
        connections.append(connection)
        for message in messages:
            connection.sendall(b"".join(frames.encode(message)))
        return connection

    yield raw
    for connection in connections:
        connection.close()


def start(client, engine, name, key=None):
    """Start a request; returns its handle, what it hears, and how to speak for the engine."""
    events = queue.Queue()
    handle = client.start(named(name), events.put, key)
    inputs, on_event = engine.started.get(timeout=WAIT_S)
    assert name_of(inputs) == name
    return handle, events, on_event


def hung_up(connection):
    """Whether the other side has closed; waits for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


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
    client.start(named("refused"), events.put)
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
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        client = RelayClient(path, WAIT_S)
        connection, _ = listener.accept()
    events = queue.Queue()
    client.start(named("pending"), events.put)
    connection.recv(1)
    connection.close()
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, Failed) and isinstance(event.error, UnavailableError)
    with pytest.raises(UnavailableError, match="is gone"):
        client.start(named("late"), events.put)
    client.close()


def test_nothing_follows_the_last_event(client, engine):
    _, events, say = start(client, engine, "ended")
    say(Finished(TRANSCRIPT))
    say(Finished(TRANSCRIPT))
    _, others, say_other = start(client, engine, "other")
    say_other(Finished(TRANSCRIPT))
    assert others.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    assert events.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    assert events.empty()


def test_the_engine_hangs_up_on_a_client_that_is_gone(raw):
    """Sockets that nobody closes would end what the process may have open."""
    connection = raw(Hello("gone"))
    connection.shutdown(socket.SHUT_WR)
    assert hung_up(connection)


def test_closing_ends_threads_and_connections(engine, path):
    server = engine.serve(path)
    client = RelayClient(path, WAIT_S)
    client.close()
    assert client._channel._socket.fileno() == -1 and not client._channel._writer.is_alive()
    server.close()
    assert not server._thread.is_alive() and not path.exists()


def test_a_slow_reader_does_not_hold_the_engine_up(server, engine, path):
    """Events for a client that reads nothing pile up beside the engine's thread, not on it."""
    reading = threading.Event()
    client = RelayClient(path, WAIT_S)
    client.start(named("slow"), lambda event: reading.wait(WAIT_S))
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
    server = engine.serve(path)
    client = found.get(timeout=WAIT_S)
    start(client, engine, "early")
    thread.join()
    client.close()
    server.close()


# ---------------------------------------------------------------- what should not arrive


def test_only_the_servers_user_may_connect(server, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


HELLO = b"".join(frames.encode(Hello("someone")))
LENGTHS = frames.LENGTHS
MALFORMED = {
    "no JSON": LENGTHS.pack(4, 0) + b"\x80\x04K\x01",
    "no known message": LENGTHS.pack(28, 0) + b'{"message":{"kind":"eval" }}',
    "endless JSON": LENGTHS.pack(2**32 - 1, 0),
    "endless tensors": LENGTHS.pack(2, 2**32 - 1),
    "nested JSON": LENGTHS.pack(200_000, 0) + b"[" * 200_000,
    "a second hello": HELLO,
    "what only the engine says": b"".join(frames.encode(frames.Event(1, SegmentReady(SEGMENT)))),
    "an id twice": b"".join(frames.encode(Start(1, named("twin")))),
    "half a frame": LENGTHS.pack(100, 0) + b"{",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_ends_its_connection_alone(engine, client, raw, data, caplog):
    _, events, say = start(client, engine, "neighbour")
    connection = raw(Hello("fool"), Start(1, named("its own"), None))
    assert name_of(engine.started.get(timeout=WAIT_S)[0]) == "its own"
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    assert hung_up(connection)
    assert engine.cancelled.get(timeout=WAIT_S) == "its own" and engine.cancelled.empty()
    assert "a connection of the relay ends" in caplog.text
    say(Finished(TRANSCRIPT))
    assert events.get(timeout=WAIT_S) == Finished(TRANSCRIPT)
    start(client, engine, "and it goes on")


@pytest.mark.parametrize("first", [CancelKey("a-1"), Start(1, named("early"), None)])
def test_who_does_not_say_hello_first_is_hung_up_on(raw, first):
    assert hung_up(raw(first))


@pytest.mark.parametrize("said", [b"", LENGTHS.pack(100, 0)])
def test_who_says_nothing_or_half_a_word_is_hung_up_on(raw, monkeypatch, said):
    monkeypatch.setattr(channel, "FIRST_S", 0.01)
    monkeypatch.setattr(channel, "_FRAME_S", 0.01)
    connection = raw()
    connection.sendall(said)
    assert hung_up(connection)


def test_who_has_said_hello_may_be_silent(engine, client, monkeypatch):
    monkeypatch.setattr(channel, "FIRST_S", 0.0)
    monkeypatch.setattr(channel, "_FRAME_S", 0.0)
    threading.Event().wait(0.05)
    assert client._channel._reader.is_alive()


def test_connections_are_bounded_and_make_room_when_they_end(engine, server, raw, monkeypatch):
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 2)
    first, _ = raw(Hello("a")), raw(Hello("b"))
    assert hung_up(raw())
    first.close()
    wait_until(lambda: len(server._sessions) == 1, "it still counts")
    raw(Hello("c"), Start(1, named("welcome"), None))
    assert name_of(engine.started.get(timeout=WAIT_S)[0]) == "welcome"


def test_without_a_free_descriptor_the_relay_goes_on(engine, server, path, monkeypatch, caplog):
    listener, failed = server._listener, threading.Event()

    class Exhausted:
        def accept(self):
            server._listener = listener
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")

    server._listener = Exhausted()
    RelayClient(path, WAIT_S).close()  # wakes the thread, which then asks the other
    client = RelayClient(path, WAIT_S)
    start(client, engine, "after")
    assert failed.is_set() and "Too many open files" in caplog.text
    client.close()


def test_inputs_that_the_other_side_would_not_take_are_refused_here(client, engine, monkeypatch):
    monkeypatch.setattr(relay, "MAX_BYTES", 10)
    for inputs, message in (
        ({"VOLUME": np.zeros(1, np.float32)}, "VOLUME"),
        ({"TEMPERATURE": np.zeros((1, 1), np.float32)}, "TEMPERATURE"),
        (named("x" * 11), "at most 10"),
    ):
        with pytest.raises(RequestError, match=message):
            client.start(inputs, print)
    start(client, engine, "others")


def test_a_channel_may_be_closed_before_it_is_started():
    """As when a connection ends while its session is made."""
    ended = threading.Event()
    ours, theirs = socket.socketpair()
    made = channel.Channel(ours, print, ended.set, 10)
    made.close()
    made.start()
    assert ended.wait(WAIT_S)
    theirs.close()


# ---------------------------------------------------------------- cancels by key


@pytest.fixture
def cancels(server, path):
    client = CancelClient(path)
    wait_until(lambda: client.connected, "it does not connect")
    yield client
    client.close()


def test_a_key_cancels_its_request_alone(client, engine, cancels):
    first, second = cancels.new_key(), cancels.new_key()
    start(client, engine, "stays", first)
    start(client, engine, "goes", second)
    cancels.cancel(second)
    assert engine.cancelled.get(timeout=WAIT_S) == "goes"
    assert engine.cancelled.empty()


def test_a_cancel_that_comes_before_its_request_refuses_it(client, engine, cancels):
    key = cancels.new_key()
    cancels.cancel(key)
    wait_until(lambda: key in engine.keys._cancelled, "it never arrived")
    events = queue.Queue()
    client.start(named("late"), events.put, key)
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, Failed) and isinstance(event.error, CancelledError)
    assert engine.started.empty()


def test_a_gateway_that_is_gone_has_all_its_requests_cancelled(client, engine, cancels):
    """Those in the model, those on their way, and no others."""
    key, unsent = cancels.new_key(), cancels.new_key()
    start(client, engine, "its own", key)
    start(client, engine, "another's", "someone-1")
    start(client, engine, "nobody's")
    cancels.close()
    assert engine.cancelled.get(timeout=WAIT_S) == "its own"
    events = queue.Queue()
    client.start(named("on its way"), events.put, unsent)
    assert isinstance(events.get(timeout=WAIT_S).error, CancelledError)
    assert engine.cancelled.empty() and engine.started.empty()


def test_a_gateway_connects_again_under_another_name(engine, path):
    client = CancelClient(path)
    with pytest.raises(UnavailableError, match="is gone"):
        client.new_key()
    names = set()
    for _ in range(2):
        server = engine.serve(path)
        wait_until(lambda: client.connected, "it does not connect")
        names.add(client.new_key())
        server.close()  # first: then there are no more sessions than those
        for session in list(server._sessions):
            session._channel.close()
        wait_until(lambda: not client.connected, "it does not notice")
    assert len(names) == 2
    client.cancel(names.pop())  # nobody is there to hear it
    client.close()
    assert not client._thread.is_alive()
