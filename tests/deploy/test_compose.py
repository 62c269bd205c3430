"""The compose files: the same server as the manifests', and files that exist."""

import pytest

from serve.contract.config import load_config
from tests.deploy.dockerfiles import ROOT, environment
from tests.deploy.manifests import COMPOSE, bytes_of, documents, pod
from tests.deploy.test_images import NATIVE

(FILE,) = documents(COMPOSE / "compose.yaml")
(GPU,) = documents(COMPOSE / "turbo.yaml")
SERVICES = FILE["services"]


def test_what_is_mounted_exists():
    paths = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert paths and all((COMPOSE / path).exists() for path in paths)
    context = SERVICES["earshot"]["build"]
    assert (COMPOSE / context["context"]).resolve() == ROOT
    assert (ROOT / context["dockerfile"]) == NATIVE


@pytest.mark.parametrize("services", [SERVICES, GPU["services"]], ids=["cpu", "gpu"])
def test_a_gpu_is_asked_for_where_the_config_needs_one(services):
    service = services["earshot"]
    config = load_config(ROOT / service["environment"]["CONFIG"])
    assert config.runtime.device.startswith("cuda") == ("deploy" in service)


def test_the_server_is_that_of_the_manifests():
    (container,) = pod()["containers"]
    service, volumes = SERVICES["earshot"], {volume["name"]: volume for volume in pod()["volumes"]}
    (init,) = pod()["initContainers"]
    engine, server = " ".join(init["args"]), " ".join(container["args"])
    assert service["command"] == ["sh", "-c", f"{engine} && exec {server}"]
    ports = [int(port.rpartition(":")[2]) for port in service["ports"]]
    assert ports == [port["containerPort"] for port in container["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    size = volumes["shm"]["emptyDir"]["sizeLimit"]
    assert bytes_of(service["shm_size"]) == bytes_of(size)
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    ours = {
        volume.split(":")[1].removesuffix("/settings.toml") for volume in service["volumes"]
    } | {secret["target"].removesuffix("/keys.toml") for secret in service["secrets"]}
    theirs = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert ours == theirs - {"/tmp", "/dev/shm"}
    # Without a preStop, for nothing sends requests elsewhere.
    assert int(service["stop_grace_period"].removesuffix("s")) > 640
    assert environment(NATIVE)["HF_HOME"].startswith("/earshot/engines/")
