"""The plan of a GPU's memory, on a GPU of made-up size."""

import dataclasses

import pytest
import torch

from serve.config import RuntimeConfig
from serve.engine import Dims
from serve.errors import UnavailableError
from serve.native.memory import plan_memory

GIB = 2**30
DIMS = Dims(80, 1500, 1280, 20, 4, 5120, 51866, 448, 1280, 20, 4, 5120)
CONFIG = RuntimeConfig(device="cuda", slots=100, encoder_batch=8, memory_share=0.5)


@dataclasses.dataclass
class Network:
    """What a plan asks of a network."""

    dims: Dims = DIMS
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cuda"))

    def slot_bytes(self, cross_kv):
        return {"full": 32 * 2**20, "int8": 16 * 2**20}[cross_kv]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """40 GiB, of which 3 are ours (2 of them in use) and 5 another process's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (32 * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)


def test_what_is_planned_is_the_sum_of_what_is_named():
    plan = plan_memory(Network(), CONFIG)
    assert (plan.weights, plan.per_slot) == (2 * GIB, 32 * 2**20)
    assert plan.allowed == 15 * GIB  # half of the GPU, less what others hold
    per_position = 6 * 1280 + 5120 + 2 * (1280 + 80)
    assert plan.encoder == 8 * 1500 * per_position * 2
    assert plan.total == 2 * GIB + 100 * 32 * 2**20 + plan.encoder + plan.fixed
    assert str(plan).startswith(f"memory {plan.total / GIB:.2f} GiB of 15.00 GiB allowed: weights")
    assert "caches of 100 slots 3.12 GiB" in str(plan)


def test_int8_keys_and_values_halve_a_slot():
    plan = plan_memory(Network(), dataclasses.replace(CONFIG, cross_kv="int8"))
    assert plan.per_slot == 16 * 2**20


def test_the_error_names_the_most_slots_that_fit():
    with pytest.raises(UnavailableError, match=r"runtime\.slots = 1000: memory .*set") as caught:
        plan_memory(Network(), dataclasses.replace(CONFIG, slots=1000))
    fit = int(str(caught.value).rpartition("= ")[2])
    plan = plan_memory(Network(), dataclasses.replace(CONFIG, slots=fit))
    assert plan.total <= plan.allowed < plan.total + plan.per_slot
    with pytest.raises(UnavailableError):
        plan_memory(Network(), dataclasses.replace(CONFIG, slots=fit + 1))


def test_where_not_even_one_slot_fits_another_gpu_is_advised():
    with pytest.raises(UnavailableError, match="use a larger GPU or a smaller model"):
        plan_memory(Network(), dataclasses.replace(CONFIG, memory_share=0.15))
