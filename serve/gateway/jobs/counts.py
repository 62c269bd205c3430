"""Metrics of jobs."""

from collections.abc import Sized

from prometheus_client import CollectorRegistry, Counter, Gauge


class Counts:
    """Counters of a process's jobs, and what is in the table of all.

    Args:
        registry: where.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open_jobs = 0
        """Jobs without an end, when the table was last looked at."""
        gauge = Gauge(
            "earshot_jobs_open", "Jobs without an end, of all processes", registry=registry
        )
        gauge.set_function(lambda: self.open_jobs)
        self._running = Gauge("earshot_jobs_running", "Jobs that are worked on", registry=registry)
        self._ended = Counter(
            "earshot_jobs_ended", "Jobs by how they ended", ("status",), registry=registry
        )
        self.webhooks = Counter(
            "earshot_jobs_webhook_tries",
            "Webhooks sent: delivered, failed and to be tried again, or given up",
            ("outcome",),
            registry=registry,
        )

    def watch(self, running: Sized) -> None:
        """Tell how many of these there are."""
        self._running.set_function(running.__len__)

    def ended(self, status: str) -> None:
        """Count a job that has ended here."""
        self._ended.labels(status).inc()
