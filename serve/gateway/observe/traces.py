"""The sending of spans: OTLP over HTTP by OpenTelemetry's SDK, from a separate thread."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation import tracecontext
from prometheus_client import Counter

from serve.contract.errors import ConfigError

CLOSE_S = 2.0  # limit of sending the last spans


class _CountingExporter(OTLPSpanExporter):
    """Counts the spans that were sent and the spans that could not be sent."""

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

    def __init__(self, endpoint: str, spans: Counter) -> None:
        super().__init__(_CountingExporter(endpoint, spans))
        self._ended = spans.labels("ended")

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.inc()
        super().on_end(span)

    def shutdown(self) -> None:
        """Send the rest; spans that are not sent within `CLOSE_S` are lost."""
        self._batch_processor.shutdown(round(CLOSE_S * 1000))


def _limit_lines(record: logging.LogRecord) -> bool:
    """Limit each logging call of a library to one line a minute; see `LogRateLimiter`."""
    record.max_lines = 1
    return True


def open_provider(endpoint: str, spans: Counter) -> TracerProvider:
    """Return a provider of spans, which it sends to a collector.

    Args:
        endpoint: the collector's URL, with the path of traces.
        spans: counts spans, with the label `state`.

    Raises:
        ConfigError: a variable of OpenTelemetry's cannot be used.
    """
    for name in (trace_exporter.__name__, "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).addFilter(_limit_lines)
    for name in ("opentelemetry.trace.span", tracecontext.__name__):
        logging.getLogger(name).setLevel(logging.ERROR)  # warnings repeat clients' headers
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "earshot"}))
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(_CountingQueue(endpoint, spans))
    except ValueError as error:
        raise ConfigError(f"a variable OTEL_… cannot be used: {error}") from error
    return provider
