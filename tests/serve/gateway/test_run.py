"""The gateway's process: it listens, drains, and its exit status says how that went."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
import tomli_w
from prometheus_client.parser import text_string_to_metric_families

from serve.gateway.engines import SERVICE
from serve.gateway.observe.pages import merge_pages
from serve.supervisor.supervisor import free_ports
from serve.wire.folder import USED, engine_links, is_held
from serve.wire.uploads import make_folder
from tests.gateways import WAIT_S, Running, message, refusal, refused, until

ROOT = Path(__file__).parents[3]


def test_draining_answers_what_was_accepted_and_refuses_the_rest(running):
    waiting = running.call().future(message("wait"))
    until(lambda: running.triton.requests)
    assert running.ask("GET", "/health")[1]["Connection"] is None
    draining = running.submit(running.gateway.drain())
    until(lambda: running.services.admission.draining)
    said = "OverloadedError: the server is stopping; try again later"
    assert refused(running, message()) == ("UNAVAILABLE", said)
    assert running.infer(b"{}")[0] == 503
    assert running.ask("GET", "/v2/health/ready")[0] == 503
    status, headers, _ = running.ask("GET", "/v2/health/live")
    # A client that tries again takes a new connection, which another server may get.
    assert (status, headers["Connection"]) == (200, "close")
    running.triton.release()
    assert draining.result(WAIT_S)
    assert waiting.result(WAIT_S)


def test_what_is_left_at_the_limit_is_ended_as_unavailable(start):
    running = start(drain_timeout_s=0.2)
    waiting = running.call().future(message("wait"))
    stream = running.channel.stream_stream(f"{SERVICE}ModelStreamInfer")
    ask = threading.Event()
    idle = stream(iter(lambda: ask.wait() and None, b""), timeout=WAIT_S)
    until(lambda: running.triton.requests and running.services.admission.requests == 2)
    assert not running.run(running.gateway.drain())
    status, text = refusal(waiting)
    assert (status, "drain_timeout_s" in text) == ("UNAVAILABLE", True)
    assert idle.code() == grpc.StatusCode.UNAVAILABLE
    until(lambda: running.triton.cancelled == list(running.triton.requests))
    ask.set()


def test_the_page_has_all_parts(running):
    assert "earshot_gateway_inflight_bytes 0.0" in running.page()
    (running.folder / "supervisor.prom").write_text("earshot_restarts 1", encoding="utf-8")
    running.call()(message())
    until(lambda: running.services.admission.requests == 0)
    page = running.page()
    assert "earshot_restarts 1\n" in page
    assert 'earshot_gateway_requests_total{key="",route="grpc",status="OK"} 1.0' in page
    assert re.search(r'earshot_gateway_request_seconds_count\{route="grpc"\} 1\.0', page)
    assert 'earshot_gateway_audio_seconds_total{key="",route="grpc"} 1.5' in page


def test_the_pages_of_several_engines_are_one_page():
    cpu = b'# HELP a of all\n# TYPE a counter\na 1\n# HELP b of b\n# TYPE b gauge\nb{x="1"} 2\n'
    gpu = b'# HELP b of b\n# TYPE b gauge\nb{x="1"} 3\nb{x="2"} 4\n'
    page = merge_pages({"cpu": cpu, "cuda:1": gpu}, "device").decode()
    families = {one.name: one.samples for one in text_string_to_metric_families(page)}
    assert [(one.labels, one.value) for one in families["b"]] == [
        ({"device": "cpu", "x": "1"}, 2),
        ({"device": "cuda:1", "x": "1"}, 3),
        ({"device": "cuda:1", "x": "2"}, 4),
    ]
    assert page.count("# HELP b of b\n") == page.count("# TYPE b gauge\n") == 1
    assert 'a{device="cpu"} 1\n' in page


class Process:
    """The gateway as the supervisor starts it."""

    def __init__(self, folder, **server):
        http, rpc, metrics = free_ports("127.0.0.1", 3)
        ports = {"http_port": http, "grpc_port": rpc, "metrics_port": metrics}
        self.http = ("127.0.0.1", http)
        config = tomli_w.dumps({"server": {**ports, **server}})
        (folder / "config.toml").write_text(config, encoding="utf-8")
        for link in engine_links(folder, 1):  # of a Triton that has not begun
            link.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve.gateway", "--folder", str(folder)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end(self):
        self.process.kill()
        if not self.process.stderr.closed:
            self.process.communicate(timeout=WAIT_S)


def test_a_file_of_a_gateway_that_was_killed_goes_with_the_next_one(tmp_path):
    left = make_folder(tmp_path) / "upload"
    left.write_bytes(b"RIFF")
    with contextlib.closing(Running(tmp_path, 600.0)):
        assert not left.exists()


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process(tmp_path, http_port=taken.getsockname()[1])
        try:
            _, said = process.process.communicate(timeout=WAIT_S)
        finally:
            process.end()
    assert process.process.returncode == 1
    assert "error: cannot listen on 127.0.0.1" in said
    assert "server.http_port" in said


@pytest.fixture
def front(start):
    return start(idle_unload_s=60.0)


@pytest.fixture
def other(front):
    """Another stand-in, which no link names yet."""
    triton = front.make_triton("other")
    yield triton
    triton.close()


def exchange(front, triton):
    new = front.folder / "new"
    new.symlink_to(triton.folder)
    new.replace(front.links[0])


def test_new_requests_go_to_the_new_one_and_the_old_one_ends_what_it_has(front, other):
    under_way, gone = (front.call().future(message("wait")) for _ in range(2))
    until(lambda: len(front.triton.requests) == 2)
    exchange(front, other)
    front.call()(message("hello"), timeout=WAIT_S)
    assert (len(front.triton.requests), len(other.requests)) == (2, 1)
    assert is_held(front.triton.folder), "it has something to answer"
    gone.cancel()
    until(lambda: front.triton.cancelled)
    assert not other.cancelled
    front.triton.release()
    assert under_way.result(WAIT_S)
    until(lambda: not is_held(front.triton.folder))
    assert is_held(other.folder)


def test_requests_wait_where_there_is_none_and_are_answered_by_the_next(front, other):
    front.links[0].unlink()
    calls = [front.call().future(message("hello")) for _ in range(3)]
    gone = front.call().future(message("hello"))
    until(lambda: front.services.admission.requests == 4)
    assert (front.folder / USED).is_file(), "the supervisor is told"
    assert front.ask("GET", "/health")[0] == 200
    gone.cancel()
    until(lambda: front.services.admission.requests == 3)
    assert not any(call.done() for call in calls) and not front.triton.requests
    exchange(front, other)
    assert all(call.result(WAIT_S) for call in calls)
    assert len(other.requests) == 3
    until(lambda: front.services.admission.requests == 0)
