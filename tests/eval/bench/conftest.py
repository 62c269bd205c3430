"""What the bench's tests share: turbo's config for a CPU, and an engine of a tiny shape."""

import dataclasses

import pytest

from eval.bench import BenchPlan, table, workloads
from eval.bench.floor import Ceilings
from eval.config import load_config
from eval.random_whisper import PUBLISHED, random_engine
from serve.contract.config import RuntimeConfig, TranscriberConfig

# Turbo's vocabulary and audio with next to no network.
TINY = dataclasses.replace(
    PUBLISHED["large-v3-turbo"], width=64, encoder_layers=1, decoder_layers=1
)
# Of a machine that does not exist.
CEILINGS = Ceilings(product=800e12, fp8_product=1600e12, attention=400e12, memory=4e12)
# Figures that take no time.
PLAN = BenchPlan(slots=(2, 3), seconds=0.05, requests=2)


@pytest.fixture(scope="session")
def cpu_config():
    """Of turbo, for a CPU."""
    config = load_config("configs/large-v3-turbo.toml")
    runtime = RuntimeConfig(slots=2, encoder_batch=2, threads=1)
    return dataclasses.replace(config, runtime=runtime, transcriber=TranscriberConfig())


@pytest.fixture
def config(cpu_config, monkeypatch):
    """The same, with lengths that take no time."""
    monkeypatch.setattr(workloads, "THROUGHPUT_TOKENS", 5)
    monkeypatch.setattr(workloads, "REQUEST_TOKENS", 3)
    monkeypatch.setattr(workloads, "MLPERF_MAX", 6)
    monkeypatch.setattr(table, "WARM_REQUESTS", 1)
    return cpu_config


def quiet(line):
    """Listens to progress and keeps none of it."""


@pytest.fixture(scope="session")
def engine():
    """Random weights of the tiny shape."""
    with random_engine(TINY, "int8", quiet) as engine:
        yield engine
