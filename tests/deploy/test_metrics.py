"""Rules, dashboard and autoscaling name metrics and labels that a running server has."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.manifests import expressions, labels_of, recorded
from tests.serving import CLIP, metrics_page

# What Prometheus and its operator add to each sample.
ADDED = {"namespace", "pod", "instance"}


@pytest.fixture(scope="module")
def page(server, client):
    """Names and labels of the samples on the page of a server that has answered."""
    client.transcribe(CLIP)
    families = list(text_string_to_metric_families(metrics_page(server)))
    names, labels = set(), set(ADDED)
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
        for sample in family.samples:
            labels |= sample.labels.keys()
    # Of histograms and counters that a request of this kind leaves empty.
    return names, labels | {"le", "reason", "language"}


@pytest.mark.parametrize("where, expression", list(expressions()))
def test_expressions_name_what_there_is(page, where, expression):
    names, labels = page
    used = set(re.findall(r"\bearshot[\w:]+", expression))
    assert used, where
    assert used <= names | recorded()
    assert labels_of(expression) <= labels
