"""Everything in deploy/ that is YAML or JSON, read once."""

import json
import re

import yaml

from tests.deploy.dockerfiles import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose"
BASE = KUBERNETES / "base"


def documents(path):
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def objects():
    """(path, object) of every whole Kubernetes object; not patches, nor what kustomize reads."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        resources = path.with_name("kustomization.yaml")
        named = documents(resources)[0].get("resources", ()) if resources.exists() else ()
        if path.name in named:
            yield from ((path, one) for one in documents(path))


def the(kind, name="earshot"):
    """The only object of a kind and a name."""
    (found,) = [
        one for _, one in objects() if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return found


def pod():
    return the("Deployment")["spec"]["template"]["spec"]


def expressions():
    """Every PromQL expression of deploy/, with where it stands."""
    for group in the("PrometheusRule")["spec"]["groups"]:
        yield from (
            (rule.get("record", rule.get("alert")), rule["expr"]) for rule in group["rules"]
        )
    dashboard = KUBERNETES / "components" / "monitoring" / "dashboard.json"
    for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    (adapter,) = documents(KUBERNETES / "components" / "hpa" / "adapter.yaml")
    for rule in adapter["rules"]["external"]:
        yield rule["name"]["as"], rule["seriesQuery"]
    for _, one in objects():
        if one["kind"] == "ScaledObject":
            yield from (
                (trigger["name"], trigger["metadata"]["query"])
                for trigger in one["spec"]["triggers"]
            )


def recorded():
    """Names of the metrics that the rules record."""
    return {
        rule["record"]
        for group in the("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
        if "record" in rule
    }


def labels_of(expression):
    """Labels that an expression selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    return {*selected, *(name.strip() for text in grouped for name in text.split(","))}


def bytes_of(size):
    """Of a size as Kubernetes or Docker writes it."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi|m|g)", size).groups()
    return int(number) * 2 ** {"m": 20, "g": 30}[unit[0].lower()]
