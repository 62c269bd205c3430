"""What `runtime.device` names, for a server and for a process with one engine."""

import pytest
import torch

from serve.contract.config import RuntimeConfig
from serve.contract.devices import counted, first_of, names_of, places_of
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
    assert counted(RuntimeConfig(device="cuda:*")).device == "cuda:0,1,2"
    assert counted(RuntimeConfig(device="cuda:0,2")).device == "cuda:0,2"
    with pytest.raises(UnavailableError, match=r"'cuda:1,3', but 3 GPUs can be seen"):
        counted(RuntimeConfig(device="cuda:1,3"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda:*", "cuda:0,1"):
        with pytest.raises(UnavailableError, match="but 0 GPUs can be seen"):
            counted(RuntimeConfig(device=device))
    assert counted(RuntimeConfig(device="cuda")).device == "cuda"  # the runtime says it better


@pytest.mark.parametrize(
    ("seen", "gpus"), [(None, ["0", "2"]), ("5,6,GPU-7", ["5", "GPU-7"])], ids=["all", "some"]
)
def test_an_engine_sees_its_gpu_alone(seen, gpus, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    places = places_of(RuntimeConfig(device="cuda:0,2", slots=5))
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": g} for g in gpus]
    assert {place.runtime for place in places} == {RuntimeConfig(device="cuda", slots=5)}


def test_engines_on_the_processor_share_its_cores(monkeypatch):
    monkeypatch.setattr("serve.contract.devices.os.cpu_count", lambda: 5)
    assert [place.runtime.threads for place in places_of(RuntimeConfig(device="cpu,cpu"))] == [2, 2]
    (place,) = places_of(RuntimeConfig(device="cuda:1"))
    assert (place.runtime.device, place.environment) == ("cuda:1", {})
