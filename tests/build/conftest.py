"""What tests of build share: a small checkpoint with random weights."""

import pytest

from build.checkpoint import open_checkpoint
from eval.random_whisper import random_weights, write_checkpoint
from tests.checkpoints import NANO
from tests.fake_hub import FakeHub


@pytest.fixture(scope="session")
def weights():
    """Tensors by Hugging Face's names; not to be written to."""
    return random_weights(NANO)


@pytest.fixture
def folder(tmp_path, weights):
    """A Hugging Face folder of the test's own."""
    return write_checkpoint(tmp_path / "hf", NANO, weights)


@pytest.fixture(scope="session")
def nano_folder(tmp_path_factory, weights):
    """A Hugging Face folder that tests only read."""
    return write_checkpoint(tmp_path_factory.mktemp("hf"), NANO, weights)


@pytest.fixture(scope="session")
def checkpoint(nano_folder):
    """The same, opened."""
    return open_checkpoint(str(nano_folder))


@pytest.fixture
def target(tmp_path):
    """Where an engine is to be."""
    return tmp_path / "engines" / "nano"


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub that has `folder` as someone/whisper."""
    return FakeHub(folder, tmp_path / "cache").install(monkeypatch)
