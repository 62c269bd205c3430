"""The run's folder: its end, and what is left of runs that had none."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serve.wire import folder as folder_module
from serve.wire.folder import remove_shared_memory, run_folder, shared_memory


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Folders of the tests' own for the runs and their shared memory."""
    runs, regions = tmp_path / "runs", tmp_path / "shm"
    runs.mkdir()
    regions.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(runs))
    monkeypatch.setattr(folder_module, "SHARED_MEMORY", regions)
    return runs


def region(folder):
    path = folder_module.SHARED_MEMORY / f"{folder.name}0123-4567"
    path.write_bytes(b"sound")
    return path


def test_it_is_its_users_alone_and_leaves_nothing():
    with run_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        left = region(folder)
        (folder / "models").mkdir()
    assert not folder.exists() and not left.exists()


def test_regions_are_found_by_their_run():
    with run_folder() as one, run_folder() as other:
        kept, gone = region(one), region(other)
        assert shared_memory(one) == [kept]
        remove_shared_memory(other)
        assert kept.exists() and not gone.exists()


def test_what_a_killed_run_left_goes_at_the_next_start(places):
    code = (
        "import sys, time; from serve.wire.folder import run_folder\n"
        "with run_folder() as folder:\n    print(folder, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(places)},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        folder = Path(run.stdout.readline().strip())
        left = region(folder)
        with run_folder():
            assert folder.exists() and left.exists(), "its run lives"
        run.send_signal(signal.SIGKILL)
    assert folder.exists()
    with run_folder():
        assert not folder.exists() and not left.exists()


def test_nothing_goes_that_is_not_a_runs(places, tmp_path):
    (places / "earshot-notes").mkdir()
    (places / "earshot-file").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lock").write_bytes(b"")
    (places / "earshot-link").symlink_to(outside)
    elsewhere = places / "earshot-linked-lock"
    elsewhere.mkdir()
    (elsewhere / "lock").symlink_to(outside / "lock")
    with run_folder():
        pass
    left = {path.name.removeprefix("earshot-") for path in places.iterdir()}
    assert left == {"notes", "file", "link", "linked-lock"}
    assert (outside / "lock").exists()
