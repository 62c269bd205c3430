"""serve/trtllm/Dockerfile, as far as a machine without Docker can check it."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "serve" / "trtllm"
TEXT = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
# What TensorRT-LLM's image has, in releases that it was tested with.
IN_THE_IMAGE = {
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "huggingface-hub",
    "pydantic",
    "protobuf",
    "jinja2",  # torch needs it
    "fsspec",  # and this
    "typing-extensions",  # and this
    "packaging",  # transformers needs it
    "urllib3",  # requests, of transformers
    "pygments",  # rich, of nvidia-modelopt
    "tzdata",  # pandas, of datasets
}
# The image has a tritonserver of its own; peers are measured elsewhere.
NOT_NEEDED = {"nvidia-pytriton", "faster-whisper", "ctranslate2"}


@pytest.fixture
def installed():
    """What the image installs from the pins."""
    (names,) = re.findall(r"grep -E '\^\((.*)\)=='", TEXT)
    return set(names.split("|"))


def test_the_base_is_the_one_with_tensorrt_llm_1_2():
    assert "FROM nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in TEXT


def test_packages_come_from_the_pins_and_replace_none_of_the_image(installed):
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert installed <= {pin.partition("==")[0] for pin in pins}
    assert not installed & IN_THE_IMAGE


def test_no_direct_dependency_is_missing(installed):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.match(r"[\w-]+", name)[0] for name in project["dependencies"]}
    assert needed <= installed | IN_THE_IMAGE | NOT_NEEDED


def test_what_is_installed_without_its_dependencies_has_them(installed):
    for name in installed:
        needs = map(Requirement, importlib.metadata.requires(name) or [])
        here = {need.name.lower().replace("_", "-") for need in needs if is_for_all(need)}
        assert here <= installed | IN_THE_IMAGE, name


def is_for_all(need):
    """Whether a package needs another without any of its extras."""
    return need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"})


def test_what_is_copied_exists():
    sources = [word for line in re.findall("^COPY (.*) .*$", TEXT, re.M) for word in line.split()]
    assert {"requirements.txt", "build", "serve", "configs"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert not set(sources) & set(ignored)
