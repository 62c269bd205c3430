"""Counters of the shadow monitor."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from serve.gateway.shadow import figures
from serve.gateway.shadow.figures import Comparison

ALL = "all"
"""Label of what counts for all languages together."""


class ShadowMetrics:
    """The monitor's part of the page; what nothing was found of is not on it.

    Args:
        registry: where.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"earshot_shadow_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"earshot_shadow_{name}", text, labels, registry=registry)

        self.sampled = counter("sampled", "Answered requests that were taken as samples")
        self.dropped = counter("dropped", "Samples that went uncompared, for want of room")
        self.failed = counter("failed", "Samples that the reference has not answered")
        self.yielded = counter("yielded", "Samples put back, for a client's request had come")
        self.compared = counter("compared", "Samples that were compared", "language")
        self.pending_bytes = gauge("pending_bytes", "Bytes of samples that wait")
        self.pending = gauge("pending_requests", "Samples that wait")
        self._cer = gauge("cer", "CER of served against reference, of the last 1000", "language")
        self._low = gauge("cer_low", "Lower end of its interval of 95 %", "language")
        self._high = gauge("cer_high", "Upper end of its interval of 95 %", "language")
        self.drift = gauge("drift", "How far gaps of log-probabilities have risen: a CUSUM")
        bound = gauge("drift_bound", "Beyond it the served engine has drifted")
        bound.set(figures.BOUND)

    def tell_cer(self, comparisons: Sequence[Comparison], language: str) -> None:
        """Tell the rate of these, which are all of a language."""
        if rate := figures.pooled_cer(comparisons):
            self._cer.labels(language).set(rate.value)
            self._low.labels(language).set(rate.low)
            self._high.labels(language).set(rate.high)
