"""Spans of requests, by OpenTelemetry's API; without a collector they record nothing.

OpenTelemetry's own variables name the collector. `serve.gateway.observe.traces` sends spans to it
and loads OpenTelemetry's SDK, which a gateway without traces does not load.

A request's own span begins with the request, because other spans may refer to it. Below it are the
receiving of the audio and each engine that gets the request, and below an engine the phases that
its answer lists.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation import tracecontext
from prometheus_client import Counter

from serve.contract.errors import ConfigError, shown
from serve.contract.messages import Phase

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PATH = "/v1/traces"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_NS = 1_000_000_000
_SERVER_ERROR = 500
_SERVICE = "inference.GRPCInferenceService"
_RPC = {"grpc": "ModelInfer", "grpc_stream": "ModelStreamInfer"}
_HTTP_ROUTES = {"jobs": "/v1/audio/jobs", "http": "/v2/models/{name}/infer"}  # others: the path
# Statuses of gRPC that are errors of the server, by OpenTelemetry's conventions.
_RPC_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")
_CONTEXT = tracecontext.TraceContextTextMapPropagator()

LogRecord = Any
"""`serve.gateway.observe.log.LogRecord`, which has the request's span."""


class RequestSpan:
    """The span of a request, or of a part of one, and the spans below it.

    Args:
        tracer: makes spans.
        span: the parent of all others.
        began_ns: the time since which audio is received, in nanoseconds since 1970; None: an engine
            gets the request at once.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span, began_ns: int | None = None) -> None:
        self._tracer = tracer
        self._span = span
        self._received_ns = began_ns
        self._engine: trace.Span = trace.INVALID_SPAN  # of the engine that has the request
        self._engine_began_ns = 0
        self._answered_ns: int | None = None
        context = span.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id) if context.is_valid else ""
        """32 hexadecimal digits; empty if there are no traces."""
        self.recorded = span.is_recording()
        """Whether the engine's answer lists the request's phases."""

    def given(self, engine: str) -> None:
        """Note that an engine gets the request now; the engine before it has failed."""
        if not self.recorded:
            return
        now_ns = time.time_ns()
        if self._received_ns is not None:
            self._begin("receive", self._span, self._received_ns).end(now_ns)
            self._received_ns = None
        self._end_engine()
        self._engine = self._begin("engine", self._span, now_ns, {"earshot.upstream": engine})
        self._engine_began_ns = now_ns

    def answered(self, phases: Sequence[Phase]) -> None:
        """Note that the answer has come, with the request's phases if the span is recorded."""
        self._answered_ns = now_ns = time.time_ns()
        for phase in phases:
            begin_ns = min(max(self._engine_began_ns, round(phase.begin * _NS)), now_ns)
            end_ns = max(begin_ns, min(round(phase.end * _NS), now_ns))
            attributes = {"earshot.windows": phase.windows, "earshot.busy_s": phase.busy_s}
            self._begin(phase.name, self._engine, begin_ns, attributes).end(end_ns)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator["RequestSpan"]:
        """Record a part of the request, which goes to engines by itself, for a `with` block."""
        part = RequestSpan(self._tracer, self._begin(name, self._span))
        try:
            yield part
        except BaseException as error:
            part._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            part._end_engine()
            part._span.end()

    def end(self, record: LogRecord) -> None:
        """Note that the request has ended, as its record tells."""
        failed = record.http_status >= _SERVER_ERROR
        attributes = {
            "earshot.request_id": record.id,
            "earshot.model": record.model,
            "earshot.key": record.key,
            "earshot.audio_s": record.audio_s,
            "earshot.outcome": record.outcome,
        }
        if record.route in _RPC:
            import grpc  # noqa: PLC0415 - Home Assistant's bridge has this log without gRPC

            failed = record.status in _RPC_ERRORS
            code = grpc.StatusCode[record.status or "UNKNOWN"].value[0]
            attributes["rpc.grpc.status_code"] = code
        elif record.http_status:
            attributes["http.response.status_code"] = record.http_status
        if failed:
            self._span.set_status(trace.StatusCode.ERROR)
            attributes["error.type"] = record.outcome
        told = {name: value for name, value in attributes.items() if value not in ("", None)}
        self._span.set_attributes(told)
        self._end_engine()
        self._span.end()

    def _begin(
        self,
        name: str,
        parent: trace.Span,
        began_ns: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> trace.Span:
        context = trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=began_ns)

    def _end_engine(self) -> None:
        if self._answered_ns is None:
            self._engine.set_status(trace.StatusCode.ERROR)
        self._engine.end(self._answered_ns)


NO_SPAN = RequestSpan(trace.NoOpTracer(), trace.INVALID_SPAN)


class RequestTracer:
    """Makes the spans of requests.

    Args:
        provider: sends spans; None: spans record nothing.
    """

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider

    def begin(self, record: LogRecord) -> RequestSpan:
        """Begin the span of a request, below the span in its `traceparent` header.

        The request came when its record was made.
        """
        if self._provider is None:
            return NO_SPAN
        if (rpc := _RPC.get(record.route)) is not None:
            name = f"{_SERVICE}/{rpc}"
            attributes = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": rpc}
        else:
            method = "GET" if record.route == "live" else "POST"
            route = _HTTP_ROUTES.get(record.route, record.path)
            name, attributes = f"{method} {route}", {"http.request.method": method}
            attributes |= {"http.route": route, "url.path": record.path}
        carrier = {key: record.header(key) or "" for key in ("traceparent", "tracestate")}
        began_ns = time.time_ns() - round((time.monotonic() - record.began_s) * _NS)
        tracer, context = self._provider.get_tracer("earshot"), _CONTEXT.extract(carrier)
        kind = trace.SpanKind.SERVER
        span = tracer.start_span(name, context, kind, attributes, start_time=began_ns)
        return RequestSpan(tracer, span, began_ns)

    async def close(self) -> None:
        """Send the rest, within a moment."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)


def open_tracer(spans: Counter) -> RequestTracer:
    """Return the tracer that the environment names; without an endpoint it records nothing.

    Args:
        spans: counts spans, with the label `state`.

    Raises:
        ConfigError: the environment asks for another protocol, or a variable cannot be used.
    """
    environment = os.environ.get
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    is_off = any(environment(name, "").strip().lower() == value for name, value in off.items())
    endpoint, base = (environment(name, "").strip() for name in (_TRACES_ENDPOINT, _ENDPOINT))
    if is_off or not (endpoint or base):
        return RequestTracer()
    protocol = next(filter(None, map(environment, _PROTOCOLS)), _PROTOCOL)
    if protocol != _PROTOCOL:
        found = f"OTEL_EXPORTER_OTLP_PROTOCOL = {shown(protocol)}"
        advice = "set that, and the collector's endpoint of HTTP, whose port is 4318 by default"
        raise ConfigError(f"{found}, but traces are sent as {_PROTOCOL}; {advice}")
    from serve.gateway.observe.traces import open_provider  # noqa: PLC0415 - loads the SDK

    return RequestTracer(open_provider(endpoint or base.rstrip("/") + _PATH, spans))
