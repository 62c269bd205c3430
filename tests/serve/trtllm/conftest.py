"""What tests of TensorRT-LLM share: a small checkpoint, and engines made of it."""

import pytest

from tests.checkpoints import write_engine
from tests.fake_trtllm.install import copy_engine
from tests.runtimes import executor_engine, nano_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint with random weights."""
    return nano_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def native_engine(checkpoint, tmp_path_factory):
    """It as a native engine; FP16, since TensorRT-LLM rounds INT8 in its own way."""
    return write_engine(checkpoint, tmp_path_factory.mktemp("native") / "engine", "fp16")


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    """It as an engine for the LLM API."""
    return copy_engine(checkpoint, tmp_path_factory.mktemp("api") / "engine")


@pytest.fixture(scope="module")
def compiled(checkpoint, tmp_path_factory):
    """It as an engine of TensorRT-LLM."""
    with executor_engine(checkpoint, tmp_path_factory.mktemp("compiled")) as engine:
        yield engine
