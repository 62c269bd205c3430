"""The gateway over HTTP, by tritonclient and by hand."""

import contextlib
import json

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.gateways import INFER, all_from, inputs, json_request, post, until


def test_tritons_client_finds_everything(shared):
    client = shared.http_client()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("whisper")
    assert client.is_model_ready("whisper_stream", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("whisper")
    assert metadata["inputs"][0] == {"name": "AUDIO", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize(
    ("sent_binary", "wanted_binary"),
    [(True, 3 * (True,)), (False, 3 * (False,)), (True, (True, False, True)), (True, ())],
)
def test_tensors_go_in_and_out_as_json_and_as_bytes(running, sent_binary, wanted_binary):
    names = ("TEXT", "LANGUAGE_PROB", "DURATION")
    outputs = [
        triton_http.InferRequestedOutput(name, binary_data=wanted)
        for name, wanted in zip(names, wanted_binary, strict=False)
    ]
    sent = inputs(triton_http, "¿Qué?", binary_data=sent_binary)
    answer = running.http_client().infer("whisper", sent, request_id="7", outputs=outputs or None)
    assert answer.get_response()["id"] == "7"
    text = answer.as_numpy("TEXT")[0]
    assert (text if isinstance(text, str) else text.decode()) == "¿Qué?"
    assert answer.as_numpy("LANGUAGE_PROB") == np.float32(0.2)
    assert answer.as_numpy("DURATION") == 1.5
    (request,) = running.triton.requests.values()
    assert request.raw_input_contents[1] == bytes(1600)


@pytest.mark.parametrize("opening", ["[", '{"parameters":{"a":'])
def test_deeply_nested_json_is_refused(shared, opening):
    inside = json.dumps({"inputs": []})[:-1] + ',"parameters":' + '{"a":['
    for times, why in ((10_000, "recursion limit"), (200_000, "quotation marks and brackets")):
        status, error = shared.infer(opening * times)
        assert status == 400 and why in error
        assert shared.infer(inside * times)[0] == 400


def test_declared_size_is_refused_before_the_body_is_sent(start):
    running = start(max_request_mb=1)
    large = post(length=2_000_000, headers="Inference-Header-Content-Length: 100\r\n")
    with running.connected(large) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_undeclared_size_is_refused_as_soon_as_it_is_too_large(start):
    running = start(max_request_mb=1)

    def endless():
        for _ in range(200):
            yield bytes(2**14)

    status, error = running.infer(endless(), Inference_Header_Content_Length="100")
    assert status == 413
    assert "max_request_mb" in error
    assert running.services.admission.bytes == 0


def test_json_is_smaller_than_binary_data_may_be(start, monkeypatch):
    monkeypatch.setattr("serve.gateway.kserve.http.MAX_JSON_BYTES", 1000)
    running = start()
    status, error = running.infer(b" " * 1001)
    assert (status, "binary data" in error) == (413, True)
    status, error = running.infer(b" " * 2000, Inference_Header_Content_Length="1001")
    assert (status, "binary data" in error) == (413, True)


def test_a_body_larger_than_declared_is_another_request_and_no_good_one(running):
    body = json.dumps(json_request()).encode()
    with running.connected(post(body) + b"more and more\r\n\r\n") as connection:
        received = all_from(connection)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in received
    assert len(running.triton.requests) == 1


@pytest.mark.parametrize(
    ("body", "header", "told"),
    [
        (b"", None, "0 bytes of JSON"),
        (b"{}", "0", "0 bytes of JSON"),
        (b"{}", "3", "3 bytes of JSON are expected in a body of 2"),
        (b"{}", "-1", "is no number"),
        (b"{}", "9" * 30, "is no number"),
        (b"{} ", "2", "inputs is missing"),
    ],
)
def test_the_json_is_as_long_as_the_header_says(shared, body, header, told):
    headers = {} if header is None else {"Inference_Header_Content_Length": header}
    status, error = shared.infer(body, **headers)
    assert status == 400
    assert told in error


def test_a_slow_body_is_given_up(start):
    running = start(upload_timeout_s=0.3)
    with running.connected(post(b"{", length=1000)) as connection:
        received = all_from(connection)
    assert received.startswith(b"HTTP/1.1 503 ")
    assert b"upload_timeout_s" in received


@pytest.mark.parametrize(
    "said", [b"", b"GET /v2 HT", b"GET /v2 HTTP/1.1\r\nHost: [::1]\r\n\r\nGET"]
)
def test_a_connection_that_says_no_more_is_closed(start, said):
    running = start(upload_timeout_s=0.3)
    with running.connected(said) as connection:
        all_from(connection)


def test_requests_beyond_the_bytes_are_refused_with_a_time_to_wait(start):
    running = start(max_request_mb=1, max_inflight_mb=1)
    with running.connected(post(length=1_000_000)):
        until(lambda: running.services.admission.bytes == 1_000_000)
        status, headers, body = running.ask("POST", INFER, bytes(100_000))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"].startswith("OverloadedError: ")
    until(lambda: running.services.admission.bytes == 0)


def test_connections_beyond_the_limit_are_refused_with_a_time_to_wait(start, monkeypatch):
    monkeypatch.setattr("serve.gateway.run.SPARE_CONNECTIONS", 0)
    running = start(max_inflight=2)
    with contextlib.ExitStack() as others:
        for number in range(1, 3):
            others.enter_context(running.connected(post(b"{", length=1000)))
            until(lambda number=number: running.services.admission.requests == number)
        status, headers, body = running.ask("GET", "/v1/models")
        assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
        assert json.loads(body)["error"]["message"] == "too many connections are open; try again"
    until(lambda: running.ask("GET", "/v2/health/live")[0] == 200)


def test_what_is_not_offered_is_refused_as_json(shared):
    for method, status, paths in (
        ("GET", 404, "/page/other /v2/ /v2/models/whisper/config /v2/models/other"),
        ("GET", 405, INFER),
        ("POST", 404, "/v2/repository/index /v2/models/whisper/versions/2/infer"),
        ("POST", 404, "/v2/models/other/infer"),
        ("POST", 400, "/v2/models/whisper_stream/infer"),
    ):
        for path in paths.split():
            found, _, body = shared.ask(method, path, json.dumps(json_request()))
            assert (found, json.loads(body)["error"][:14]) == (status, "RequestError: "), path


def test_it_is_ready_while_triton_is_there_and_its_model_beats(running):
    ready, triton = "/v2/health/ready", running.triton
    assert running.ask("GET", ready)[0] == 200
    triton.beat(age_s=1)
    assert running.ask("GET", ready)[0] == 200
    triton.beat(age_s=5)
    assert running.ask("GET", ready)[0] == 503
    triton.beat()
    (triton.folder / "alive").unlink()
    assert running.ask("GET", ready)[0] == 503
    assert running.ask("GET", "/v2/models/whisper/ready")[0] == 503
    triton.beat()
    triton.ready = False
    assert running.ask("GET", ready)[0] == 503
    triton.ready = True
    triton.stop()
    status, headers, _ = running.ask("GET", ready)
    assert (status, headers["Retry-After"]) == (503, "1")
    status, error = running.infer(json.dumps(json_request()))
    assert (status, error.split(":")[0]) == (503, "UnavailableError")
    assert running.ask("GET", "/v2/health/live")[0] == 200
    triton.start()
