"""Spans of requests: none by default, and whether and where they are recorded.

The config names the collector, or OpenTelemetry's own variables do. `serve.gateway.observe.traces`
records spans and loads OpenTelemetry; a gateway without traces does not load either.
"""

import contextlib
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Counter

from serve.contract.errors import ConfigError, shown
from serve.contract.messages import Phase

_PATH = "/v1/traces"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


LogRecord = Any
"""`serve.gateway.observe.log.LogRecord`, which has the request's span."""


class RequestSpan:
    """The span of a request that is not traced."""

    trace_id = ""
    """32 hexadecimal digits; empty if there are no traces."""
    recorded = False
    """Whether the engine's answer lists the request's phases."""

    def answer_headers(self) -> Mapping[str, str]:
        """Return headers of the answer that name the trace."""
        return {}

    def given(self, engine: str) -> None:
        """Note that an engine gets the request now."""

    def answered(self, phases: Sequence[Phase]) -> None:
        """Note that the answer has come, with the request's phases."""

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator["RequestSpan"]:
        """Record a part of the request, which goes to engines by itself, for a `with` block."""
        yield self

    def end(self, record: LogRecord) -> None:
        """Note that the request has ended, as its record tells."""


NO_SPAN = RequestSpan()


class RequestTracer:
    """Makes the spans of requests; this one makes none."""

    def begin(self, record: LogRecord) -> RequestSpan:
        """Begin the span of a request, which came when its record was made."""
        return NO_SPAN

    async def close(self) -> None:
        """Send the rest, within a moment."""


def open_tracer(spans: Counter) -> RequestTracer:
    """Return the tracer that the environment names; without an endpoint it makes no spans.

    Args:
        spans: counts spans, with the label `state`.

    Raises:
        ConfigError: the environment asks for another protocol than this server has.
    """
    endpoint = _endpoint()
    if not endpoint:
        return RequestTracer()
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL = {shown(protocol)}, but traces are sent as {_PROTOCOL}; "
            "set that, and the collector's endpoint of HTTP, whose port is 4318 by default"
        )
    # It loads OpenTelemetry, which a gateway without traces does not need.
    otel = pkgutil.resolve_name("serve.gateway.observe.traces:OtelTracer")
    tracer: RequestTracer = otel(endpoint, spans)
    return tracer


def _endpoint() -> str:
    """Return the URL to which spans are posted; empty: spans are off."""
    environment = os.environ.get
    if environment("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if environment("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    if whole := environment(_OF_TRACES, "").strip():
        return whole
    base = environment(_ENDPOINT, "").strip()
    return base.rstrip("/") + _PATH if base else ""
