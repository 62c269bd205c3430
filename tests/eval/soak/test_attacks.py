"""Uploads by hand, against servers that answer early, hang up, or say nothing."""

import contextlib
import itertools
import socket
import threading

import pytest

from eval.soak.attacks import chunked, flood, head, upload

MB = 2**20
REFUSAL = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!"


@contextlib.contextmanager
def listening(behave):
    """A server that treats one connection so; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def refuse(connection):
    connection.recv(65536)
    connection.sendall(REFUSAL)
    while connection.recv(65536):
        pass


def hang_up(connection):
    connection.recv(65536)


def take_all(connection):
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad\r\nContent-Length: 4\r\n\r\n" + data[-9:-5])


def stay_mute(connection):
    connection.recv(65536)
    while connection.recv(65536):
        pass


@pytest.mark.parametrize(
    ("behave", "kind", "timeout_s"),
    [
        (refuse, "refused", 20.0),
        (hang_up, "lost", 20.0),
        (take_all, "failed", 20.0),
        (stay_mute, "lost", 1.0),
    ],
)
def test_an_upload_ends_as_the_server_ends_it(behave, kind, timeout_s):
    pieces = [b"x"] * 3 if behave in (take_all, stay_mute) else itertools.repeat(bytes(MB))
    with listening(behave) as address:
        top = head(address, Transfer_Encoding="chunked")
        answer, sent_bytes = upload(address, top, chunked(pieces), timeout_s)
    assert (answer.kind, answer.waited_in_vain) == (kind, behave is stay_mute), answer
    if behave is refuse:
        assert answer.text == "413 no!"
        assert sent_bytes < 100 * MB, "it went on although it had been refused"


def test_a_flood_goes_on_and_connects_again_after_a_refusal():
    heard, done = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while not done.is_set():
                connection, _ = server.accept()
                with connection:
                    heard.append(len(connection.recv(65536)))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        flood("refusals", address, seconds=0.5, connections=1)
        done.set()
        socket.create_connection(server.getsockname()).close()  # so that it looks again
        thread.join()
    assert len(heard) >= 2 and heard[0] > 0
