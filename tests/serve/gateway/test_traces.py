"""Spans, as a collector gets them."""

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading

import pytest
import tritonclient.grpc as triton_grpc

from serve.contract.errors import ConfigError
from serve.gateway.observe.log import JsonFormatter
from serve.gateway.observe.spans import open_tracer
from tests.collector import Collector, tree
from tests.gateways import INFER, TRANSCRIPTIONS, WAIT_S, inputs, json_request, message, until
from tests.serve.gateway.live.sessions import LIVE, sound

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PHASES = ["queue.decoder", "decode", "queue.slot", "encode", "steps"]
SERVER = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch, collector):
    """Spans are sent soon, to a collector that ends after their senders."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def collector():
    with contextlib.closing(Collector()) as collector:
        yield collector


@pytest.fixture
def send_to(monkeypatch):
    return lambda endpoint: monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)


@pytest.fixture
def traced(start, collector, send_to):
    send_to(collector.endpoint)
    return start()


def said_by(flags="01"):
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


def whole(collector, name):
    """The spans of a trace once the span of this name, which ends last, has come."""
    until(lambda: [span for span in collector.spans if span.name == name])
    (root,) = (span for span in collector.spans if span.name == name)
    return root, [span for span in collector.spans if span.trace_id == root.trace_id]


def below(spans, parent):
    """Those right below one, in order of time; each is within it."""
    found = sorted((s for s in spans if s.parent_id == parent.id), key=lambda s: (s.begin, s.end))
    assert all(parent.begin <= span.begin <= span.end <= parent.end for span in found)
    return found


def test_a_request_is_a_tree_below_its_callers_span(traced, collector, caplog):
    with caplog.at_level(logging.INFO, "earshot.requests"):
        status, headers, _ = traced.transcribe(headers=said_by())
        root, spans = whole(collector, "POST /v1/audio/transcriptions")
    assert (status, root.trace_id, root.parent_id, root.kind) == (200, TRACE, PARENT, SERVER)
    assert root.resource["service.name"] == "earshot"
    assert root.attributes["http.request.method"] == "POST"
    assert root.attributes["http.route"] == root.attributes["url.path"] == TRANSCRIPTIONS
    assert root.attributes["http.response.status_code"] == 200 and not root.failed
    told = {key: root.attributes[f"earshot.{key}"] for key in ("model", "audio_s", "outcome")}
    assert told == {"model": "demo", "audio_s": 1.5, "outcome": "ok"}
    assert root.attributes["earshot.request_id"] == headers["x-request-id"]
    receive, engine = below(spans, root)
    assert (receive.name, engine.name) == ("receive", "engine")
    assert engine.attributes == {"earshot.upstream": "cpu"}
    assert receive.begin == root.begin and receive.end == engine.begin
    phases = below(spans, engine)
    assert [span.name for span in phases] == PHASES
    assert all(span.attributes["earshot.windows"] == 1 for span in phases)
    assert len(spans) == 8 and len({span.id for span in spans}) == 8
    assert tree(spans)[1].split()[:2] == ["POST", "/v1/audio/transcriptions"]
    (record,) = caplog.records
    assert f" trace_id={TRACE} " in record.getMessage()
    assert f'"trace_id": "{TRACE}"' in JsonFormatter().format(record)


@pytest.mark.parametrize("way", ["http", "grpc", "grpc_stream"])
def test_kserves_requests_have_the_same_spans(traced, collector, way):
    service = "inference.GRPCInferenceService"
    if way == "http":
        body = json.dumps(json_request())
        _, _, answer = traced.ask("POST", INFER, body, said_by())
        assert b"PHASES" in answer
        name = "POST /v2/models/{name}/infer"
    elif way == "grpc":
        traced.call()(message(), metadata=tuple(said_by().items()), timeout=WAIT_S)
        name = f"{service}/ModelInfer"
    else:
        client, answers = traced.grpc_client(), []
        client.start_stream(
            lambda result, error: answers.append(error or result), headers=said_by()
        )
        client.async_stream_infer("whisper_stream", inputs(triton_grpc, "one two"))
        until(lambda: len(answers) == 3)
        client.stop_stream()
        name = f"{service}/ModelStreamInfer"
    root, spans = whole(collector, name)
    assert (root.trace_id, root.parent_id, root.kind) == (TRACE, PARENT, SERVER)
    assert [span.name for span in below(spans, below(spans, root)[1])] == PHASES
    assert root.attributes["earshot.audio_s"] == 1.5
    if way != "http":
        assert root.attributes["rpc.method"] == name.split("/")[1]
        assert root.attributes["rpc.grpc.status_code"] == 0


def test_a_request_that_fails_tells_how_far_it_came(traced, collector):
    assert traced.transcribe(beam_size="x")[0] == 400
    root, spans = whole(collector, "POST /v1/audio/transcriptions")
    assert spans == [root] and root.parent_id == "" and not root.failed, "its client's doing"
    assert root.attributes["earshot.outcome"] == "invalid_argument"
    collector.spans.clear()
    status, _, _ = traced.transcribe(prompt="error:it broke")
    root, spans = whole(collector, "POST /v1/audio/transcriptions")
    assert (status, root.attributes["http.response.status_code"], root.failed) == (503, 503, True)
    assert root.attributes["error.type"] == root.attributes["earshot.outcome"]
    receive, engine = below(spans, root)
    assert (receive.failed, engine.failed) == (False, True) and not below(spans, engine)


def test_a_live_session_has_a_span_with_each_decoding_below(start, collector, talk, send_to):
    send_to(collector.endpoint)
    client = talk(start(live=LIVE))
    client.audio(sound(3.0) + sound(1.5, level=0.0))
    client.until(".completed")
    client.socket.close()
    root, spans = whole(collector, "GET /v1/realtime")
    decodings = below(spans, root)
    assert decodings and {span.name for span in decodings} == {"decoding"}
    assert root.attributes["http.response.status_code"] == 101
    for decoding in decodings:
        (engine,) = below(spans, decoding)
        assert [span.name for span in below(spans, engine)] == PHASES


@pytest.mark.parametrize(("flags", "share"), [("00", "1"), (None, "0")])
def test_what_is_not_sampled_is_not_recorded(start, collector, monkeypatch, send_to, flags, share):
    send_to(collector.endpoint)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    running = start()
    running.transcribe(headers=said_by(flags) if flags else ())
    (request,) = running.triton.requests.values()
    assert "earshot_phases" not in request.parameters
    running.transcribe(headers=said_by())
    root, spans = whole(collector, "POST /v1/audio/transcriptions")
    assert root.parent_id == PARENT and spans == collector.spans, "only that whose caller wants it"


def test_a_collector_that_is_away_costs_a_line_and_a_counter(start, caplog, monkeypatch, send_to):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with contextlib.closing(Collector()) as gone:
        pass
    send_to(gone.endpoint)
    running = start()
    assert running.transcribe()[0] == 200
    until(lambda: 'earshot_gateway_spans_total{state="failed"} 8.0' in running.page())
    assert 'earshot_gateway_spans_total{state="ended"} 8.0' in running.page()
    lines = [record for record in caplog.records if "Failed to export" in record.getMessage()]
    assert lines and {line.max_lines for line in lines} == {1}, "of a minute"


def test_a_collector_that_hangs_does_not_keep_the_server_from_its_end(start, monkeypatch, send_to):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr("serve.gateway.observe.traces.CLOSE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        send_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        running = start()
        running.transcribe()
        running.run(running.services.tracer.close())
        assert 'earshot_gateway_spans_total{state="ended"} 8.0' in running.page()
        assert 'state="sent"' not in running.page()
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("OtelBatch")])


def test_without_an_endpoint_there_are_none(running):
    body = json.dumps(json_request())
    answer = running.ask("POST", INFER, body, said_by())[2]
    assert b"PHASES" not in answer
    large = "{'opentelemetry.sdk', 'torch', 'openai'}"  # its process is small
    code = f"import serve.gateway.run, sys; print({large} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.stdout == "set()\n"


@pytest.mark.parametrize(
    ("environment", "posted"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}/"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "{}/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}", "OTEL_TRACES_SAMPLER": "always_off"}, False),
    ],
)
def test_opentelemetrys_variables_are_honoured(start, collector, monkeypatch, environment, posted):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=asr,deployment=test")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(collector.endpoint))
    running = start()
    running.transcribe()
    running.run(running.services.tracer.close())
    assert bool(collector.spans) == posted
    for span in collector.spans:
        assert span.resource["service.name"] == "asr" and span.resource["deployment"] == "test"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_BSP_MAX_QUEUE_SIZE", "0")]
)
def test_variables_that_cannot_be_used_are_named(monkeypatch, send_to, name, value):
    monkeypatch.setenv(name, value)
    send_to("http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match="OTEL_"):
        open_tracer(None)


# ---------------------------------------------------------------- hostile headers


FULL_STATE = ",".join(f"k{number}={'v' * 250}" for number in range(31))  # 8 kB, as much as may be
HOSTILE = {
    "a long traceparent": {"traceparent": "0" * 60_000},
    "no ids": {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    "a long tracestate": said_by() | {"tracestate": "a=" + "b" * 60_000},
    "a full tracestate": said_by() | {"tracestate": FULL_STATE},
    "a member that is none": said_by() | {"tracestate": "a=1," + "Zanzibar " * 800},
    "commas": said_by() | {"tracestate": "," * 8000},
}


@pytest.mark.parametrize("headers", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_change_nothing_and_are_not_logged(traced, collector, caplog, headers):
    caplog.set_level(logging.INFO)
    assert traced.transcribe(headers=headers)[0] == 200
    root, _ = whole(collector, "POST /v1/audio/transcriptions")
    below_it = "tracestate" in headers or "baggage" in headers
    assert (root.trace_id == TRACE) == below_it
    assert "Zanzibar" not in caplog.text
    assert all(len(record.getMessage()) < 500 for record in caplog.records)
    short = tuple((key, text) for key, text in headers.items() if len(text) < 7000)
    traced.call().with_call(message(), metadata=short, timeout=WAIT_S)
