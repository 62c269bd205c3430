"""Whether requests are traced, and where their spans go: the config says it, or OpenTelemetry's own
variables do."""

import os

from prometheus_client import Counter

from serve.contract.errors import ConfigError, shown
from serve.contract.server_config import TracesConfig
from serve.gateway.observe.spans import RequestTracer

_PATH = "/v1/traces"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def open_traces(config: TracesConfig, spans: Counter) -> RequestTracer:
    """Open what makes the spans of requests; without an endpoint it makes none.

    Args:
        config: `[traces]`.
        spans: counts them, with the label `state`.

    Raises:
        ConfigError: the environment asks for what there is not.
    """
    endpoint = _endpoint(config)
    if not endpoint:
        return RequestTracer()
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL = {shown(protocol)}, but traces are sent as {_PROTOCOL}; "
            "set that, and the collector's endpoint of HTTP, whose port is 4318 by default"
        )
    # Loads OpenTelemetry, which a gateway without traces does not need.
    from serve.gateway.observe.traces import OtelTracer  # noqa: PLC0415

    return OtelTracer(endpoint, config, spans)


def _endpoint(config: TracesConfig) -> str:
    """Return the address to which spans are posted; empty: nowhere."""
    environment = os.environ.get
    if environment("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if config.endpoint:
        return config.endpoint.rstrip("/") + _PATH
    if environment("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    if whole := environment(_OF_TRACES, "").strip():
        return whole
    base = environment(_ENDPOINT, "").strip()
    return base.rstrip("/") + _PATH if base else ""
