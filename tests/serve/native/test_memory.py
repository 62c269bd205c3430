"""The plan of a GPU's memory, on a GPU of made-up size."""

import dataclasses
import math
import re

import pytest
import torch

from eval.config import load_config
from eval.random_whisper import published_shape
from serve.contract.config import RuntimeConfig
from serve.contract.engine import tensor_specs
from serve.contract.errors import UnavailableError
from serve.contract.manifest import Dims
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

    def cache_bytes(self, slots, rows, cross_kv):
        return (slots * {"full": 24, "int8": 12}[cross_kv] + rows * 8) * 2**20


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """40 GiB, of which 3 are ours (2 of them in use) and 5 another process's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (32 * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)


def sizes_of(plan):
    """The sizes in a plan's description, in MiB: the whole, what is allowed, and each part."""
    return [round(float(size) * 1024) for size in re.findall(r"([\d.]+) GiB", plan)]


def test_what_is_planned_is_the_sum_of_what_is_named():
    plan = plan_memory([Network()], CONFIG, 100)
    total, allowed, weights, caches, phrases, encoder, words, other = sizes_of(plan)
    assert (weights, caches, words) == (2048, pytest.approx(100 * 32, abs=6), 0)
    assert allowed == 15 * 1024  # half of the GPU, less what others hold
    per_position = 6 * 1280 + 5120 + 2 * (1280 + 80)
    assert encoder == pytest.approx(8 * 1500 * per_position * 2 / 2**20, abs=6)
    assert phrases == pytest.approx(100 * Phrasebook.bytes_of_slot() / 2**20, abs=6)
    assert total == pytest.approx(weights + caches + phrases + encoder + words + other, abs=30)
    assert "caches of 100 slots with 100 rows 3.12 GiB" in plan


@pytest.mark.parametrize(
    ("networks", "cross_kv", "caches"),
    [(1, "int8", 100 * 12 + 300 * 8), (2, "full", 2 * (100 * 24 + 300 * 8))],
)
def test_int8_halves_a_slot_and_rows_and_a_draft_cost_their_own_caches(networks, cross_kv, caches):
    config = dataclasses.replace(CONFIG, cross_kv=cross_kv)
    plan = plan_memory([Network()] * networks, config, 300)
    assert sizes_of(plan)[3] == pytest.approx(caches, abs=6)


@pytest.mark.parametrize("each", [1, 5])
def test_the_error_names_the_most_slots_that_fit(each):
    with pytest.raises(UnavailableError, match=r"runtime\.slots = 1000: memory .*set") as caught:
        plan_memory([Network()], dataclasses.replace(CONFIG, slots=1000), 1000 * each)
    fit = int(re.search(r"set runtime\.slots = (\d+)", str(caught.value))[1])
    assert ("runtime.rows" in str(caught.value)) == (each > 1)
    assert each == 1 or str(caught.value).endswith(f"runtime.rows = {fit * each}")
    plan_memory([Network()], dataclasses.replace(CONFIG, slots=fit), fit * each)
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
    assert 5 * 1024 < sizes_of(plan)[0] < 12 * 1024
