"""gRPC messages on their way in: slow ones, and more than there is room for."""

import asyncio
import os
import socket
import time

import grpc
import pytest

from serve.contract.server_config import ServerConfig
from serve.gateway import errors, limits
from serve.gateway.edge import uploads
from serve.gateway.errors import ApiError
from serve.gateway.limits import Admission
from tests.gateways import WAIT_S, message, until
from tests.serve.gateway.http2 import PREFACE, frame, head


class SlowUpload:
    """A gRPC call that stops after a message's first bytes; HTTP/2 by hand."""

    def __init__(self, running, length=10**6):
        host, _, port = running.grpc.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(
            PREFACE
            + frame(1, 4, 1, head("ModelInfer"))
            + frame(0, 0, 1, b"\0" + length.to_bytes(4, "big"))
        )

    def send(self, size):
        self.socket.sendall(frame(0, 0, 1, bytes(size)))

    def read_until(self, text):
        self.socket.settimeout(WAIT_S)
        received = b""
        while text not in received:
            more = self.socket.recv(65536)
            assert more, received
            received += more


def test_a_slow_upload_ends_in_time_and_others_are_answered_meanwhile(start):
    running = start(upload_timeout_s=2.0)
    slow = SlowUpload(running)
    until(lambda: running.services.admission.requests == 1)
    assert running.call()(message())
    slow.read_until(b"server.upload_timeout_s")
    until(lambda: running.services.admission.requests == 0)
    slow.socket.close()


def test_slow_uploads_lose_their_places_to_those_that_wait(start, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE_S", 0.0)
    running = start(max_inflight=2)
    slow = []
    for count in (1, 2):
        slow.append(SlowUpload(running))
        until(lambda count=count: running.services.admission.requests == count)
    assert running.call()(message())
    slow[0].read_until(b"other requests were waiting")  # the oldest of them
    for one in slow:
        one.socket.close()


def test_an_upload_has_some_time_before_it_loses_its_place(start):
    running = start(max_inflight=1)
    slow = SlowUpload(running)
    until(lambda: running.services.admission.requests == 1)
    with pytest.raises(grpc.RpcError, match="max_inflight"):
        running.call()(message())
    slow.socket.close()


def test_uploads_take_no_more_memory_than_there_is_room_for(start, monkeypatch):
    """Each is within bounds, all together are not, and none is ever whole."""
    monkeypatch.setattr(uploads, "LARGE_BYTES", 2**10)
    running = start()
    running.services.admission.max_bytes = 50_000
    slow = [SlowUpload(running) for _ in range(4)]
    until(lambda: len(running.services.uploads.connections) == 4)
    for one in slow:
        one.send(15_000)
    until(lambda: running.services.admission.requests == 3)  # three fit
    assert 'earshot_gateway_refused_total{reason="bytes"} 1.0' in running.page()
    with pytest.raises(grpc.RpcError, match="max_inflight_mb"):
        running.call()(message(samples=5_000))
    for one in slow:
        one.socket.close()
    until(lambda: running.services.admission.uploading_bytes == 0)
    assert running.call()(message(samples=5_000))


def test_draining_gives_up_what_is_not_whole(start):
    running = start()
    slow = SlowUpload(running)
    until(lambda: running.services.admission.requests == 1)
    assert running.run(running.gateway.drain())
    slow.read_until(b"is stopping")
    slow.socket.close()


def test_what_is_given_up_may_have_run_out_of_time_in_that_moment():
    class Silent:
        def peer(self):
            return ""

        async def read(self):
            await asyncio.sleep(WAIT_S)

    async def receive():
        loop = asyncio.get_running_loop()
        admission = Admission(ServerConfig())
        found = uploads.Uploads(admission)
        upload = asyncio.create_task(found.receive(Silent(), 0.01))
        await asyncio.sleep(0)
        ended = loop.create_future()
        loop.call_later(0.02, lambda: ended.set_result(admission.end_uploads(errors.failed())))
        time.sleep(0.05)  # the loop stands still, and both happen in its next turn
        with pytest.raises(ApiError, match="upload_timeout_s"):
            await upload
        await ended

    asyncio.run(receive())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_how_much_came_in_over_a_connection(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as there,
    ):
        here, _ = listener.accept()
        there.sendall(bytes(12345))
        port = there.getsockname()[1]
        peer = f"ipv6:%5B::1%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        sockets = uploads.TcpPeers()
        until(lambda: sockets.received([peer, "ipv4:1.2.3.4:5"]) == {peer: 12345})
        os.fstat(here.fileno())  # still open
        here.close()
        assert sockets.received([peer]) == {}


def test_memory_is_given_back_after_large_requests_alone(running, monkeypatch):
    given = []
    monkeypatch.setattr(
        uploads, "trim_memory", lambda: given.append(running.services.admission.bytes)
    )
    running.call()(message(samples=2**18))
    until(lambda: given)
    until(lambda: not running.services.admission.trim_due)
    assert given[-1] == 0
    given.clear()
    assert running.infer("[" * 2**21)[0] == 400
    until(lambda: given)
    until(lambda: not running.services.admission.trim_due)
    given.clear()
    running.call()(message())
    assert not running.services.admission.trim_due
