"""A gateway of two processes: either is the server while the other stands still or dies."""

import contextlib
import dataclasses
import http.client
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from serve.contract.messages import Request, RequestFinished
from serve.contract.server_config import GatewayConfig
from serve.supervisor.supervisor import running_server
from serve.wire import uploads
from serve.wire.client import TritonClient
from tests.serving import CLIP, audio_file, metrics_page
from tests.waits import wait_until

pytestmark = [pytest.mark.server, pytest.mark.nightly]
HTTP, GRPC = "earshot_gateway_requests_total", 'route="grpc"'


@pytest.fixture(scope="module")
def server(nano_config):
    with running_server(
        dataclasses.replace(nano_config(), gateway=GatewayConfig(processes=2))
    ) as it:
        yield it


def processes(server):
    """Of the gateway, by their numbers."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = child.cmdline()
            if {"serve.gateway", str(server.folder)} <= set(line):
                found[line[line.index("--number") + 1]] = child.pid
    return found


def answered(server):
    """Requests over gRPC, by the process that took them."""
    pattern = rf'^{HTTP}{{process="(\d)",.*{GRPC}.*}} (\d+)'
    found = re.findall(pattern, metrics_page(server), re.MULTILINE)
    return {process: int(count) for process, count in found}


def is_live(server):
    """Whether a new connection gets an answer within a second."""
    connection = http.client.HTTPConnection(server.http, timeout=1.0)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == 200
    return False


def page_if_any(server):
    with contextlib.suppress(OSError):
        return metrics_page(server)
    return ""


def test_both_take_requests_and_one_page_counts_them(server):
    def ask():
        with TritonClient(server.grpc, timeout_s=120) as client:
            assert client.transcribe(CLIP).duration == 1.0

    asked = 0
    while len(answered(server)) < 2:
        assert asked < 64, "one of them takes them all"
        ask()
        asked += 1
    wait_until(lambda: sum(answered(server).values()) == asked, "some are not counted")
    page = metrics_page(server)
    assert page.count("# TYPE earshot_gateway_requests_total") == 1
    assert 'earshot_restarts_total{part="gateway"} 0' in page


def test_either_hands_large_files_over(server):
    file = ("a.wav", audio_file(60.0))  # more than is kept in memory
    for _ in range(8):  # connections
        with openai.OpenAI(
            base_url=f"http://{server.http}/v1", api_key="-", max_retries=0
        ) as client:
            answer = client.audio.transcriptions.create(
                model="nano", file=file, response_format="verbose_json"
            )
        assert float(answer.duration) == 60.0
    taken = [uploads.folder_of(server.folder, process) for process in (0, 1)]
    wait_until(lambda: not any(list(folder.iterdir()) for folder in taken), "files are left")


def test_a_cancel_by_one_leaves_the_others_requests(server):
    request = Request(audio=audio_file(119.0))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(TritonClient(server.grpc, timeout_s=120)) for _ in range(12)]
        streams = [client.stream(request) for client in clients]
        for stream in streams:
            stack.callback(stream.close)
        with ThreadPoolExecutor(len(streams)) as pool:
            list(pool.map(next, streams))  # they have begun, on either
            for stream in streams[::4]:
                stream.close()
            kept = [stream for i, stream in enumerate(streams) if i % 4]
            ends = list(pool.map(lambda stream: type(list(stream)[-1]), kept))
    assert set(ends) == {RequestFinished}


def test_one_that_stands_still_leaves_the_other(server):
    pid = processes(server)["1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_live(server), "the other does not answer")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: all(is_live(server) for _ in range(16)), "it does not go on")


def test_one_that_dies_is_started_again_and_the_other_answers_meanwhile(server):
    gone = processes(server)["0"]
    os.kill(gone, signal.SIGKILL)
    # Until its last thread has gone the system gives it connections, which are reset then.
    wait_until(lambda: all(is_live(server) for _ in range(16)), "the other does not answer")
    until = time.monotonic() + 120.0
    while 'earshot_restarts_total{part="gateway"} 1' not in page_if_any(server):
        with TritonClient(server.grpc, timeout_s=120) as client:
            assert client.transcribe(CLIP).duration == 1.0
        assert time.monotonic() < until
    wait_until(lambda: len(processes(server)) == 2, "it did not come back")
    assert server.restarts == 1
