"""An engine for the LLM API: what is copied, what is refused, and which releases can run it."""

import dataclasses
import importlib.metadata
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

from build.builders import build_engine, check, up_to_date
from build.checkpoint import open_checkpoint
from build.config import BuildConfig, BuildProduct, load_config
from serve.contract.config import RuntimeConfig
from serve.contract.engine import MEL_FILTERS_FILE
from serve.contract.errors import CheckpointError, ConfigError, UnavailableError
from serve.contract.manifest import MANIFEST_FILE
from serve.runtime.loader import open_runtime
from serve.trtllm import llm_api
from serve.trtllm.release import api_version
from tests.checkpoints import NANO, write_ct2, write_openai
from tests.fake_hub import FakeHub
from tests.fake_trtllm.install import HERE, OnThread, copy_engine, write_metadata

CUDA = RuntimeConfig(device="cuda")


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    target = tmp_path_factory.mktemp("api") / "engine"
    return copy_engine(checkpoint, target)


def copy_of(checkpoint, tmp_path):
    return shutil.copytree(checkpoint.path, tmp_path / "source")


def test_an_engine_holds_the_checkpoint_and_nothing_else(engine, checkpoint):
    files = {p.relative_to(engine.path).as_posix() for p in engine.path.rglob("*") if p.is_file()}
    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
    )
    copies = {f"checkpoint/{name}" for name in names}
    assert files == {*copies, "tokenizer.json", MEL_FILTERS_FILE, MANIFEST_FILE}
    manifest = engine.manifest
    assert (manifest.runtime, manifest.precision) == ("tensorrt_llm_api", "fp16")
    assert manifest.files.keys() == files - {MANIFEST_FILE}
    assert (manifest.dims, manifest.tokenizer) == (checkpoint.dims, checkpoint.facts)
    for name in copies:
        source = checkpoint.path / name.removeprefix("checkpoint/")
        assert (engine.path / name).read_bytes() == source.read_bytes()
        assert not (engine.path / name).samefile(source)


def test_up_to_date_until_something_changes(checkpoint, tmp_path):
    source, target = copy_of(checkpoint, tmp_path), tmp_path / "engine"

    build = BuildConfig(runtime="tensorrt_llm_api", precision="fp16")
    config = BuildProduct(engine=str(target), build=build)

    def fresh():
        return up_to_date(open_checkpoint(str(source)), config, verified=True)

    assert not fresh()
    copy_engine(open_checkpoint(str(source)), target)
    assert fresh()
    processor = source / "preprocessor_config.json"
    processor.write_text(processor.read_text() + "\n")
    assert not fresh()
    copy_engine(open_checkpoint(str(source)), target)
    assert fresh()
    (source / "vocab.json").write_text("{}")
    assert not fresh()


def test_what_the_library_could_not_load_is_refused(checkpoint, tmp_path):
    def refused(source, words):
        opened = open_checkpoint(str(source))
        with pytest.raises(CheckpointError, match=words):
            copy_engine(opened, tmp_path / "engine")
        assert not any(path.is_dir() for path in tmp_path.glob("*engine*"))

    source = copy_of(checkpoint, tmp_path)
    weights = load_file(source / "model.safetensors")
    pickle = write_openai(tmp_path / "nano.pt", NANO, weights)
    opened = open_checkpoint(str(pickle), str(source))
    with pytest.raises(CheckpointError, match="is an OpenAI checkpoint"):
        copy_engine(opened, tmp_path / "engine")
    refused(write_ct2(source, tmp_path / "ct2"), "is a CTranslate2 checkpoint")
    for words, options in (
        ("uses the checkpoint's own", {"precision": "fp16", "tokenizer": str(source)}),
        ("without quantisation; build with PRECISION=fp16", {"precision": "int8"}),
    ):
        with pytest.raises(ConfigError, match=words):
            check(BuildProduct(build=BuildConfig(runtime="tensorrt_llm_api", **options)))
    (source / "preprocessor_config.json").unlink()
    refused(source, r"has no preprocessor_config\.json")
    (source / "processor_config.json").write_text("{}")  # where newer transformers put it
    weights["model.decoder.layer_norm.bias"] = weights["model.decoder.layer_norm.bias"].float()
    weights["model.decoder.layer_norm.bias"][3] = 1e6
    save_file(weights, source / "model.safetensors")
    refused(source, r"decoder\.norm\.bias holds NaN, infinity or values beyond float16")


def test_a_hub_checkpoint_comes_with_its_processor(checkpoint, tmp_path, monkeypatch):
    FakeHub(checkpoint.path, tmp_path / "cache").install(monkeypatch)
    opened = open_checkpoint("someone/whisper")
    built = copy_engine(opened, tmp_path / "engine")
    assert "checkpoint/preprocessor_config.json" in built.manifest.files


def test_the_shipped_config_builds_one(checkpoint, tmp_path):
    config = load_config("configs/large-v3-turbo-trtllm-api.toml")
    assert config.runtime.device.startswith("cuda")
    assert config.transcriber.temperatures == (0.0,)  # it cannot sample
    assert not config.runtime.cuda_graph  # NVIDIA tests none in FP16
    build_engine(checkpoint, dataclasses.replace(config, engine=str(tmp_path / "e")), print)


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Install a version."""

    def pretend(version):
        write_metadata(tmp_path, "tensorrt-llm", version)
        shutil.copytree(HERE / "api" / "tensorrt_llm", tmp_path / "tensorrt_llm")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "tensorrt_llm", raising=False)
        monkeypatch.setattr(llm_api, "spawn", OnThread)

    return pretend


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0", "2.0"])
def test_new_releases_with_whisper_will_do(pretend, version):
    pretend(version)
    assert api_version() == version


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.2.1", r"1\.2\.1 .* expected 1\.3\.0rc25 or later; .*runtime = 'tensorrt_llm'"),
        ("1.3.0rc1", r"1\.3\.0rc1 .* has no Whisper; expected 1\.3\.0rc25 or later"),
    ],
)
def test_others_are_refused(pretend, engine, version, words):
    pretend(version)
    with pytest.raises(UnavailableError, match=words):
        open_runtime(engine, CUDA)


def test_an_absent_library_is_named(engine, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(llm_api, "spawn", OnThread)
    words = rf"not installed in the environment of {sys.executable}, expected release 1\.3 or later"
    with pytest.raises(UnavailableError, match=words):
        open_runtime(engine, CUDA)
