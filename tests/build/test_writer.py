"""build.writer: what an engine holds, and that nothing half-done is ever seen."""

import ctypes
import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from build import native
from build.builders import build_engine
from build.config import BuildProduct
from serve.contract.engine import open_engine
from serve.contract.errors import EngineError
from serve.contract.manifest import MANIFEST_FILE
from tests.checkpoints import write_engine


def contents(target):
    """Everything at and beside an engine: name -> bytes."""
    parent = target.parent
    return {str(p.relative_to(parent)): p.read_bytes() for p in parent.rglob("*") if p.is_file()}


def folders(target):
    """The folders beside an engine, and itself."""
    return [path for path in target.parent.iterdir() if path.is_dir()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("existing", [False, True])
def test_a_build_that_fails_changes_nothing(checkpoint, target, error, existing):
    if existing:
        write_engine(checkpoint, target, "fp16")
    target.parent.mkdir(exist_ok=True)
    (target.parent / ".nano.lock").touch()
    before = contents(target)

    def fail(engine):
        raise error

    with pytest.raises(error):
        build_engine(checkpoint, BuildProduct(engine=str(target)), print, fail)
    assert contents(target) == before
    assert folders(target) == ([target] if existing else [])


def test_an_engine_is_replaced_whole_and_only_at_the_end(checkpoint, target):
    write_engine(checkpoint, target, "fp16")

    def look(made):
        precisions = [engine.manifest.precision for engine in (made, open_engine(target))]
        assert precisions == ["int8", "fp16"]

    build_engine(checkpoint, BuildProduct(engine=str(target)), print, look)
    assert open_engine(target).manifest.precision == "int8"
    assert folders(target) == [target]


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


def test_a_full_disk_is_said_and_leaves_nothing(checkpoint, target, monkeypatch):
    write_engine(checkpoint, target, "fp16")
    before = contents(target)

    def save_file(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native, "save_file", save_file)
    with pytest.raises(
        EngineError, match=r"No space left on device \(.* MB free.*nothing was chan"
    ):
        write_engine(checkpoint, target)
    assert contents(target) == before


def test_a_folder_that_cannot_be_made(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot write"):
        write_engine(checkpoint, tmp_path / "file" / "nano")


def test_a_filesystem_that_cannot_swap_folders(checkpoint, target, monkeypatch):
    write_engine(checkpoint, target, "fp16")

    def renameat2(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=renameat2))
    with pytest.raises(EngineError, match="remove the old engine"):
        write_engine(checkpoint, target)
    assert open_engine(target).manifest.precision == "fp16"
    assert folders(target) == [target]


HALF_BUILD = """
import sys, time
from build.builders import build_engine
from build.checkpoint import open_checkpoint
from build.config import BuildProduct

def stop(engine):
    print("filled", flush=True)
    time.sleep(600)

build_engine(open_checkpoint(sys.argv[1]), BuildProduct(engine=sys.argv[2]), print, stop)
"""


def test_a_killed_build_leaves_the_old_engine_and_the_next_one_cleans_up(
    checkpoint, nano_folder, target
):
    write_engine(checkpoint, target, "fp16")
    command = [sys.executable, "-c", HALF_BUILD, str(nano_folder), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"filled\n"
        process.kill()
    assert open_engine(target).manifest.precision == "fp16"
    assert len(folders(target)) == 2
    write_engine(checkpoint, target)
    assert open_engine(target).manifest.precision == "int8"
    assert folders(target) == [target]
