"""Keys, origins, headers and TLS at every address of the gateway."""

import contextlib
import http.client
import json
import ssl
import urllib.request
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton_grpc
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from serve.contract.errors import OverloadedError
from serve.contract.messages import Request
from serve.contract.server_config import ServerConfig
from serve.gateway.edge.headers import may_be_called
from serve.gateway.engines import SERVICE
from serve.supervisor.gateway import answers_get
from serve.wire.client import TritonClient
from serve.wire.folder import gateway_socket
from tests.gateways import INFER, WAIT_S, Running, inputs, json_request, message
from tests.jobs import ALICE, BOB, keys_of
from tests.serving import is_ready

PEM = Path(__file__).with_name("localhost.pem")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    keys_file = keys_of(folder, bob={"requests_per_minute": 1, "audio_s_per_minute": 1})
    origins = ("https://example.org",)
    running = Running(folder, 600.0, keys_file=keys_file, allowed_origins=origins)
    yield running
    running.close()


OPEN = """
    GET /health, GET /, GET /openapi.json, GET /v2/health/live, GET /v2/health/ready,
    GET /v2/models/whisper/ready
"""
CLOSED = f"""
    GET /state, POST /subtitles, GET /metrics, GET /v2, GET /v2/models/whisper, POST {INFER},
    GET /v1/models, GET /v1/models/demo, GET /v1/usage, POST /v1/audio/transcriptions,
    POST /v1/audio/translations
"""


@pytest.mark.parametrize(("routes", "open"), [(OPEN, True), (CLOSED, False)])
def test_what_needs_a_key_over_http(shared, routes, open):
    for method, path in map(str.split, routes.split(",")):
        status, headers, _ = shared.ask(method, path, "{}" if method == "POST" else None)
        expected = (200, None) if open else (401, "Bearer")
        assert (status, headers["www-authenticate"]) == expected, path
        wrong = {"authorization": "Bearer secret-c"}
        assert (shared.ask(method, path, headers=wrong)[0] == 401) is not open
        assert shared.ask(method, path, headers=ALICE)[0] != 401


def test_what_needs_a_key_over_grpc(shared):
    open = {"ServerLive", "ServerReady", "ModelReady"}
    closed = {"ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer"}
    for name in open | closed:
        call = shared.channel.stream_stream(SERVICE + name)
        for metadata, refused in ((None, name in closed), (tuple(ALICE.items()), False)):
            try:
                list(call(iter([message(model="whisper")]), timeout=WAIT_S, metadata=metadata))
                status = None
            except grpc.RpcError as error:
                status = error.code()
            assert (status is grpc.StatusCode.UNAUTHENTICATED) is refused, name


def test_a_keys_share_is_one_at_all_addresses(shared):
    """Its second request of a minute waits, wherever it comes."""
    with TritonClient(shared.grpc, key="secret-b") as client:
        assert client.transcribe(b"RIFF", prompt="one two").text == "one two"
        with pytest.raises(OverloadedError, match="the key bob has used up"):
            client.transcribe(b"RIFF")
        with pytest.raises(OverloadedError, match="the key bob has used up"):
            list(client.stream(Request(b"RIFF")))
    status, found, _ = shared.ask("POST", INFER, json.dumps(json_request()), BOB)
    assert (status, int(found["retry-after"]) > 1) == (503, True)
    status, found, body = shared.ask("POST", "/v1/audio/transcriptions", "", BOB)
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(found["retry-after"]) > 1
    assert found["x-ratelimit-remaining-requests"] == "0"
    assert 'key="bob",route="grpc",status="UNAVAILABLE"} 1.0' in shared.page()


# ---------------------------------------------------------------- browsers


def test_pages_of_others_are_refused_unless_they_are_allowed(shared):
    for origin in ("http://a", "http://["):
        status, headers, body = shared.ask("GET", "/v1/models", headers={**ALICE, "origin": origin})
        assert (status, json.loads(body)["error"]["code"]) == (403, "origin_not_allowed")
        assert headers["access-control-allow-origin"] is None
    own = f"http://{shared.http}"
    for origin, allowed in (("https://example.org", "https://example.org"), (own, None)):
        asked = {**ALICE, "origin": origin}
        status, headers, _ = shared.ask("GET", "/v1/models", headers=asked)
        assert (status, headers["access-control-allow-origin"]) == (200, allowed)
    preflight = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    status, headers, _ = shared.ask("OPTIONS", "/v1/audio/transcriptions", headers=preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://example.org")


LOOPBACK = ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:8000")
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example")
NOT_HOSTS = ("", "[127.0.0.1", "::1", "localhost:80:80", "evil@localhost", "0.0.0.0", "192.168.0.1")


def test_which_names_may_be_called():
    """Loopback's own, and where the server is reached from elsewhere those that are listed."""
    for host in LOOPBACK:
        assert may_be_called(ServerConfig(), host), host
    for host in FOREIGN + NOT_HOSTS:
        assert not may_be_called(ServerConfig(), host), host
        assert not may_be_called(ServerConfig(host="0.0.0.0", allowed_hosts=("asr.example",)), host)
        assert may_be_called(ServerConfig(host="0.0.0.0", open=True), host)
    for host in ("127.0.0.1", "0.0.0.0"):
        server = ServerConfig(host=host, allowed_hosts=("ASR.example",))
        assert may_be_called(server, "asr.Example:443")


def test_a_gateway_that_names_its_hosts_is_found_by_whoever_started_it(start):
    running = start(host="0.0.0.0", open=True, allowed_hosts=("asr.example.org",))
    assert answers_get(gateway_socket(running.folder), "/health")


def test_a_page_whose_name_was_made_to_point_here_is_refused(shared):
    """Its origin equals the host that it asks, as only this server's own page's should."""
    for path in ("/", "/v1/models", "/v2/health/live", "/metrics"):
        asked = {**ALICE, "origin": "http://evil.example", "host": "evil.example"}
        status, headers, body = shared.ask("GET", path, headers=asked)
        assert (status, json.loads(body)["error"]["code"]) == (421, "host_not_allowed")
        assert headers["x-request-id"]
    metrics = http.client.HTTPConnection(shared.metrics, timeout=WAIT_S)
    with contextlib.closing(metrics):
        metrics.request("GET", "/metrics", headers={"host": "evil.example"})
        assert metrics.getresponse().status == 421


def test_a_websocket_of_such_a_page_is_refused(shared):
    with shared.connected() as socket, pytest.raises(InvalidStatus) as refused:
        connect("ws://evil.example/v1/realtime", sock=socket, origin="http://evil.example")
    assert refused.value.response.status_code == 421
    with shared.connected() as socket, pytest.raises(InvalidStatus) as refused:
        connect("ws://localhost/v1/realtime", sock=socket, origin="http://localhost")
    assert refused.value.response.status_code == 401, "it lacks a key alone"


def test_every_response_is_safe_in_a_browser(shared):
    for path in ("/v1/models", "/v2", "/openapi.json", "/nothing"):
        _, headers, _ = shared.ask("GET", path)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["cache-control"] == "no-store"
        assert headers["strict-transport-security"] is None


# ---------------------------------------------------------------- TLS


def test_with_certificates_all_ports_speak_tls(start):
    running = start(tls_certificate=str(PEM), tls_key=str(PEM))
    trusted = ssl.create_default_context(cafile=str(PEM))
    for at in (running.http, running.metrics):
        url = f"https://{at.replace('127.0.0.1', 'localhost')}/metrics"
        with urllib.request.urlopen(url, timeout=WAIT_S, context=trusted) as answer:
            assert answer.headers["strict-transport-security"]
    assert not is_ready(running.http)
    assert answers_get(gateway_socket(running.folder), "/health")
    client = triton_grpc.InferenceServerClient(
        running.grpc.replace("127.0.0.1", "localhost"), ssl=True, root_certificates=str(PEM)
    )
    assert client.infer("whisper", inputs(triton_grpc)).as_numpy("TEXT")[0] == b"hello"
    client.close()
