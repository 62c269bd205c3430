"""What the server publishes for Prometheus, computed from a transcriber's `Stats`."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Literal

from serve.transcriber.stats import Stats

Kind = Literal["counter", "gauge"]
MetricFamily = Any
"""Triton's class of that name, `triton_python_backend_utils.MetricFamily`, or a stand-in."""

_INTERVAL_S = 1.0  # between two looks at the statistics
_JOIN_S = 10.0


@dataclasses.dataclass(frozen=True)
class Series:
    """One value of one metric."""

    value: Callable[[Stats], float]
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """A metric and its values; one for each set of labels."""

    name: str
    kind: Kind
    description: str
    series: tuple[Series, ...]


def _counter(name: str, description: str, value: Callable[[Stats], float]) -> Family:
    return Family(f"earshot_{name}", "counter", description, (Series(value),))


def _gauge(name: str, description: str, value: Callable[[Stats], float]) -> Family:
    return Family(f"earshot_{name}", "gauge", description, (Series(value),))


FAMILIES = (
    Family(
        "earshot_requests_total",
        "counter",
        "Requests by how they ended, the warm-up included; rejected = refused at once",
        (
            Series(lambda stats: stats.ok, {"outcome": "ok"}),
            Series(lambda stats: stats.failed, {"outcome": "failed"}),
            Series(lambda stats: stats.cancelled, {"outcome": "cancelled"}),
            Series(lambda stats: stats.timed_out, {"outcome": "timed_out"}),
            Series(lambda stats: stats.rejected, {"outcome": "rejected"}),
        ),
    ),
    _counter("accepted_total", "Requests taken in", lambda stats: stats.accepted),
    _counter("windows_total", "Windows decoded, first tries", lambda stats: stats.windows),
    _counter(
        "retries_total",
        "Windows decoded again at a higher temperature",
        lambda stats: stats.retries,
    ),
    _counter("tokens_total", "Tokens sampled", lambda stats: stats.tokens),
    _counter("audio_seconds_total", "Audio answered, unpadded", lambda stats: stats.audio_s),
    _counter("busy_seconds_total", "Time with a request pending", lambda stats: stats.busy_s),
    _counter("encode_seconds_total", "Time spent encoding", lambda stats: stats.encode_s),
    _counter("decode_seconds_total", "Time spent decoding", lambda stats: stats.decode_s),
    _gauge("pending_requests", "Requests not yet ended", lambda stats: stats.pending),
    _gauge("queue_depth", "Requests not yet started", lambda stats: stats.queued),
    _gauge("busy_slots", "Windows decoding now", lambda stats: stats.busy_slots),
    _gauge("batch_size", "Mean windows in a decoder step", lambda stats: stats.mean_batch),
    _gauge("rtfx", "Seconds of audio answered for each busy second", lambda stats: stats.rtfx),
)


class Publisher:
    """Copies statistics into Triton's metrics once a second.

    Args:
        stats: gives the numbers of this moment.
        metric_family: makes the metrics.
    """

    def __init__(self, stats: Callable[[], Stats], metric_family: MetricFamily) -> None:
        kinds = {"counter": metric_family.COUNTER, "gauge": metric_family.GAUGE}
        self._stats = stats
        self._families = [
            metric_family(name=family.name, description=family.description, kind=kinds[family.kind])
            for family in FAMILIES
        ]
        self._metrics = [
            (made.Metric(labels=series.labels), family.kind, series.value)
            for made, family in zip(self._families, FAMILIES, strict=True)
            for series in family.series
        ]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the metrics go before their families, as Triton demands."""
        self._stopped.set()
        self._thread.join(timeout=_JOIN_S)
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._publish()

    def _publish(self) -> None:
        stats = self._stats()
        for metric, kind, value in self._metrics:
            if kind == "gauge":
                metric.set(value(stats))
            else:  # a counter only takes what came on top
                metric.increment(max(0.0, value(stats) - metric.value()))
