"""Attacks on a gateway that runs: each takes little memory and time, and hurts no other client."""

import contextlib
import json
import re
import threading
from pathlib import Path

import grpc
import pytest

from serve.contract.keys import expire_key
from serve.contract.messages import Request
from serve.gateway import limits
from serve.gateway.errors import ApiError
from serve.wire.client import TritonClient
from tests.gateways import WAIT_S, until
from tests.jobs import ALICE, keys_of
from tests.serve.gateway.http2 import PREFACE, frame, head
from tests.serve.gateway.live.sessions import session


def resident_mb():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.fixture
def keys_file(tmp_path):
    return keys_of(tmp_path, alice={"audio_s_per_day": 1.0})


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v2/models/whisper/infer HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["without body", "with body"],
)
def test_pipelines_that_are_never_empty_take_little_memory(running, request_):
    """uvicorn would read 16 KiB of requests more after each answer."""
    sent, answers, flood = [0] * 4, [0] * 4, request_ * 1000
    before_mb = resident_mb()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.connected()) for _ in range(4)]
        for client in clients:
            client.setblocking(False)

        def go_on():
            for number, client in enumerate(clients):
                with contextlib.suppress(BlockingIOError):
                    sent[number] += client.send(flood[sent[number] % len(flood) :])
                with contextlib.suppress(BlockingIOError):
                    answers[number] += client.recv(2**16).count(b"HTTP/1.1 ")
            return min(answers) >= 40

        until(go_on)
        assert resident_mb() - before_mb < 40


def test_a_pipeline_is_answered_in_order(running):
    asked = b"".join(
        b"GET /v1/models/%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in range(300)
    )
    with running.connected() as client:
        client.sendall(asked + b"GET / HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
        answers = b"".join(iter(lambda: client.recv(2**16), b""))
    told = [int(number) for number in re.findall(rb"model[^\"]*?\b(\d+)\b", answers)]
    assert answers.count(b"HTTP/1.1 ") == 301
    assert told == sorted(told) and set(told) == set(range(300))


# ---------------------------------------------------------------- HTTP/2


PING = frame(6, 0, 0, b"finished")
PONG = frame(6, 1, 0, b"finished")


@pytest.mark.nightly
def test_a_flood_of_calls_cancels_no_other_clients_call(running):
    """gRPC ends calls at random once more than 1,000 wait for the event loop."""
    asked = head("ServerReady")
    calls = b"".join(
        frame(1, 4, stream, asked) + frame(0, 1, stream, bytes(5)) for stream in range(1, 2400, 2)
    )
    free, busy = threading.Event(), threading.Event()

    async def stand_still():
        busy.set()
        free.wait(WAIT_S)

    with contextlib.ExitStack() as stack:
        stack.callback(free.set)
        ready = running.call("ServerReady")
        ready(b"")  # the honest client is connected
        running.submit(stand_still())
        assert busy.wait(WAIT_S)
        for _ in range(6):
            client = stack.enter_context(running.connected(address=running.grpc))
            client.sendall(PREFACE + calls + PING)
            received = b""
            while PONG not in received:  # all before it has been read
                received += client.recv(2**16)
        honest = [ready.future(b"", timeout=WAIT_S) for _ in range(10)]
        with pytest.raises(grpc.FutureTimeoutError):
            honest[-1].result(0.2)
        free.set()
        assert [call.exception(WAIT_S) for call in honest] == [None] * 10


# ---------------------------------------------------------------- keys and streams


def usage_s(running):
    _, _, body = running.ask("GET", "/v1/usage", headers=ALICE)
    return sum(row["audio_seconds"] for row in json.loads(body)["data"])


@pytest.fixture
def stream_of(client_of):
    return lambda running, prompt: client_of(running, "secret-a").audio.transcriptions.create(
        file=("a.wav", b"RIFF"), model="demo", stream=True, prompt=prompt
    )


def test_a_stream_that_its_client_leaves_counts_what_was_sent(start, keys_file, stream_of):
    running = start(keys_file=keys_file)
    with contextlib.closing(stream_of(running, "wait for it")) as stream:
        assert next(iter(stream)).delta == "wait"
    until(lambda: usage_s(running) == 1.0)  # of the segment, not the whole
    assert running.ask("POST", "/v1/audio/transcriptions", "", ALICE)[0] == 429


def test_so_does_a_stream_over_grpc(start, keys_file):
    running = start(keys_file=keys_file)
    with TritonClient(running.grpc, key="secret-a") as client:
        stream = client.stream(Request(b"RIFF", prompt="wait for it"))
        next(stream)
        stream.close()
    until(lambda: usage_s(running) == 1.0)


def test_a_stream_whose_key_is_removed_goes_on_to_its_end(start, keys_file, stream_of):
    running = start(keys_file=keys_file)
    with contextlib.closing(stream_of(running, "wait for it")) as stream:
        events = iter(stream)
        next(events)
        Path(keys_file).write_text("")
        assert running.ask("GET", "/v1/models", headers=ALICE)[0] == 401
        running.triton.release()
        assert [event.type for event in events][-1] == "transcript.text.done"


def test_a_grpc_stream_whose_key_expires_answers_what_it_took_and_nothing_more(start, keys_file):
    running = start(keys_file=keys_file)
    calls, answers = [], []
    with TritonClient(running.grpc, key="secret-a") as client:
        calls.append(client.start(Request(b"RIFF", prompt="wait")))
        until(lambda: running.triton.waiting)
        expire_key(Path(keys_file), "alice", "2020-01-01")
        with pytest.raises(Exception, match="expired"):
            client.transcribe(b"RIFF")
        running.triton.release()
        answers.append(calls[0].result())
    assert answers[0].text == "wait"


# ---------------------------------------------------------------- live sessions


def test_a_storm_of_updates_does_not_hold_up_others(running):
    """The largest take milliseconds; what would take more is refused before it is read."""
    largest = ["x" * 90] * 1000
    with session(running, max_size=2**24) as client:
        before_mb = resident_mb()
        for _ in range(30):
            client.set(transcription={"phrases": largest})
            client.until("session.updated")
            assert running.ask("GET", "/health")[0] == 200
        assert resident_mb() - before_mb < 40
        for many in ({"phrases": ["x"] * 15_000}, {f"phrase{i}": 0 for i in range(4000)}):
            client.set(transcription=many)
            error = client.until("error")["error"]
            assert "expected at most 10000: send" in error["message"]


@pytest.mark.parametrize(
    ("element", "most"), [(b",", limits.MAX_NUMBERS), (b"[", limits.MAX_MARKS)]
)
def test_json_has_as_many_elements_as_allowed_and_no_more(element, most):
    limits.check_json(element * most, "the request")
    with pytest.raises(ApiError, match=f"; expected at most {limits.MAX_NUMBERS} and"):
        limits.check_json(element * (most + 1), "the request")
