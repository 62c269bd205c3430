"""The log's lines of requests: whatever door they come by, by the id that its client is told."""

import json
import logging
import os
import re

import grpc
import pytest

from serve.contract.keys import ENVIRONMENT, hash_of
from serve.gateway.engines import SERVICE
from serve.gateway.observe import log
from serve.wire import tensors
from tests.gateways import WAIT_S, Clock, message, until
from tests.serve.gateway.live.sessions import session, sound

SECRET = "Zanzibar"  # what is said, and asked for


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO, "earshot.requests")


@pytest.fixture
def line(caplog):
    """The fields of the one line of a request, once it is there."""

    def line(id):
        def found():
            told = [record.fields for record in caplog.records if hasattr(record, "fields")]
            return [fields for fields in told if fields["id"] == id]

        until(found)
        (fields,) = found()
        assert SECRET not in caplog.text
        return fields

    return line


def transcribe(running, **options):
    """Status, id and body of a request of OpenAI's kind."""
    status, found, body = running.transcribe(**options)
    return status, found["x-request-id"], body


def test_a_transcription(running, line):
    status, id, body = transcribe(running, prompt=SECRET)
    assert (status, SECRET in body.decode()) == (200, True)
    found = line(id)
    assert found.pop("total_s") >= 0
    assert found == {
        "id": id,
        "route": "transcriptions",
        "model": "demo",
        "audio_s": 1.5,
        "queue_s": 0.1,
        "outcome": "ok",
    }


def test_a_stream_tells_its_first_text(running, line):
    _, id, _ = transcribe(running, stream="true", prompt=SECRET)
    found = line(id)
    assert 0 <= found["first_text_s"] <= found["total_s"]
    assert (found["audio_s"], found["outcome"]) == (1.5, "ok")


def test_a_key_is_named_and_not_shown(start, line, monkeypatch, caplog):
    monkeypatch.setenv(ENVIRONMENT, f"alice:{hash_of('sesame')}")
    running = start()
    _, id, _ = transcribe(running, headers={"Authorization": "Bearer sesame"})
    assert line(id)["key"] == "alice"
    status, id, _ = transcribe(running, headers={"Authorization": "Bearer tahini"})
    assert (status, line(id)["outcome"]) == (401, "unauthenticated")
    _, headers, _ = running.ask("GET", "/v1/models")
    found = line(headers["x-request-id"])
    assert (found["route"], found["outcome"]) == ("/v1/models", "unauthorized")
    assert "sesame" not in caplog.text and "tahini" not in caplog.text


def test_refusals_and_failures(running, line):
    status, id, _ = transcribe(running, beem_size=SECRET)
    found = line(id)
    assert (status, found["outcome"], found["param"]) == (400, "invalid_argument", "beem_size")
    status, id, _ = transcribe(running, prompt="error:INTERNAL oh")
    assert (status, line(id)["outcome"]) == (503, "unavailable")
    status, headers, _ = running.ask("GET", "/v1/nothing")
    assert line(headers["x-request-id"])["outcome"] == "not found"


def test_what_is_no_request_for_text_has_no_line(running, caplog):
    for path in ("/health", "/v1/models", "/openapi.json", "/v2/health/ready"):
        assert running.ask("GET", path)[0] == 200
    running.triton.ready = False
    assert running.ask("GET", "/health")[0] == running.ask("GET", "/v2/health/ready")[0] == 503
    assert not [record for record in caplog.records if record.name == "earshot.requests"]
    running.triton.ready = True


def test_kserve_over_grpc(running, line):
    _, call = running.call().with_call(message(SECRET), timeout=WAIT_S)
    found = line(dict(call.trailing_metadata())["x-request-id"])
    assert (found["route"], found["queue_s"], found["outcome"]) == ("grpc", 0.1, "ok")
    call = running.call().future(message(model="other"))
    assert call.code() == grpc.StatusCode.NOT_FOUND
    assert line(dict(call.trailing_metadata())["x-request-id"])["outcome"] == "not_found"
    call = running.call("ModelReady").future(b"\x0a\x05other")
    assert call.code() == grpc.StatusCode.NOT_FOUND
    found = line(dict(call.trailing_metadata())["x-request-id"])
    assert (found["route"], found["outcome"]) == ("ModelReady", "not_found")


def test_a_grpc_stream_has_a_line_for_each_request(running, line):
    stream = running.channel.stream_stream(f"{SERVICE}ModelStreamInfer")
    texts = SECRET, "error:EarshotError: no"
    requests = (message(text, tensors.STREAM_MODEL) for text in texts)
    call = stream(requests, timeout=WAIT_S)
    assert list(call)
    id = dict(call.trailing_metadata())["x-request-id"]
    found = {line(f"{id}.{number}")["outcome"]: line(f"{id}.{number}") for number in (1, 2)}
    assert found["ok"]["first_text_s"] <= found["ok"]["total_s"]
    assert found["internal"]["route"] == "grpc_stream"


def test_a_live_stream_has_one_at_its_end_also_where_the_server_ends_it(talk, line):
    client = talk(prompt=SECRET, turn_detection=None)
    client.audio(sound(1.0))
    client.commit()
    client.socket.close()
    id = client.socket.response.headers["x-request-id"]
    found = line(id)
    assert (found["route"], found["model"], found["outcome"]) == ("live", "demo", "ok")
    assert found["audio_s"] == pytest.approx(1.0, abs=0.05)
    assert 0 < found["first_text_s"] <= found["total_s"]
    assert found["queue_s"] == 0.1
    with session(client.running) as client:
        assert client.running.run(client.running.gateway.drain())
        id = client.socket.response.headers["x-request-id"]
        assert line(id)["outcome"] == "server_stopping"


def test_a_request_ends_once_however_it_ends(start, caplog):
    """Answered, rejected, left by its client, lost with its engine, and ended by the drain."""
    running = start(drain_timeout_s=0.2)
    running.call()(message(), timeout=WAIT_S)
    assert transcribe(running, beem_size=5)[0] == 400
    left = running.call().future(message("wait"))
    until(lambda: running.triton.waiting)
    left.cancel()
    until(lambda: running.services.admission.requests == 0)
    assert transcribe(running, prompt="error:UNAVAILABLE lost")[0] == 503
    ended = running.call().future(message("wait"))
    until(lambda: running.triton.waiting)
    assert not running.run(running.gateway.drain())
    assert ended.code() == grpc.StatusCode.UNAVAILABLE
    told = [record.fields["outcome"] for record in caplog.records if hasattr(record, "fields")]
    expected = ["client_gone", "draining", "invalid_argument", "ok", "server_away"]
    assert sorted(told) == expected
    page = running.page()
    for counted in (r"requests_total\{.*", r"request_seconds_count\{.*"):
        found = re.findall(rf"earshot_gateway_{counted} ([\d.]+)", page)
        assert sum(map(float, found)) == len(expected), counted


# ---------------------------------------------------------------- how it is written


@pytest.fixture
def written():
    """Lines as a handler writes them into a pipe, which is read at the end."""
    read, write = os.pipe()
    logger = logging.getLogger("earshot.requests")
    handler = log.AsyncLogHandler(write)
    handler.addFilter(log.LogRateLimiter())
    logger.addHandler(handler)

    def written():
        handler.flush()
        logger.removeHandler(handler)
        os.close(write)
        with open(read, encoding="utf-8") as file:
            return file.read().splitlines()

    handler.setFormatter(log.TextFormatter())
    written.handler = handler
    yield written
    logger.removeHandler(handler)


def test_text_is_one_line_of_words(written):
    log.LogRecord(id="req_1", route="/v1/a b\n\x1b[31m", key="alice", outcome="not found").write()
    (found,) = written()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO earshot\.requests: id=req_1 "
        r'route="/v1/a b\\n\\u001b\[31m" key=alice total_s=[\d.e-]+ outcome="not found"',
        found,
    )


def test_json_is_one_object_a_line(written):
    written.handler.setFormatter(log.JsonFormatter())
    log.LogRecord(id="req_1", route="live", audio_s=2.0, outcome="ok").write()
    logging.getLogger("earshot.requests").warning("other %s", "words")
    first, second = map(json.loads, written())
    assert (first["id"], first["audio_s"], first["level"]) == ("req_1", 2.0, "INFO")
    assert second["message"] == "other words"


def test_refusals_are_told_at_a_bounded_rate_and_answers_all(written):
    for _ in range(log.MAX_REFUSALS + 50):
        log.LogRecord(route="http", outcome="overloaded").write()
        log.LogRecord(route="http", outcome="ok").write()
    log.LogRecord(route="http", key="alice", outcome="overloaded").write()
    found = written()
    assert sum("outcome=ok" in line for line in found) == log.MAX_REFUSALS + 50
    assert sum("outcome=overloaded" in line for line in found) == log.MAX_REFUSALS + 1


def test_nobody_waits_for_a_reader_who_stands_still(written, monkeypatch):
    for number in range(12_000):  # of which the pipe takes a few hundred
        log.LogRecord(id=f"req_{number}", route="http", outcome="ok").write()
    monkeypatch.setattr(log, "FLUSH_S", 0.01)
    assert written.handler._dropped


def test_what_is_said_again_and_again_is_said_a_few_times_a_minute():
    clock = Clock()
    limiter = log.LogRateLimiter(clock)

    def said(times, line=1):
        call = "earshot", logging.WARNING, "a.py", line, "no room for %d"
        records = [logging.LogRecord(*call, (number,), None) for number in range(times)]
        return [record.getMessage() for record in records if limiter.filter(record)]

    assert len(said(1000)) == log.MAX_LINES
    clock.now_s += 59.0
    assert said(1) == []
    assert said(1, line=2) == ["no room for 0"]
    clock.now_s += 1.0
    assert said(2) == [f"no room for 0 (and {1001 - log.MAX_LINES} more before)", "no room for 1"]
