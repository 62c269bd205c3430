"""What tests of the two builds for TensorRT-LLM share."""

import pytest

from tests.fake_trtllm.install import install, write_checkpoint_with_processor


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small Hugging Face checkpoint with what its processor reads, opened."""
    return write_checkpoint_with_processor(tmp_path_factory.mktemp("nano") / "checkpoint")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """TensorRT-LLM 1.2, its builder and a GPU, all stand-ins."""
    return install(monkeypatch, tmp_path)
