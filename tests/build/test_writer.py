"""build.writer: what an engine holds, and that nothing half-done is ever seen."""

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import build.writer
from build.checkpoint import open_checkpoint
from build.quantize import quantize_rows
from build.writer import convert, fill, staged, tensor_names, up_to_date, write_manifest
from serve.engine import (
    MANIFEST_FILE,
    MEL_FILTERS_FILE,
    WEIGHTS_FILE,
    open_engine,
    tensor_specs,
)
from serve.errors import CheckpointError, EngineError
from tests.checkpoints import PUBLISHED, random_weights, write_engine, write_hf, write_openai

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "engines" / "nano"


def contents(target):
    """Everything at and beside an engine: name -> bytes."""
    parent = target.parent
    return {str(p.relative_to(parent)): p.read_bytes() for p in parent.rglob("*") if p.is_file()}


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_engine_holds_what_the_contract_lists(checkpoint, target, precision):
    engine = write_engine(checkpoint, target, precision)
    weights = engine.load_weights()
    assert set(weights) == set(tensor_specs(checkpoint.dims, precision))
    manifest = engine.manifest
    assert (manifest.runtime, manifest.precision) == ("native", precision)
    assert (manifest.dims, manifest.tokenizer) == (checkpoint.dims, checkpoint.facts)
    assert (manifest.source, manifest.verification) == (checkpoint.source, None)
    assert manifest.checkpoint_bytes == checkpoint.weight_bytes
    assert set(manifest.versions) == {"earshot", "python", "torch", "safetensors", "transformers"}
    assert (target / "tokenizer.json").read_bytes() == checkpoint.tokenizer_json
    matrices = {name for name, tensor in weights.items() if tensor.dtype == torch.int8}
    assert set(manifest.quantization) == matrices
    assert bool(matrices) == (precision == "int8")


def test_int8_weights_are_close_and_plain_ones_equal(checkpoint, target):
    engine = write_engine(checkpoint, target)
    weights = engine.load_weights()
    for name, tensor in checkpoint.tensors.items():
        if name in engine.manifest.quantization:
            scale = weights[name.removesuffix("weight") + "scale"].float()[:, None]
            error = (weights[name] * scale - tensor.float()).abs().max()
            assert float(error) == pytest.approx(engine.manifest.quantization[name].max_abs)
            assert 0 < engine.manifest.quantization[name].relative < 0.01
        else:
            assert torch.equal(weights[name], tensor)
    projection = quantize_rows(checkpoint.tensors["decoder.tokens"])
    assert torch.equal(weights["decoder.logits.weight"], projection.codes)
    assert torch.equal(weights["decoder.logits.scale"], projection.scale)


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_both_formats_give_identical_engines(tmp_path, precision):
    shape = PUBLISHED["tiny"]
    stored = random_weights(shape)
    folder = write_hf(tmp_path / "hf", shape, stored)
    path = write_openai(tmp_path / "a.pt", shape, stored)
    hf = write_engine(open_checkpoint(str(folder)), tmp_path / "a", precision)
    openai = write_engine(open_checkpoint(str(path), str(folder)), tmp_path / "b", precision)
    assert hf.manifest.files == openai.manifest.files  # sizes and hashes
    assert dataclasses.replace(hf.manifest, source=None, checkpoint_bytes=0) == (
        dataclasses.replace(openai.manifest, source=None, checkpoint_bytes=0)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 1e6])
@pytest.mark.parametrize("name", ["encoder.norm.bias", "decoder.layers.0.mlp.fc1.weight"])
def test_values_that_float16_cannot_hold_are_refused(checkpoint, bad, name):
    broken = checkpoint.tensors[name].float()
    broken.view(-1)[3] = bad * 127
    damaged = dataclasses.replace(checkpoint, tensors=dict(checkpoint.tensors) | {name: broken})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN, infinity or values beyond"):
        convert(damaged, "int8", tensor_names(damaged))


def test_other_users_can_read_the_engine(checkpoint, target):
    old = os.umask(0o022)
    try:
        write_engine(checkpoint, target)
    finally:
        os.umask(old)
    assert target.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existing", [False, True])
def test_a_build_that_fails_changes_nothing(checkpoint, target, error, existing):
    if existing:
        write_engine(checkpoint, target, "fp16")
    target.parent.mkdir(exist_ok=True)
    before = contents(target)
    with pytest.raises(error), staged(target) as folder:
        fill(folder, checkpoint, "int8", tensor_names(checkpoint))
        raise error
    assert contents(target) == before
    assert list(target.parent.iterdir()) == ([target] if existing else [])


def test_an_engine_is_replaced_whole_and_only_at_the_end(checkpoint, target):
    write_engine(checkpoint, target, "fp16")
    with staged(target) as folder:
        fill(folder, checkpoint, "int8", tensor_names(checkpoint))
        assert open_engine(target).manifest.precision == "fp16"
    assert open_engine(target).manifest.precision == "int8"
    assert list(target.parent.iterdir()) == [target]


def test_a_symbolic_link_is_followed(checkpoint, target, tmp_path):
    write_engine(checkpoint, target, "fp16")
    link = tmp_path / "current"
    link.symlink_to(target)
    write_engine(checkpoint, link)
    assert link.is_symlink()
    assert open_engine(target).manifest.precision == "int8"


def test_a_folder_that_is_no_engine_is_not_replaced(checkpoint, target):
    target.mkdir(parents=True)
    write_engine(checkpoint, target)  # an empty folder is
    (target / MANIFEST_FILE).unlink()
    before = contents(target)
    with pytest.raises(EngineError, match="exists and is not an engine"):
        write_engine(checkpoint, target)
    assert contents(target) == before
    file = target.parent / "file"
    file.write_text("mine")
    with pytest.raises(EngineError, match="exists and is not an engine"):
        write_engine(checkpoint, file)


@pytest.mark.parametrize("full", ["save_file", "write_manifest"])
def test_a_full_disk_is_said_and_leaves_nothing(checkpoint, target, monkeypatch, full):
    write_engine(checkpoint, target, "fp16")
    before = contents(target)

    def save_file(tensors, path):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_text(path, text, encoding):
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if full == "save_file":
        monkeypatch.setattr(build.writer, "save_file", save_file)
    else:
        monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(
        EngineError, match=r"No space left on device \(.* MB free.*nothing was chan"
    ):
        write_engine(checkpoint, target)
    assert contents(target) == before


def test_a_write_that_the_system_stops_leaves_nothing(checkpoint, target):
    """No fake: the system refuses to let any file grow beyond a limit."""
    target.parent.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(EngineError, match=r"File too large"):
            write_engine(checkpoint, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(target.parent.iterdir()) == []


def test_a_folder_that_cannot_be_made(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot write"):
        write_engine(checkpoint, tmp_path / "file" / "nano")


def test_a_filesystem_that_cannot_swap_folders(checkpoint, target, monkeypatch):
    write_engine(checkpoint, target, "fp16")

    def exchange(folder, _):
        raise OSError(errno.EINVAL, "this filesystem cannot swap folders; remove the old engine")

    monkeypatch.setattr(build.writer, "_exchange", exchange)
    with pytest.raises(EngineError, match="remove the old engine"):
        write_engine(checkpoint, target)
    assert open_engine(target).manifest.precision == "fp16"
    assert list(target.parent.iterdir()) == [target]


HALF_BUILD = """
import sys, time
from pathlib import Path
from build.checkpoint import open_checkpoint
from build.writer import fill, staged, tensor_names

checkpoint = open_checkpoint(sys.argv[1])
with staged(Path(sys.argv[2])) as folder:
    fill(folder, checkpoint, "int8", tensor_names(checkpoint))
    print("filled", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def half_build(nano_folder, target):
    """A build in another process that stops before it publishes."""
    command = [sys.executable, "-c", HALF_BUILD, str(nano_folder), str(target)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"filled\n"
        yield process
        process.kill()


def test_a_killed_build_leaves_the_old_engine_and_the_next_one_cleans_up(
    checkpoint, target, half_build
):
    write_engine(checkpoint, target, "fp16")
    assert len(list(target.parent.glob(".nano.building-*"))) == 2  # folder and lock, still held
    half_build.send_signal(signal.SIGKILL)
    half_build.wait(timeout=30)
    assert open_engine(target).manifest.precision == "fp16"
    assert len(list(target.parent.glob(".nano.building-*"))) == 2
    write_engine(checkpoint, target)
    assert open_engine(target).manifest.precision == "int8"
    assert list(target.parent.iterdir()) == [target]


def test_up_to_date(checkpoint, target):
    def current(changed=checkpoint, precision="int8", verified=False):
        return up_to_date(target, changed, precision, verified)

    assert not current()
    engine = write_engine(checkpoint, target)
    assert current()
    assert not current(verified=True)
    write_manifest(target, dataclasses.replace(engine.manifest, verification={"tokens": 1}))
    assert current(verified=True)
    assert not current(precision="fp16")
    source = dataclasses.replace(checkpoint.source, sha256="0" * 64)
    assert not current(dataclasses.replace(checkpoint, source=source))
    facts = dataclasses.replace(checkpoint.facts, suppress_tokens=())
    assert not current(dataclasses.replace(checkpoint, facts=facts))
    assert not current(dataclasses.replace(checkpoint, tokenizer_json=b"{}"))
    with (target / WEIGHTS_FILE).open("ab") as file:
        file.write(b"!")
    assert not current()


def test_an_engine_without_mel_filters_is_not_up_to_date(checkpoint, target):
    manifest = write_engine(checkpoint, target).manifest
    files = {name: facts for name, facts in manifest.files.items() if name != MEL_FILTERS_FILE}
    write_manifest(target, dataclasses.replace(manifest, files=files))
    (target / MEL_FILTERS_FILE).unlink()
    assert open_engine(target).manifest.files == files
    assert not up_to_date(target, checkpoint, "int8", verified=False)


def test_manifest_is_replaced_or_left(checkpoint, target, monkeypatch):
    engine = write_engine(checkpoint, target)
    before = contents(target)

    def replace(source, _):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(EngineError, match="Input/output error"):
        write_manifest(target, engine.manifest)
    assert contents(target) == before
