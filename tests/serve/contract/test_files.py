"""Files that a person names: one error, whatever reads them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from build.clips import load_clips
from build.recordings import read_recording, recordings_of
from serve.contract.config import load_config
from serve.contract.errors import FileError
from serve.contract.files import read_bytes, read_text, write_text


@pytest.mark.parametrize("read", [read_bytes, read_text])
@pytest.mark.parametrize("name, reason", [("none", "No such file"), ("", "Is a directory")])
def test_what_cannot_be_read_is_one_sentence(tmp_path, read, name, reason):
    path = tmp_path / name
    with pytest.raises(
        FileError, match=rf"^cannot read {path}: {reason}.*; expected a file"
    ) as caught:
        read(path)
    assert caught.value.exit_code == 2
    with pytest.raises(FileError, match=r"; expected a song$"):
        read(path, "expected a song")


def verified_on(path):
    return recordings_of(path, SimpleNamespace(multilingual=False))  # of the checkpoint's facts


@pytest.mark.parametrize(
    "reader",
    [load_clips, load_config, verified_on, read_recording],
    ids=["clips", "config", "manifest", "audio"],
)
def test_every_reader_ends_in_the_same_error(tmp_path, reader):
    with pytest.raises(FileError, match=r"^cannot read .*gone: No such file or directory; "):
        reader(tmp_path / "gone")


@pytest.mark.parametrize("reader", [load_config, load_clips, verified_on])
def test_every_reader_of_text_refuses_what_is_none(tmp_path, reader):
    path: Path = tmp_path / "latin"
    path.write_bytes(b"name = '\xf1'")
    with pytest.raises(FileError, match="byte 8 is not UTF-8"):
        reader(path)


def test_a_file_is_written_whole_beside_what_a_killed_process_left(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "mañana\n")
    assert path.read_text(encoding="utf-8") == "mañana\n"
    killed = (
        "import os, sys\nfrom pathlib import Path\nfrom serve.contract import files\n"
        "files.os.fsync = lambda descriptor: os.kill(os.getpid(), 9)\n"
        "files.write_text(Path(sys.argv[1]), 'half')\n"
    )
    subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
    assert path.read_text(encoding="utf-8") == "mañana\n"
    write_text(path, "new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["new"]
    with pytest.raises(FileError, match=r"cannot write .*: No such file or directory; go away"):
        write_text(tmp_path / "none" / "a.txt", "", "go away")
