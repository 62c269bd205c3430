"""Spans by OpenTelemetry's SDK, sent as OTLP over HTTP from a separate thread.

A request's own span begins with the request, because other spans may refer to it. The spans below
it are written when the request ends, with the times that were noted.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation import tracecontext
from prometheus_client import Counter

from serve.contract.errors import ConfigError
from serve.contract.messages import Phase
from serve.gateway.observe.spans import LogRecord, RequestSpan, RequestTracer

CLOSE_S = 2.0  # limit of sending the last spans
_NS = 1_000_000_000
_SERVER_ERROR = 500
_SERVICE = "inference.GRPCInferenceService"
_RPC = {"grpc": "ModelInfer", "grpc_stream": "ModelStreamInfer"}
_HTTP = {
    "transcriptions": ("POST", "/v1/audio/transcriptions"),
    "translations": ("POST", "/v1/audio/translations"),
    "jobs": ("POST", "/v1/audio/jobs"),
    "http": ("POST", "/v2/models/{name}/infer"),
    "live": ("GET", "/v1/realtime"),
}
# Statuses of gRPC that are errors of the server, by OpenTelemetry's conventions.
_RPC_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")
_CONTEXT = tracecontext.TraceContextTextMapPropagator()


class _LibraryLogFilter(logging.Filter):
    """Limits each logging call of a library to one line a minute; see `LogRateLimiter`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.most = 1
        return True


class _CountingExporter(OTLPSpanExporter):
    """Counts the spans that it has sent and those that it could not send."""

    def __init__(self, endpoint: str, spans: Counter) -> None:
        super().__init__(endpoint)
        self._spans = spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        sent = result is SpanExportResult.SUCCESS
        self._spans.labels("sent" if sent else "failed").inc(len(spans))
        return result


class _CountingQueue(BatchSpanProcessor):
    """A bounded queue of ended spans before an exporter; counts each span that ends.

    A span that is counted here and neither sent nor failed is waiting, or was dropped.
    """

    def __init__(self, exporter: SpanExporter, spans: Counter) -> None:
        super().__init__(exporter)
        self._ended = spans.labels("ended")

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.inc()
        super().on_end(span)


class OtelTracer(RequestTracer):
    """Records spans and sends them to a collector.

    Args:
        endpoint: the collector's URL, with the path of traces.
        spans: counts spans, with the label `state`.

    Raises:
        ConfigError: a variable of OpenTelemetry's cannot be used.
    """

    def __init__(self, endpoint: str, spans: Counter) -> None:
        for name in (trace_exporter.__name__, "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).addFilter(_LibraryLogFilter())
        for name in ("opentelemetry.trace.span", tracecontext.__name__):
            logging.getLogger(name).setLevel(logging.ERROR)  # warnings repeat clients' headers
        try:
            self._exporter = _CountingExporter(endpoint, spans)
            queue = _CountingQueue(self._exporter, spans)
            self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(f"a variable OTEL_… cannot be used: {error}") from error
        self._provider.add_span_processor(queue)
        self._tracer = self._provider.get_tracer("earshot")

    def begin(self, record: LogRecord) -> RequestSpan:
        """Begin the span of a request, below the span in its `traceparent` header."""
        name, attributes = _named(record)
        carrier = {key: record.header(key) or "" for key in ("traceparent", "tracestate")}
        began_ns = time.time_ns() - round((time.monotonic() - record.began_s) * _NS)
        span = self._tracer.start_span(
            name, _CONTEXT.extract(carrier), trace.SpanKind.SERVER, attributes, start_time=began_ns
        )
        return _RecordedSpan(self._tracer, span, began_ns)

    async def close(self) -> None:
        """Send the rest; spans that are not sent within `CLOSE_S` are lost."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name="spans", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await ended.wait()
        except TimeoutError:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _resource() -> Resource:
    """Return the resource of the environment; its service is by default earshot."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "earshot"}))
    return resource


def _named(record: LogRecord) -> tuple[str, dict[str, str]]:
    """Return the name and the attributes with which a request's span begins."""
    if (method := _RPC.get(record.route)) is not None:
        attributes = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method}
        return f"{_SERVICE}/{method}", attributes
    method, route = _HTTP.get(record.route, ("POST", record.path))
    attributes = {"http.request.method": method, "http.route": route, "url.path": record.path}
    return f"{method} {route}", attributes


class _RecordedSpan(RequestSpan):
    """The span of a request, or of a part of one.

    Args:
        tracer: makes spans.
        span: the parent of all others.
        began_ns: when it began, in nanoseconds since 1970.
        receives: whether audio is received before an engine gets the request.
    """

    def __init__(
        self, tracer: trace.Tracer, span: trace.Span, began_ns: int, receives: bool = True
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._began_ns = began_ns
        self._receives = receives
        self._given: list[tuple[int, str]] = []
        self._answered_ns: int | None = None
        self._phases: Sequence[Phase] = ()
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self.recorded = span.is_recording()

    def answer_headers(self) -> Mapping[str, str]:
        """Return the header `traceresponse`, by the draft of W3C's Trace Context."""
        context = self._span.get_span_context()
        span_id, flags = trace.format_span_id(context.span_id), context.trace_flags
        return {"traceresponse": f"00-{self.trace_id}-{span_id}-{flags:02x}"}

    def given(self, engine: str) -> None:
        self._given.append((time.time_ns(), engine))

    def answered(self, phases: Sequence[Phase]) -> None:
        self._answered_ns = time.time_ns()
        self._phases = phases

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[RequestSpan]:
        began_ns = time.time_ns()
        context = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, context, start_time=began_ns)
        part = _RecordedSpan(self._tracer, span, began_ns, receives=False)
        try:
            yield part
        except BaseException as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            part._finish()

    def end(self, record: LogRecord) -> None:
        if not self.recorded:
            return
        failed = record.http_status >= _SERVER_ERROR
        if record.route in _RPC:
            failed = record.status in _RPC_ERRORS
            code = grpc.StatusCode[record.status or "UNKNOWN"].value[0]
            self._span.set_attribute("rpc.grpc.status_code", code)
        elif record.http_status:
            self._span.set_attribute("http.response.status_code", record.http_status)
        if failed:
            self._span.set_status(trace.StatusCode.ERROR)
            self._span.set_attribute("error.type", record.outcome)
        told = {
            "request_id": record.id,
            "model": record.model,
            "key": record.key,
            "audio_s": record.audio_s,
            "outcome": record.outcome,
        }
        for name, value in told.items():
            if value not in ("", None):
                self._span.set_attribute(f"earshot.{name}", value)
        self._finish()

    def _finish(self) -> None:
        """End the span, and write the spans below it."""
        end_ns = time.time_ns()
        if self.recorded and self._given:
            if self._receives:
                self._below(self._span, "receive", self._began_ns, self._given[0][0])
            self._write_engines(end_ns)
        self._span.end(end_ns)

    def _write_engines(self, end_ns: int) -> None:
        """Write a span for each engine that had the request; the last one may have answered."""
        ends_ns = [began_ns for began_ns, _ in self._given[1:]]
        for (began_ns, engine), next_ns in itertools.zip_longest(self._given, ends_ns):
            answered_ns = self._answered_ns if next_ns is None else None
            ended_ns = next_ns or answered_ns or end_ns
            span = self._tracer.start_span(
                "engine",
                trace.set_span_in_context(self._span),
                trace.SpanKind.INTERNAL,
                {"earshot.upstream": engine},
                start_time=began_ns,
            )
            if answered_ns is None:
                span.set_status(trace.StatusCode.ERROR)
            else:
                for phase in self._phases:
                    begin_ns = min(max(began_ns, round(phase.begin * _NS)), ended_ns)
                    phase_ns = max(begin_ns, min(round(phase.end * _NS), ended_ns))
                    told = {"earshot.windows": phase.windows, "earshot.busy_s": phase.busy_s}
                    self._below(span, phase.name, begin_ns, phase_ns, told)
            span.end(ended_ns)

    def _below(
        self,
        parent: trace.Span,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, float] | None = None,
    ) -> None:
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=begin_ns)
        span.end(end_ns)
