"""What Prometheus is told, and how Triton's metrics follow the statistics."""

import dataclasses
import threading

import pytest

from serve.triton import metrics
from serve.triton.metrics import FAMILIES, Publisher
from tests import fake_triton
from tests.serving import STATS
from tests.waits import WAIT_S, wait_until

EXPECTED = {
    (family.name, field if len(family.fields) > 1 else None): getattr(STATS, field)
    for family in FAMILIES
    for field in family.fields
} | {("slots", None): 8, ("engine_info", None): 1}
LABELS = {"languages": "en,es", "words": "false"}
FACTS = ["earshot_engine_info", "earshot_slots"]


class Families(fake_triton.MetricFamily):
    """Remembers families and metrics without keeping them alive longer than the publisher does."""

    def __init__(self, name, description, kind):
        super().__init__(name, description, kind)
        self.seen.append((name, kind))

    def Metric(self, labels):
        metric = super().Metric(labels)
        self.values[(self.name.removeprefix("earshot_"), labels.get("outcome"))] = metric.value
        self.labels[self.name] = labels
        return metric

    def __del__(self):
        self.order.append((self.name, self.living))


@pytest.fixture
def families():
    return type("Families", (Families,), {"seen": [], "values": {}, "labels": {}, "order": []})


@pytest.fixture
def publish(families, monkeypatch):
    """Start a publisher that looks all the time."""
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.001)
    started = []

    def start(stats):
        started.append(Publisher(stats, families, LABELS, 8))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close()


def read(families):
    return {key: value() for key, value in families.values.items()}


def test_every_number_reaches_the_metric_that_is_named_for_it(publish, families):
    publish(lambda: STATS)
    wait_until(lambda: read(families) == EXPECTED, "never published")


def test_names_follow_prometheus_and_say_whether_they_count():
    for family in FAMILIES:
        assert family.description and not family.name.startswith("earshot_")
        assert (family.kind == "counter") == family.name.endswith("_total")
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_triton_is_told_which_kind_each_family_is(publish, families):
    publish(lambda: STATS)
    kinds = {"counter": families.COUNTER, "gauge": families.GAUGE}
    expected = [(f"earshot_{one.name}", kinds[one.kind]) for one in FAMILIES]
    assert families.seen == expected + [(name, families.GAUGE) for name in FACTS]


def test_what_the_engine_can_do_stands_in_labels(publish, families):
    publish(lambda: STATS)
    assert families.labels["earshot_engine_info"] == LABELS


def test_counters_never_fall_and_gauges_do(publish, families):
    now = [STATS]
    publish(lambda: now[0])
    wait_until(lambda: read(families) == EXPECTED, "never published")
    more = STATS.ok + 1
    now[0] = dataclasses.replace(STATS, tokens=1, ok=more, busy_slots=0)
    expected = {**EXPECTED, ("requests_total", "ok"): more, ("busy_slots", None): 0}
    wait_until(lambda: read(families) == expected, "no second look")


def test_metrics_go_before_their_families(publish, families):
    publisher = publish(lambda: STATS)
    wait_until(lambda: read(families) == EXPECTED, "never published")
    families.values.clear()  # these hold the metrics
    publisher.close()
    names = [f"earshot_{family.name}" for family in FAMILIES]
    assert dict(families.order) == dict.fromkeys([*names, *FACTS], 0)


def test_nothing_is_published_after_the_end(publish):
    looked = threading.Event()

    def stats():
        looked.set()
        return STATS

    publisher = publish(stats)
    assert looked.wait(WAIT_S)
    publisher.close()
    assert "earshot-metrics" not in {thread.name for thread in threading.enumerate()}
