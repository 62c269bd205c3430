"""Metrics for Prometheus, computed from a transcriber's `Stats`."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Literal, get_args

from serve.transcriber.request_tracker import Outcome, Stats

MetricFamily = Any
"""The class `triton_python_backend_utils.MetricFamily`, or a stand-in."""

INTERVAL_S = 1.0  # between two updates
_JOIN_S = 10.0


@dataclasses.dataclass(frozen=True)
class EngineMetric:
    """A metric and the fields of `Stats` that it exports."""

    name: str  # after `earshot_`
    kind: Literal["counter", "gauge"]
    description: str
    fields: tuple[str, ...]  # several fields get the label `outcome`


_OUTCOMES = "Requests by outcome, including the warm-up; rejected: not accepted"
FAMILIES = (
    EngineMetric("requests_total", "counter", _OUTCOMES, (*get_args(Outcome), "rejected")),
    EngineMetric("accepted_total", "counter", "Requests accepted", ("accepted",)),
    EngineMetric("windows_total", "counter", "Windows decoded, without retries", ("windows",)),
    EngineMetric(
        "retries_total", "counter", "Windows decoded again at a higher temperature", ("retries",)
    ),
    EngineMetric("loops_total", "counter", "Windows ended early for repetition", ("loops",)),
    EngineMetric("tokens_total", "counter", "Tokens sampled", ("tokens",)),
    EngineMetric("drafted_tokens_total", "counter", "Draft tokens proposed", ("drafted",)),
    EngineMetric("drafted_right_total", "counter", "Draft tokens accepted", ("drafted_right",)),
    EngineMetric("audio_seconds_total", "counter", "Audio transcribed, unpadded", ("audio_s",)),
    EngineMetric("untold_seconds_total", "counter", "Speech without text", ("untold_s",)),
    EngineMetric("busy_seconds_total", "counter", "Time with a request pending", ("busy_s",)),
    EngineMetric("encode_seconds_total", "counter", "Time spent encoding", ("encode_s",)),
    EngineMetric("decode_seconds_total", "counter", "Time spent decoding", ("decode_s",)),
    EngineMetric("pending_requests", "gauge", "Requests accepted and not answered", ("pending",)),
    EngineMetric("queue_depth", "gauge", "Requests accepted and not started", ("queued",)),
    EngineMetric("busy_slots", "gauge", "Windows decoding now", ("busy_slots",)),
    EngineMetric("batch_size", "gauge", "Mean windows in a decoder step", ("mean_batch",)),
    EngineMetric("rtfx", "gauge", "Seconds of audio transcribed per busy second", ("rtfx",)),
)


class Publisher:
    """A thread that copies statistics into Triton's metrics once a second.

    Args:
        stats: returns the current statistics.
        metric_family: Triton's class of metrics.
        engine_labels: the labels of `engine_info`, a metric that is always 1.
        slots: the maximum number of windows that decode concurrently.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        metric_family: MetricFamily,
        engine_labels: dict[str, str],
        slots: int,
    ) -> None:
        kinds = {"counter": metric_family.COUNTER, "gauge": metric_family.GAUGE}
        self._stats = stats
        self._families = []
        self._metrics = []
        self._constants = []
        for metric in FAMILIES:
            family = metric_family(f"earshot_{metric.name}", metric.description, kinds[metric.kind])
            self._families.append(family)
            for field in metric.fields:
                labels = {"outcome": field} if len(metric.fields) > 1 else {}
                self._metrics.append((family.Metric(labels=labels), metric.kind, field))
        for name, description, value, labels in (
            ("engine_info", "1; the labels have the engine's features", 1, engine_labels),
            ("slots", "Maximum number of windows that decode concurrently", slots, {}),
        ):
            family = metric_family(f"earshot_{name}", description, metric_family.GAUGE)
            self._families.append(family)
            self._constants.append(family.Metric(labels=labels))
            self._constants[-1].set(value)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="earshot-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and delete the metrics before their families, as Triton requires."""
        self._stopped.set()
        self._thread.join(timeout=_JOIN_S)
        self._metrics.clear()
        self._constants.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            stats = self._stats()
            for metric, kind, field in self._metrics:
                value = getattr(stats, field)
                if kind == "gauge":
                    metric.set(value)
                else:  # a counter takes increments only
                    metric.increment(max(0.0, value - metric.value()))
