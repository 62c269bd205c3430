"""What `runtime.device` names, for a server and for a process with one engine."""

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.devices import (
    CORES,
    first_of,
    names_of,
    placements,
    usable_cores,
    with_gpu_numbers,
)
from serve.contract.errors import UnavailableError


@pytest.mark.parametrize(
    ("device", "names", "first"),
    [
        ("cpu", ("cpu",), "cpu"),
        ("cpu,cpu", ("cpu-0", "cpu-1"), "cpu"),
        ("cuda", ("cuda",), "cuda"),
        ("cuda:3", ("cuda:3",), "cuda:3"),
        ("cuda:0,2", ("cuda:0", "cuda:2"), "cuda:0"),
        ("cuda:*", ("cuda:*",), "cuda"),
    ],
)
def test_names_and_the_first(device, names, first, caplog):
    assert names_of(device) == names
    assert first_of(RuntimeConfig(device=device)).device == first
    assert bool(caplog.records) == (first != device)  # it is said that the others are not used


def test_a_star_is_all_gpus_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert with_gpu_numbers(RuntimeConfig(device="cuda:*")).device == "cuda:0,1,2"
    assert with_gpu_numbers(RuntimeConfig(device="cuda:0,2")).device == "cuda:0,2"
    with pytest.raises(UnavailableError, match=r"'cuda:1,3', but this process sees 3 GPUs"):
        with_gpu_numbers(RuntimeConfig(device="cuda:1,3"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda:*", "cuda:0,1"):
        with pytest.raises(UnavailableError, match="but this process sees 0 GPUs"):
            with_gpu_numbers(RuntimeConfig(device=device))
    assert with_gpu_numbers(RuntimeConfig(device="cuda")).device == "cuda"  # the runtime checks it


@pytest.mark.parametrize(
    ("seen", "gpus"), [(None, ["0", "2"]), ("5,6,GPU-7", ["5", "GPU-7"])], ids=["all", "some"]
)
def test_an_engine_sees_its_gpu_alone(seen, gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    places = placements(RuntimeConfig(device="cuda:0,2", slots=5))
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": g} for g in gpus]
    assert {place.runtime for place in places} == {RuntimeConfig(device="cuda", slots=5)}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two sockets of two cores with two threads each, numbered as Linux does, and no quota."""
    monkeypatch.setattr("serve.contract.devices.os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("serve.contract.devices.TOPOLOGY", tmp_path)
    files = (tmp_path / "cpu.max",), (tmp_path / "quota", tmp_path / "period")
    monkeypatch.setattr("serve.contract.devices.QUOTAS", files)
    for core in range(8):
        folder = tmp_path / f"cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 2 % 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("engines", "cores"),
    [
        (2, ["0,4,1,5", "2,6,3,7"]),
        (3, ["0,4", "1,5,2", "6,3,7"]),
        (4, ["0,4", "1,5", "2,6", "3,7"]),
        (9, [""] * 9),
    ],
)
def test_engines_on_the_processor_share_its_cores(machine, engines, cores):
    places = placements(RuntimeConfig(device=",".join(["cpu"] * engines)))
    assert [place.environment for place in places] == [{CORES: own} for own in cores]
    threads = [place.runtime.threads for place in places]
    assert threads == [8 // engines or 1] * engines
    (place,) = placements(RuntimeConfig(device="cuda:1"))
    assert (place.runtime.device, place.environment) == ("cuda:1", {})


def test_without_a_topology_cores_are_taken_by_number(machine, monkeypatch):
    monkeypatch.setattr("serve.contract.devices.TOPOLOGY", machine / "none")
    places = placements(RuntimeConfig(device="cpu,cpu", threads=3))
    assert [place.environment[CORES] for place in places] == ["0,1,2,3", "4,5,6,7"]
    assert {place.runtime.threads for place in places} == {3}


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("9", 8)]
)
def test_a_containers_quota_counts(machine, quota, cores):
    (machine / "cpu.max").write_text(quota + "\n")
    assert usable_cores() == cores
    places = placements(RuntimeConfig(device="cpu,cpu"))
    assert [place.runtime.threads for place in places] == [max(1, cores // 2)] * 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2)])
def test_a_quota_of_the_first_version_of_cgroups_counts(machine, quota, cores):
    (machine / "quota").write_text(quota + "\n")
    (machine / "period").write_text("100000\n")
    assert usable_cores() == cores
