"""The gateway's metrics for Prometheus, except the gauges of `serve.gateway.observe.pages`."""

from collections.abc import Sized
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.gateway.shadow.figures import ShadowMetrics

_WORD_BUCKETS_S = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class LiveMetrics:
    """Metrics of live text.

    Args:
        registry: the registry that they are added to.
        streams: the open streams.
    """

    def __init__(self, registry: CollectorRegistry, streams: Sized) -> None:
        options: Any = {"namespace": "earshot_live", "registry": registry}
        Gauge("streams", "Live streams", **options).set_function(lambda: len(streams))
        self.updates = Counter("updates", "Decodings of live audio", ("outcome",), **options)
        text = "From the arrival of a word's last sample to its final text"
        self.word_seconds = Histogram("word_seconds", text, buckets=_WORD_BUCKETS_S, **options)
        text = "Words of a hypothesis that the next one did not have; none had been sent"
        self.changed = Counter("changed_words", text, **options)


class UpstreamMetrics:
    """Metrics of the engines, by device.

    Args:
        registry: the registry that they are added to.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        options: Any = {"namespace": "earshot_gateway_upstream", "registry": registry}
        text = "Requests given to a server by how it ended them, as a gRPC status"
        self.requests = Counter("requests", text, ("upstream", "status"), **options)
        text = "Requests that a server has"
        self.inflight = Gauge("inflight_requests", text, ("upstream",), **options)
        text = "Whether a server is given requests for a model"
        self.takes = Gauge("takes_requests", text, ("upstream", "model"), **options)


class Metrics:
    """All metrics of a gateway's process.

    Args:
        streams: the open live streams.
    """

    def __init__(self, streams: Sized) -> None:
        self.registry = CollectorRegistry()
        self.live = LiveMetrics(self.registry, streams)
        self.upstreams = UpstreamMetrics(self.registry)
        self.shadow = ShadowMetrics(self.registry)
        options: Any = {"namespace": "earshot_gateway", "registry": self.registry}
        text = "Requests for transcripts by how the gateway answered, as a gRPC status"
        self.requests = Counter("requests", text, ("route", "status", "key"), **options)
        text = "Seconds of audio of requests that were answered, and of live streams as they come"
        self.audio_s = Counter("audio_seconds", text, ("route", "key"), **options)
        text = "Requests for transcripts that were not answered, by reason"
        self.refused = Counter("refused", text, ("reason",), **options)
        text = "Spans that have ended, were sent, could not be sent; the rest waits or is dropped"
        self.spans = Counter("spans", text, ("state",), **options)
        options_s = {**options, "labelnames": ("route",), "buckets": _BUCKETS_S}
        text = "From a request's arrival to its last answer or its client's going"
        self.seconds = Histogram("request_seconds", text, **options_s)
        text = "From a streamed request's arrival to its first text"
        self.first_delta_s = Histogram("first_delta_seconds", text, **options_s)

    def page(self) -> bytes:
        """Write the gateway's part of the page."""
        return generate_latest(self.registry)
