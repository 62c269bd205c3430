"""Uploads and floods, against servers that answer early, hang up, or say nothing."""

import contextlib
import itertools
import socket
import threading

import pytest

from eval.processes import ChildProcess
from eval.soak.attacks import FLOODS, chunked, head, upload
from eval.soak.scenarios import flood_nicely
from tests.waits import wait_until

MB = 2**20
REFUSED = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!"
BAD = b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad"


@contextlib.contextmanager
def listening(reply, reads_on, connections=1):
    """A server that replies so to the first bytes of a connection; its address, and the bytes."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for _ in range(connections):
                connection, _ = server.accept()
                with connection:
                    heard.append(connection.recv(65536))
                    connection.sendall(reply)
                    while reads_on and connection.recv(65536):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
        thread.join()


@pytest.mark.parametrize(
    ("reply", "reads_on", "kind", "timeout_s"),
    [
        (REFUSED, True, "refused", 20.0),
        (BAD, True, "failed", 20.0),
        (b"", False, "lost", 20.0),
        (b"", True, "lost", 1.0),
    ],
)
def test_an_upload_ends_as_the_server_ends_it(reply, reads_on, kind, timeout_s):
    with listening(reply, reads_on) as (address, _):
        top = head(address, Transfer_Encoding="chunked")
        pieces = chunked(itertools.repeat(bytes(MB)))
        answer, sent_bytes = upload(address, top, pieces, timeout_s)
    assert (answer.kind, answer.waited_in_vain) == (kind, timeout_s == 1.0), answer
    if reply:
        assert answer.text == {REFUSED: "413 no!", BAD: "400 bad"}[reply]
        assert sent_bytes < 100 * MB, "it went on although it had been refused"


def test_a_body_without_a_length_goes_in_chunks():
    assert b"".join(chunked([b"a" * 11, b"b"])) == b"b\r\naaaaaaaaaaa\r\n1\r\nb\r\n0\r\n\r\n"


def test_a_flood_goes_on_and_connects_again_after_a_refusal():
    again = FLOODS["refusals"][1] + 1  # one more than it makes at first
    with (
        listening(b"", False, connections=again) as (address, heard),
        ChildProcess("the flood", flood_nicely, ("refusals", address), None),
    ):
        wait_until(lambda: len(heard) == again, "it did not connect again")
    assert all(heard)
