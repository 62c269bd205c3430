"""The manifests: sound by Kubernetes's own schemas, and true of the server that they run."""

import re
import shutil
import subprocess
import tempfile
import tomllib

import kubernetes_validate
import pytest
import yaml

from deploy.images import earshot
from serve.contract.config import load_config
from serve.contract.server_config import ServerConfig
from serve.gateway.engines import GRACE_S
from serve.supervisor import gateway as supervised
from serve.supervisor import server
from serve.wire import folder
from tests.deploy.dockerfiles import ROOT, all_of
from tests.deploy.manifests import BASE, KUBERNETES, bytes_of, documents, objects, pod, the
from tests.deploy.test_images import NATIVE

# Of operators: Kubernetes itself has no schemas for them.
OF_OPERATORS = {"PodMonitor", "PrometheusRule", "ScaledObject"}
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
MIB = 2**20
PRODUCTS = {
    name
    for path in KUBERNETES.rglob("*.yaml")
    for name in re.findall(r"configs/[\w-]+\.toml", path.read_text(encoding="utf-8"))
}


def check(one):
    if one["kind"] not in OF_OPERATORS:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    "one", [pytest.param(one, id=f"{one['kind']}-{path.name}") for path, one in objects()]
)
def test_manifests_are_what_kubernetes_takes(one):
    check(one)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_what_kubernetes_takes(overlay):
    found = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    made = list(yaml.safe_load_all(found.stdout))
    for one in made:
        check(one)
        assert one["metadata"]["namespace"] == "earshot"
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        variables = {one["name"]: one["value"] for one in container["env"]}
        config = load_config(ROOT / variables["CONFIG"])
        assert variables["SETTINGS"] == "/etc/earshot/settings.toml"
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        on_gpu = config.runtime.device.startswith("cuda") and container["name"] == "earshot"
        assert gpus == str(int(on_gpu)), container["name"]


# ---------------------------------------------------------------- true of the server


@pytest.fixture(scope="module", params=sorted(PRODUCTS))
def config(request, tmp_path_factory):
    """Each product's that an overlay runs, with the deployment's settings over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("config")))
        return load_config(earshot.write_config(ROOT / request.param, str(BASE / "settings.toml")))


def container():
    (found,) = pod()["containers"]
    return found


def seconds(probe):
    return probe["periodSeconds"] * probe["failureThreshold"]


def test_others_reach_it_and_need_a_key(config):
    assert not config.server.on_loopback and not config.server.open
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    folder_name, _, _ = config.server.keys_file.rpartition("/")
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert "secret" in volumes[mounts[folder_name]]


def test_ports_are_the_servers(config):
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {
        name: getattr(config.server, f"{name}_port") for name in ("http", "grpc", "metrics")
    }
    named = [
        port["port"] for rule in the("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
    ]
    assert set(named) == set(ports)
    for service in ("earshot", "earshot-pods"):
        for port in the("Service", service)["spec"]["ports"]:
            assert (port["targetPort"], port["port"]) == (port["name"], ports[port["name"]])


def test_who_is_stopped_answers_all_that_it_has_accepted(config):
    longest_s = config.transcriber.request_timeout_s + GRACE_S
    drain_s = config.server.drain_timeout_s
    assert drain_s > longest_s
    wait, text = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert wait == "sleep"
    stop_s = supervised._GRACE_S + server._STOP_S
    assert pod()["terminationGracePeriodSeconds"] >= int(text) + drain_s + stop_s


def test_probes_are_as_patient_as_the_supervisor(config):
    found = container()
    assert seconds(found["startupProbe"]) > config.server.start_timeout_s
    assert seconds(found["livenessProbe"]) > config.server.stall_timeout_s
    assert seconds(found["readinessProbe"]) < config.server.stall_timeout_s


def test_what_is_written_to_is_a_volume(config):
    found = container()
    assert found["securityContext"]["readOnlyRootFilesystem"]
    writable = {m["mountPath"] for m in found["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/tmp", str(folder.SHARED_MEMORY), "/earshot/cache"}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    needed = (config.server.max_inflight_mb + server._REGIONS_MIB) * MIB
    assert bytes_of(volumes["shm"]["emptyDir"]["sizeLimit"]) > needed
    assert bytes_of(volumes["tmp"]["emptyDir"]["sizeLimit"]) > config.server.max_inflight_mb * MIB


def test_it_runs_as_the_images_user_without_rights():
    (user,) = all_of(NATIVE, "USER")
    context = pod()["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsNonRoot"] and not pod()["automountServiceAccountToken"]
    for one in (*pod()["initContainers"], *pod()["containers"]):
        confined = one["securityContext"]
        assert not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}


def test_selectors_find_the_pods():
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert the("PodMonitor")["spec"]["selector"]["matchLabels"] == labels
    for name in ("earshot", "earshot-pods"):
        assert the("Service", name)["spec"]["selector"] == labels


def test_settings_are_keys_that_the_server_has():
    settings = tomllib.loads((BASE / "settings.toml").read_text(encoding="utf-8"))
    assert settings.keys() == {"server"}
    ServerConfig(**settings["server"])


def test_the_autoscalers_say_the_same():
    keda, hpa = the("ScaledObject")["spec"], the("HorizontalPodAutoscaler")["spec"]
    assert keda["scaleTargetRef"]["name"] == hpa["scaleTargetRef"]["name"] == "earshot"
    limits = (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert limits == (hpa["minReplicas"], hpa["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    queue, windows = hpa["metrics"]
    queue_s, windows_per_s = (float(t["metadata"]["threshold"]) for t in keda["triggers"])
    (adapter,) = documents(KUBERNETES / "components" / "hpa" / "adapter.yaml")
    for metric, trigger, rule in zip(
        (queue, windows), keda["triggers"], adapter["rules"]["external"], strict=True
    ):
        found = metric["external"]
        assert found["target"]["type"] == trigger["metricType"]
        assert found["metric"]["name"] == rule["name"]["as"]
        assert rule["seriesQuery"] in trigger["metadata"]["query"]
    assert queue["external"]["target"]["value"] == f"{1000 * queue_s:.0f}m"
    assert windows["external"]["target"]["averageValue"] == f"{windows_per_s:g}"


def test_every_file_is_part_of_something():
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (made,) = documents(path)
        named = {
            *made.get("resources", ()),
            *(one["path"] for one in made.get("patches", ()) if "path" in one),
        }
        for generator in made.get("configMapGenerator", ()):
            named |= {name.rpartition("=")[2] for name in generator["files"]}
        others = {"kustomization.yaml", "adapter.yaml"}  # the latter is for a chart
        here = {one.name for one in path.parent.iterdir()} - others
        assert here <= named, path
