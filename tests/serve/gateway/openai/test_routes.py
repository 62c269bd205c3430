"""The addresses below /v1, and the small pages beside them, by hand."""

import json

import pytest

from serve.gateway.openai.fields import FIELDS
from tests.gateways import END, FILE, FORM, TRANSCRIPTIONS, part, until


def refused(running, body, headers=FORM, method="POST", path=TRANSCRIPTIONS):
    """Status and error of a request."""
    status, found, answer = running.ask(method, path, body, headers)
    assert found["content-type"] == "application/json"
    assert found["x-request-id"].startswith("req_")
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return status, error


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        (END, "file", "the files []; expected a form with one file"),
        (part("file", b"hello") + END, "file", "the files []"),
        (part("audio", b"RIFF", "a.wav") + END, "file", "the files ['audio']"),
        (FILE + FILE + END, "file", "the files ['file', 'file']"),
        (FILE * 3 + END, None, "Too many files"),
        (part("file", b"", "a.wav") + END, "file", "0 bytes"),
        (FILE, None, "cut short"),
        (b"", None, "cut short"),
        (b"hello", None, "cannot be read"),
        (FILE + part("prompt", bytes(2**20)) + END, None, "exceeded maximum size"),
        (FILE + part("prompt", b"a") * 200 + END, None, "Too many fields"),
    ],
)
def test_forms_that_cannot_be_read(shared, body, param, told):
    status, error = refused(shared, body)
    assert (status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


def test_ignored_fields_are_named_in_the_answer(running):
    for more in ({}, {"stream": "true"}):
        status, found, text = running.transcribe(user="u", é="1", **more)
        assert (status, found["x-earshot-ignored"]) == (200, "user, %C3%A9")
    _, _, text = running.transcribe(user="u", é="1")
    assert json.loads(text)["warnings"] == [
        "the field 'user' is unknown and was ignored",
        "the field 'é' is unknown and was ignored",
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
        {**FORM, "content-encoding": "gzip"},
        {"content-type": f"{FORM['content-type']}; charset=utf-7"},
    ],
)
def test_bodies_of_another_kind(shared, headers):
    assert refused(shared, FILE + END, headers)[0] == 415


@pytest.mark.parametrize(
    "asked",
    [
        *(f"GET {TRANSCRIPTIONS}", "GET /v1/", "GET /v1/models/a/b", "GET /v1/batches"),
        *("POST /v1/audio/speech", "POST /v1/chat/completions", "POST /v1/files"),
    ],
)
def test_what_is_not_offered(shared, asked):
    method, path = asked.split()
    status, error = refused(shared, b"", {}, method, path)
    assert status == (405 if path == TRANSCRIPTIONS else 404)
    assert "/v1/audio/jobs" in error["message"] or path == "/v1/models/a/b"


def test_a_fault_of_ours_is_told_apart(shared, monkeypatch, caplog):
    monkeypatch.setattr("serve.gateway.openai.answers.render_transcript", lambda *_: 1 / 0)
    status, headers, body = shared.ask("POST", TRANSCRIPTIONS, FILE + END, FORM)
    assert status == 500
    assert json.loads(body)["error"]["type"] == "server_error"
    until(lambda: headers["x-request-id"] in caplog.text)


def test_pages(shared):
    assert json.loads(shared.ask("GET", "/health")[2]) == {"status": "ok"}
    assert b"earshot_gateway_requests_total" in shared.ask("GET", "/metrics")[2]
    _, _, text = shared.ask("GET", "/openapi.json")
    described = json.loads(text)["paths"][TRANSCRIPTIONS]["post"]["requestBody"]["content"]
    properties = described["multipart/form-data"]["schema"]["properties"]
    assert {name.removesuffix("[]") for name in properties} == {"file", *FIELDS}
