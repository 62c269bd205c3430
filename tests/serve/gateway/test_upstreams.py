"""A gateway before others, each of which is before a stand-in for Triton."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading

import grpc
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2

from serve.contract.config import Config
from serve.contract.errors import ConfigError, UnavailableError
from serve.contract.keys import ENVIRONMENT, hash_of
from serve.contract.server_config import UpstreamConfig
from serve.gateway.door import Door
from serve.gateway.refusals import Refusal
from serve.gateway.upstream.calls import SERVICE, Call, Channel
from serve.gateway.upstream.own import OwnEngine
from tests.fake_upstream import inputs_of
from tests.gateways import FORM, TRANSCRIPTIONS, WAIT_S, form, inputs, json_request, message, until


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr("serve.gateway.upstream.remote.INTERVAL_S", 0.02)


@pytest.fixture
def before(start):
    """Start a gateway without a Triton before others, and wait until it takes their requests."""

    def before(*others, models=("demo",), **options):
        upstreams = tuple(UpstreamConfig(other.grpc, models) for other in others)
        front = start(upstreams=upstreams, alone=True, **options)
        for one in front.door.upstreams.servers:
            until(lambda one=one: all(map(one.takes, one.models)))
        return front

    return before


class Wire:
    """Passes bytes on to a gateway's gRPC until it is cut or held, as a machine that is lost."""

    def __init__(self, running):
        host, _, port = running.grpc.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = []
        self._open = threading.Event()
        self._open.set()
        self.grpc = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self):
        self._open.clear()

    def cut(self):
        self._open.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # it has ended already
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        try:
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()
        except OSError:
            pass

    def _pass(self, source, target):
        try:
            while data := source.recv(2**16):
                self._open.wait()
                target.sendall(data)
        except OSError:
            pass


@pytest.fixture
def wire():
    """Make a wire to a gateway; it is cut at the end."""
    wires = []

    def wire(running):
        wires.append(Wire(running))
        return wires[-1]

    yield wire
    for one in wires:
        one.cut()


def had(running):
    """The requests that have reached a stand-in."""
    return list(running.triton.requests.values())


def test_requests_go_to_who_serves_their_model(start):
    turbo = start(name="turbo")
    front = start(upstreams=(UpstreamConfig(turbo.grpc, ("turbo",)),))
    until(lambda: front.ask("GET", "/health")[0] == 200)
    listed = json.loads(front.ask("GET", "/v1/models")[2])["data"]
    assert [one["id"] for one in listed] == ["demo", "whisper-1", "turbo"]

    assert front.transcribe()[0] == front.transcribe(model="whisper-1")[0] == 200
    assert (len(had(front)), len(had(turbo))) == (2, 0)
    assert b'"text":"one"' in front.transcribe(prompt="one", model="turbo")[2]
    answer = front.http_client().infer("turbo", inputs(triton_http, "two"))
    assert answer.as_numpy("TEXT")[0] == b"two"
    assert answer.get_response()["model_name"] == "turbo"
    answer = front.grpc_client().infer("demo", inputs(triton_grpc, "three"))
    assert answer.get_response().model_name == "demo"
    stream = front.channel.stream_stream(f"{SERVICE}ModelStreamInfer")
    for name, triton in (("turbo_stream", turbo), ("whisper_stream", front)):
        before = len(had(triton))
        for one in stream(iter([message("four five", name)]), timeout=WAIT_S):
            found = service_pb2.ModelStreamInferResponse.FromString(one)
            assert (found.error_message, found.infer_response.model_name) == ("", name)
        (one,) = had(triton)[before:]
        assert one.model_name == "whisper" and one.parameters["earshot_segments"].bool_param
    assert (len(had(front)), len(had(turbo))) == (4, 3)

    assert front.ask("GET", "/v2/models/turbo/ready")[0] == 200
    assert json.loads(front.ask("GET", "/v2/models/turbo")[2])["name"] == "turbo"
    status, _, body = front.transcribe(model="other")
    assert status == 404 and b"demo, whisper-1, turbo" in body
    status, _, body = front.ask("POST", "/v2/models/other/infer", json.dumps(json_request()))
    assert status == 404 and b"turbo, turbo_stream" in body


def test_a_models_own_name_comes_before_an_alias(start):
    large = start(name="whisper-large-v3")
    front = start(upstreams=(UpstreamConfig(large.grpc, ("whisper-large-v3",)),))
    until(lambda: front.ask("GET", "/health")[0] == 200)
    assert front.transcribe(model="whisper-large-v3")[0] == 200
    assert front.transcribe(model="whisper-large-v2")[0] == 200
    assert (len(had(front)), len(had(large))) == (1, 1)
    none = start(model_aliases=())
    assert none.transcribe(model="whisper-1")[0] == 404


def test_a_large_file_goes_to_another_machine_as_bytes(start, before):
    back = start(max_request_mb=4)
    front = before(back)
    audio = bytes(range(256)) * 2**13
    assert front.transcribe(audio)[0] == 200
    (request,) = had(back)
    assert inputs_of(request)["AUDIO"] == audio
    assert list(front.door.upstreams.uploads.iterdir()) == []


def test_of_several_engines_the_next_gets_what_one_lost_with_its_file(start):
    front = start(devices=("cuda:0", "cuda:1"))
    first, second = front.tritons
    audio = bytes(range(256)) * 2**13
    # As Triton's calls end where it is killed.
    lost = front.transcribe(prompt="error:UNAVAILABLE Socket closed", audio=audio)
    assert lost[0] == 503  # both have had it
    for triton in (first, second):
        (file,) = triton.files.values()
        assert file[: len(file)] == audio
    calls = [front.call().future(message("wait")) for _ in range(4)]
    until(lambda: len(first.waiting) == len(second.waiting) == 2)
    first.beat(age_s=100.0)  # it stands still
    assert front.transcribe()[0] == 200 and len(second.requests) == 4
    health = json.loads(front.ask("GET", "/health")[2])
    assert health == {"status": "ok", "engines": {"cuda:0": False, "cuda:1": True}}
    assert 'takes_requests{model="demo",upstream="cuda:0"} 0.0' in front.page()
    for triton in front.tritons:
        triton.release()
    assert all(call.result(WAIT_S) for call in calls)
    assert list(front.door.upstreams.uploads.iterdir()) == []


def test_gateways_may_stand_before_gateways(start, before):
    turbo = start(name="turbo")
    middle = start(upstreams=(UpstreamConfig(turbo.grpc, ("turbo",)),))
    middle.triton.stop()  # its own model is away, which is nothing to the other
    front = start(
        name="turbo", upstreams=(UpstreamConfig(middle.grpc, ("demo", "turbo")),), alone=True
    )
    (server,) = front.door.upstreams.servers
    until(lambda: server.takes("turbo"))
    assert not server.takes("demo")
    assert front.transcribe()[0] == 200 and len(had(turbo)) == 1
    assert front.transcribe(model="demo")[0] == 503
    assert front.ask("GET", "/health")[0] == 503
    middle.triton.start()


def test_the_least_busy_one_is_asked(start, before):
    backs = [start(), start()]
    front = before(*backs)
    calls = [front.call().future(message("wait")) for _ in range(4)]
    until(lambda: sum(len(had(back)) for back in backs) == 4)
    assert [len(had(back)) for back in backs] == [2, 2]
    page = front.page()
    for back in backs:
        label = f'{{upstream="{back.grpc}"}}'
        assert f"earshot_gateway_upstream_inflight_requests{label} 2.0" in page
        back.triton.release()
    assert all(call.result(WAIT_S) for call in calls)


def test_what_has_not_begun_goes_to_another_where_one_dies(start, before, wire):
    first, second = start(), start()
    line = wire(first)
    front = before(line, second)
    calls = [front.call().future(message("wait")) for _ in range(2)]
    until(lambda: had(first) and had(second))
    line.cut()
    until(lambda: len(had(second)) == 2)
    assert front.transcribe()[0] == 200  # and what comes now goes to the other at once
    assert front.ask("GET", "/health")[0] == 200
    second.triton.release()
    assert all(call.result(WAIT_S) for call in calls)
    until(lambda: first.triton.cancelled)  # its gateway has seen that nobody waits
    page = front.page()
    first_label = f'upstream="{line.grpc}"'
    assert f'upstream_requests_total{{status="UNAVAILABLE",{first_label}}}' in page
    assert f'upstream_takes_requests{{model="demo",{first_label}}} 0.0' in page
    front.run(front.gateway.state.look())
    (one, other) = json.loads(front.ask("GET", "/state")[2])["upstreams"]
    assert (one["models"], other["models"]) == ({"demo": False}, {"demo": True})


def test_what_has_begun_does_not(start, before, wire):
    first, second = start(), start()
    line = wire(first)
    front = before(line, second)
    host, _, port = front.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", TRANSCRIPTIONS, form(prompt="wait more", stream="true"), FORM)
        answer = connection.getresponse()
        assert b"transcript.text.delta" in answer.readline()
        line.cut()
        rest = answer.read()
    assert b'"server_unavailable"' in rest and b"transcript.text.d" not in rest
    assert had(second) == []


def test_what_one_refuses_another_answers(start, before):
    full, free = start(max_inflight=1), start()
    waiting = full.call().future(message("wait"))
    until(lambda: full.triton.waiting)
    front = before(full, free)
    for _ in range(3):
        assert front.transcribe()[0] == 200
    assert (len(had(full)), len(had(free))) == (1, 3)
    full.triton.release()
    assert waiting.result(WAIT_S)


def test_one_that_drains_finishes_what_it_has_and_gets_no_more(start, before):
    first, second = start(), start()
    front = before(first, second)
    running = front.call().future(message("wait"))
    until(lambda: first.triton.waiting)
    drain = first.submit(first.gateway.drain())
    until(lambda: not front.door.upstreams.servers[0].takes("demo"))
    for _ in range(2):
        assert front.transcribe()[0] == 200
    assert (len(had(first)), len(had(second))) == (1, 2)
    assert front.ask("GET", "/health")[0] == 200
    first.triton.release()
    assert drain.result(WAIT_S) and running.result(WAIT_S)
    second.run(second.gateway.drain())
    until(lambda: front.ask("GET", "/health")[0] == 503)
    assert front.transcribe()[0] == 503


def test_a_request_that_ends_its_servers_ends_two_at_most(start, before):
    backs = [start() for _ in range(3)]
    front = before(*backs)
    with pytest.raises(grpc.RpcError) as caught:
        front.call()(message("error:UNAVAILABLE Socket closed"), timeout=WAIT_S)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert sum(len(had(back)) for back in backs) == 2


def test_what_is_wrong_with_a_request_is_told_at_once(start, before):
    backs = [start(), start()]
    front = before(*backs)
    status, error = front.infer(json.dumps(json_request("error:OptionError: no such language")))
    assert (status, error) == (400, "OptionError: no such language")
    assert sum(len(had(back)) for back in backs) == 1


def test_one_that_says_nothing_loses_its_requests(start, before, wire, monkeypatch):
    monkeypatch.setattr("serve.gateway.upstream.calls.SMALL_S", 0.1)
    monkeypatch.setattr("serve.gateway.upstream.remote.SILENT_S", 0.2)
    silent, other = start(), start()
    line = wire(silent)
    front = before(line, other, stall_timeout_s=0.5)
    call = front.call().future(message("wait"))
    until(lambda: silent.triton.waiting)
    line.hold()
    until(lambda: other.triton.waiting)
    other.triton.release()
    assert call.result(WAIT_S)
    line.cut()
    until(lambda: silent.triton.cancelled)


def test_it_shows_its_key_and_keeps_quarrels_about_it_to_itself(start, tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, f"front:{hash_of('right')}")
    back = start()
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("EARSHOT_UPSTREAM_KEY", "wrong")
    refused = start(upstreams=(UpstreamConfig(back.grpc, ("demo",)),), alone=True)
    assert refused.transcribe()[0] == 503
    file = tmp_path / "key"
    file.write_text("right\n")
    named = UpstreamConfig(back.grpc, ("demo",), key_file=str(file))
    front = start(upstreams=(named,), alone=True)
    until(lambda: front.ask("GET", "/health")[0] == 200)
    assert front.transcribe()[0] == 200
    assert refused.ask("GET", "/health")[0] == 503


@pytest.mark.parametrize(
    ("upstreams", "alone", "told"),
    [
        ((), True, "the config has no upstreams"),
        ((UpstreamConfig("a:1", ("turbo",)),), True, "no upstream serves demo.*one of turbo"),
        ((UpstreamConfig("a:1", ("whisper",)),), False, "have a model whisper"),
        ((UpstreamConfig("a:1", ("demo",), key_file="/none"),), True, "key_file = /none cannot"),
    ],
)
def test_configs_that_cannot_be(tmp_path, upstreams, alone, told):
    async def door():
        own = [] if alone else [OwnEngine("cpu", tmp_path)]
        Door(Config(upstreams=upstreams), tmp_path, own, tmp_path / "alive")

    with pytest.raises(ConfigError, match=told):
        asyncio.run(door())


LARGE = bytes(2**20 + 1)


class LostCall:
    """gRPC's call to a server that was killed while it took the message."""

    def __init__(self, lost_at: str, error: Exception) -> None:
        self._lost = {lost_at: error}

    async def write(self, message: bytes) -> None:
        self._raise("write")

    async def done_writing(self) -> None:
        self._raise("done_writing")

    async def __aiter__(self):
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "Socket closed")
        yield b""

    def _raise(self, where: str) -> None:
        if where in self._lost:
            raise self._lost[where]


class LosingChannel:
    """gRPC's channel to that server."""

    def __init__(self, call: LostCall) -> None:
        self._call = call

    def unary_unary(self, method: str):
        return None

    def stream_stream(self, method: str):
        return lambda metadata: self._call


@pytest.mark.parametrize(
    ("lost_at", "error"),
    [
        ("write", asyncio.InvalidStateError("RPC already finished.")),
        ("done_writing", grpc.aio.InternalError("Failed execute_batch")),
    ],
)
def test_a_server_lost_while_it_takes_a_large_request_is_away(lost_at, error):
    """What gRPC raises of its own where a message meets the call's end hides how it ended."""

    async def ask() -> None:
        call, answers = Channel(LosingChannel(LostCall(lost_at, error))).send(LARGE, False)
        async for _ in Call(call, answers).answers():
            pass

    with pytest.raises(Refusal) as refusal:
        asyncio.run(ask())
    assert type(refusal.value.error) is UnavailableError
