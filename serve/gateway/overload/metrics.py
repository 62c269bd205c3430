"""What the page of metrics tells of latency targets."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.overload.target import Targets

_PREFIX = "earshot_gateway_target"


class TargetMetrics(Collector):
    """Reads the targets when the page is asked for.

    Args:
        targets: at least one.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with all models."""
        states = {name: target.state() for name, target in self._targets.models.items()}
        seconds = GaugeMetricFamily(
            f"{_PREFIX}_seconds", "Within which 99 of 100 requests are to be answered"
        )
        seconds.add_metric((), self._targets.target_s)
        yield seconds
        for name, text, read in (
            ("forecast_seconds", "In which 30 s of audio would be answered now", "forecast_s"),
            ("rate", "Audio, in whole windows, that is decoded in a second", "rate"),
        ):
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("model",))
            for model, state in states.items():
                gauge.add_metric((model,), getattr(state, read))
            yield gauge
