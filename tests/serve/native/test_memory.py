"""The plan of a GPU's memory, on a GPU of made-up size."""

import dataclasses
import math
import re

import pytest
import torch

from eval.config import load_config
from eval.random_whisper import published_shape
from serve.contract.config import RuntimeConfig
from serve.contract.engine import Dims, tensor_specs
from serve.contract.errors import UnavailableError
from serve.native.decoder import Decoder
from serve.native.memory import plan_memory
from serve.native.rules.phrases import Phrasebook

GIB = 2**30
DIMS = Dims(80, 1500, 1280, 20, 4, 5120, 51866, 448, 1280, 20, 4, 5120)
CONFIG = RuntimeConfig(device="cuda", slots=100, encoder_batch=8, memory_share=0.5)


@dataclasses.dataclass
class Network:
    """What a plan asks of a network."""

    dims: Dims = DIMS
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cuda"))

    def slot_bytes(self, cross_kv):
        return {"full": 24 * 2**20, "int8": 12 * 2**20}[cross_kv]

    def row_bytes(self):
        return 8 * 2**20


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """40 GiB, of which 3 are ours (2 of them in use) and 5 another process's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (32 * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)


def test_what_is_planned_is_the_sum_of_what_is_named():
    plan = plan_memory([Network()], CONFIG, 100)
    assert (plan.weights, plan.per_slot, plan.per_row) == (2 * GIB, 24 * 2**20, 8 * 2**20)
    assert plan.allowed == 15 * GIB  # half of the GPU, less what others hold
    per_position = 6 * 1280 + 5120 + 2 * (1280 + 80)
    assert plan.encoder == 8 * 1500 * per_position * 2
    assert plan.phrases == 100 * Phrasebook.bytes_of_slot()
    caches = 100 * 32 * 2**20
    assert plan.total == 2 * GIB + caches + plan.phrases + plan.encoder + plan.fixed
    assert str(plan).startswith(f"memory {plan.total / GIB:.2f} GiB of 15.00 GiB allowed: weights")
    assert "caches of 100 slots with 100 rows 3.12 GiB" in str(plan)


def test_int8_keys_and_values_halve_a_slot_and_more_rows_cost_their_own_caches():
    plan = plan_memory([Network()], dataclasses.replace(CONFIG, cross_kv="int8"), 300)
    assert plan.per_slot == 12 * 2**20
    assert plan.caches == (100 * 12 + 300 * 8) * 2**20


def test_a_draft_takes_caches_of_its_own():
    plan = plan_memory([Network(), Network()], CONFIG, 300)
    assert (plan.per_slot, plan.per_row) == (48 * 2**20, 16 * 2**20)


@pytest.mark.parametrize("each", [1, 5])
def test_the_error_names_the_most_slots_that_fit(each):
    with pytest.raises(UnavailableError, match=r"runtime\.slots = 1000: memory .*set") as caught:
        plan_memory([Network()], dataclasses.replace(CONFIG, slots=1000), 1000 * each)
    fit = int(re.search(r"set runtime\.slots = (\d+)", str(caught.value))[1])
    assert ("runtime.rows" in str(caught.value)) == (each > 1)
    assert each == 1 or str(caught.value).endswith(f"runtime.rows = {fit * each}")
    plan = plan_memory([Network()], dataclasses.replace(CONFIG, slots=fit), fit * each)
    assert plan.total <= plan.allowed < plan.total + plan.per_slot + each * plan.per_row
    with pytest.raises(UnavailableError):
        plan_memory([Network()], dataclasses.replace(CONFIG, slots=fit + 1), (fit + 1) * each)


def test_where_not_even_one_slot_fits_another_gpu_is_advised():
    with pytest.raises(UnavailableError, match="use a larger GPU or a smaller model"):
        plan_memory([Network()], dataclasses.replace(CONFIG, memory_share=0.15), 100)


def test_turbo_as_it_is_bundled_fits_into_24_gib(monkeypatch):
    """An L4 or an RTX 4090 has so much."""
    config = load_config("configs/large-v3-turbo.toml")
    dims = published_shape(config.build.checkpoint).dims
    specs = tensor_specs(dims, "int8").values()
    weights = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    weights += dims.n_vocab * dims.n_text_state * 2  # the embedding, in float16 beside the int8
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (23 * GIB - weights, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: weights)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)
    decoder = object.__new__(Decoder)
    decoder.dims, decoder.dtype, decoder.device = dims, torch.float16, torch.device("cuda")
    plan = plan_memory([decoder], config.runtime, config.runtime.rows)
    assert 5 * GIB < plan.total < 12 * GIB
