"""Audio beside its request: found by a key alone, once, and nowhere else."""

import os

import pytest

from serve.contract.errors import AudioError
from serve.contract.messages import AudioFile
from serve.wire import tensors, uploads


@pytest.fixture
def folder(tmp_path):
    return uploads.make_folder(tmp_path)


def test_a_file_is_taken_once_and_leaves_no_name(tmp_path, folder):
    (tmp_path / "spooled").write_bytes(b"RIFF")
    uploads.give(folder, "0-ab-1", str(tmp_path / "spooled"))
    file = uploads.take(tmp_path, "0-ab-1")
    assert (len(file), file[:3], file[2:99], file[9:12]) == (4, b"RIF", b"FF", b"")
    assert list(folder.iterdir()) == []
    assert uploads.take(tmp_path, "0-ab-1") is None
    assert tensors.request_from_inputs({}, file).audio is file
    with pytest.raises(AudioError, match="neither AUDIO nor SAMPLES"):
        tensors.request_from_inputs({})


@pytest.mark.parametrize(
    "key", ["../0-ab-1", "/etc/passwd", ".", "", "ab", "ab-1", "0-ab-1/../0-ab-2", "0-ab-1\0"]
)
def test_nothing_but_a_key_is_a_name(tmp_path, folder, key):
    (tmp_path / "0-ab-1").write_bytes(b"RIFF")
    assert uploads.take(tmp_path, key) is None


def test_what_is_left_is_removed(tmp_path, folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "0-ab-1").write_bytes(b"RIFF")
    uploads.remove(folder, "0-ab-1")
    uploads.remove(folder, "0-ab-1")
    (folder / "0-ab-2").write_bytes(b"RIFF")
    other = uploads.make_folder(tmp_path, 1)
    (other / "1-ab-2").write_bytes(b"RIFF")
    uploads.make_folder(tmp_path)
    assert list(folder.iterdir()) == [] and uploads.take(tmp_path, "1-ab-2") is not None


def test_what_is_let_go_takes_no_room_and_nothing_is_read_in_its_place(tmp_path):
    (tmp_path / "a").write_bytes(b"RIFF")
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    file = AudioFile(descriptor)
    assert file[0:4] == b"RIFF"
    file.free_disk_space()
    assert os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    others = [open(tmp_path / "a") for _ in range(8)]  # noqa: SIM115
    assert file[0:4] == b"" and len(file) == 4
    for other in others:
        other.close()
