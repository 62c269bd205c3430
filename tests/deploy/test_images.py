"""The Dockerfiles, as far as a machine without Docker can check them quickly.

`tests.deploy.fresh_root` carries out the native one's steps.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from build.commands import FP8_CLIPS
from build.config import BuildConfig
from build.native import CALIBRATE_CLIPS
from deploy.images import earshot
from serve.contract.config import load_config
from serve.contract.server_config import ServerConfig
from serve.wire.tensors import require_numpy_1
from tests.deploy.dockerfiles import IMAGES, ROOT, all_of, copied, environment

NATIVE = IMAGES / "native.Dockerfile"
TRTLLM = IMAGES / "trtllm.Dockerfile"
TRTLLM_API = IMAGES / "trtllm-api.Dockerfile"
PINS = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
# What TensorRT-LLM's image has, in releases that it was tested with.
IN_THE_IMAGE = {
    *("torch", "numpy", "safetensors", "tokenizers", "transformers", "huggingface-hub"),
    *("pydantic", "protobuf"),
    *("jinja2", "fsspec", "networkx", "typing-extensions"),  # torch needs them
    *("packaging", "pyyaml", "requests", "urllib3"),  # transformers
    "pygments",  # rich, of nvidia-modelopt
    "tzdata",  # pandas, of datasets
}
# The image has its own tritonserver; peers are measured elsewhere.
NOT_NEEDED = {"nvidia-pytriton", "faster-whisper", "ctranslate2", "ray"}


@pytest.mark.parametrize("path", [NATIVE, TRTLLM, TRTLLM_API], ids=lambda path: path.stem)
def test_what_is_copied_exists(path):
    sources = [source for found, _ in copied(path) for source in found]
    assert {"requirements.txt", "build", "serve", "configs"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    ignored = path.with_name(f"{path.name}.dockerignore").read_text(encoding="utf-8").split()
    assert not set(sources) & set(ignored)
    assert (ROOT / environment(path)["CONFIG"]).is_file()


@pytest.mark.parametrize("path", [NATIVE, TRTLLM, TRTLLM_API], ids=lambda path: path.stem)
def test_the_clips_of_builds_are_copied(path):
    """An image builds engines as the project's folder does, and compares them on the same clips."""
    folders = [Path(source) for sources, _ in copied(path) for source in sources]
    build = BuildConfig()
    for clips in (build.verify_clips, CALIBRATE_CLIPS, FP8_CLIPS):
        assert (ROOT / clips).is_file()
        assert any(Path(clips).is_relative_to(folder) for folder in folders)


@pytest.mark.parametrize("path", [NATIVE, TRTLLM, TRTLLM_API], ids=lambda path: path.stem)
def test_the_ports_are_the_servers(path):
    server = ServerConfig()
    ports = [server.http_port, server.grpc_port, server.metrics_port]
    assert all_of(path, "EXPOSE") == [" ".join(map(str, ports))]
    (health,) = all_of(path, "HEALTHCHECK")
    assert f"127.0.0.1:{server.http_port}/" in health


# ---------------------------------------------------------------- native


def installed_natively():
    """What the native image asks pip for, by distribution."""
    (command,) = [text for text in all_of(NATIVE, "RUN") if "pip install" in text]
    words = command.partition("-c requirements.txt ")[2].split()
    return {Requirement(word.strip('"')).name for word in words}


def test_the_native_image_has_all_that_it_imports():
    homes = importlib.metadata.packages_distributions()
    # Which come with another: typing of pydantic's, gRPC and protobuf with tritonclient, Triton the
    # language with torch; and those that are not imported by these names here.
    brought = {"pydantic-core", "grpcio", "protobuf", "triton"}
    # All of OpenTelemetry's are one package's, and come with the two that are asked for.
    brought |= {pin.partition("==")[0] for pin in PINS if pin.startswith("opentelemetry-")}
    brought.add("googleapis-common-protos")  # with these, and google is protobuf's, too
    brought -= {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    by_name = {"httptools", "nvidia-pytriton", "packaging", "psycopg"}
    imported = set()
    for top in ("serve", "build"):
        for path in (ROOT / top).rglob("*.py"):
            if "trtllm" in path.relative_to(ROOT).parts:  # what the image is not for
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add(node.module.split(".")[0])
    needed = {
        home.lower().replace("_", "-") for name in imported for home in homes.get(name, ())
    } - brought
    assert needed == installed_natively() - by_name


def test_what_the_native_image_asks_for_is_pinned():
    assert installed_natively() <= {pin.partition("==")[0] for pin in PINS}
    require_numpy_1()  # and the pin is what runs here


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Prepare a folder with configs for `earshot.py`; return the commands that it would run."""
    started = []

    def become(program, command):
        started.append(command[1:])
        sys.exit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(earshot.os, "execv", become)
    (tmp_path / "engines").mkdir()
    (tmp_path / "product.toml").write_text('engine = "engines/e"\n[server]\nhttp_port = 1\n')
    (tmp_path / "settings.toml").write_text('[server]\nhost = "0.0.0.0"\n[live]\nupdate_s = 2\n')
    monkeypatch.setenv("CONFIG", "product.toml")
    monkeypatch.setenv("SETTINGS", "settings.toml")

    def run(command, check):
        started.append(command[1:])
        (tmp_path / "engines" / "e").mkdir()
        (tmp_path / "engines" / "e" / "engine.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(earshot.subprocess, "run", run)
    return started


def test_the_engine_is_built_once(project, tmp_path, capsys):
    assert earshot.main(["engine"]) == 0
    assert earshot.main(["engine"]) == 0
    assert capsys.readouterr().out.startswith("engines/e is there; ")
    (command,) = project
    assert command[:3] == ["-m", "build", "engine"]
    assert tomllib.loads(Path(command[-1]).read_text()) == {
        "engine": "engines/e",
        "server": {"http_port": 1, "host": "0.0.0.0"},
        "live": {"update_s": 2},
    }


def test_the_server_is_started_with_the_same_config(project):
    earshot.main(["engine"])
    with pytest.raises(SystemExit):
        earshot.main(["serve"])
    assert [command[:3] for command in project][1:] == [["-m", "serve", "start"]]


def test_a_container_without_an_engine_says_how_one_gets_into_it(project, capsys):
    assert earshot.main(["serve"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: no engine at engines/e in this container")
    assert "python3 earshot.py engine" in said and "make" not in said
    assert not project


@pytest.mark.parametrize(
    "arguments, settings, said",
    [
        (["sing"], "", "expected engine or serve, found 'sing'"),
        (["engine"], "nowhere.toml", "nowhere.toml"),
        (["engine"], "engines", "engines"),
    ],
)
def test_what_cannot_be_done_is_said(project, monkeypatch, capsys, arguments, settings, said):
    monkeypatch.setenv("SETTINGS", settings)
    assert earshot.main(arguments) != 0
    assert said in capsys.readouterr().err
    assert not project


# ---------------------------------------------------------------- TensorRT-LLM


@pytest.fixture
def installed():
    """What the image installs from the pins."""
    (names,) = re.findall(r"grep -E '\^\((.*)\)=='", TRTLLM.read_text(encoding="utf-8"))
    return set(names.split("|"))


def test_the_base_is_the_one_with_tensorrt_llm_1_2():
    assert all_of(TRTLLM, "FROM") == ["nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"]


def test_packages_come_from_the_pins_and_replace_none_of_the_image(installed):
    assert installed <= {pin.partition("==")[0] for pin in PINS}
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
    """Whether a package without extras needs another."""
    return need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"})


def test_the_config_of_the_llm_api_names_the_interpreter_of_its_image():
    python = load_config(ROOT / environment(TRTLLM_API)["CONFIG"]).runtime.tensorrt_llm.python
    assert f"trtllm-check --python {python}\n" in TRTLLM_API.read_text(encoding="utf-8")
