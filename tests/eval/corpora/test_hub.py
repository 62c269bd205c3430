import types

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import soundfile
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import errors

from eval.corpora import parquet
from eval.corpora.find import find_clips
from serve.contract.errors import ConfigError, UnavailableError

FILES = ("clean/test/0000.parquet", "clean/test/0001.parquet", "clean/train/0000.parquet")


def shard(path, said, audio=True, row_group_size=2):
    """A Parquet file as the hub has it."""
    soundfile.write(path.with_suffix(".flac"), np.zeros(8000, dtype=np.float32), 8000)
    data = path.with_suffix(".flac").read_bytes()
    cells = [{"bytes": data if audio else None, "path": "../../same.flac"} for _ in said]
    table = pa.table({"id": list(range(len(said))), "audio": cells, "text": said})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_parquet_on_the_disk(tmp_path, cache):
    shard(tmp_path / "a.parquet", ["one", "two", "three"])
    shard(tmp_path / "b.parquet", ["four"])
    found = find_clips(str(tmp_path), language="en")
    assert [clip.text for clip in found.clips] == ["one", "two", "three", "four"]
    assert found.clips[3].file == "0001-0000000.flac"
    assert {clip.duration_s for clip in found.clips} == {1.0}
    assert "2 Parquet files of" in found.summary and "text from `text`: 4 clips" in found.summary
    for file in cache.rglob("*.flac"):
        file.touch()
    kept = {path: path.stat().st_mtime_ns for path in cache.rglob("*.flac")}
    assert find_clips(str(tmp_path), language="en") == found
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.flac")} == kept


def test_only_the_audio_that_was_drawn_is_taken_out(tmp_path, cache):
    path = shard(tmp_path / "a.parquet", [str(number) for number in range(9)])
    drawn = find_clips(str(path), limit=2, seed=1).clips
    assert sorted(cache.rglob("*.flac")) == sorted(clip.path for clip in drawn)
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no"), "x.parquet is not a Parquet file"),
        (lambda path: shard(path, ["a"], audio=False), "x.parquet, row 0 has no audio in it"),
        (
            lambda path: pyarrow.parquet.write_table(pa.table({"text": ["a"], "n": [1]}), path),
            r"x.parquet has text, n; expected a column of audio \(bytes and path\) and one of text",
        ),
    ],
)
def test_parquet_that_does_not_fit(tmp_path, make, message):
    make(tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=message):
        find_clips(str(tmp_path))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has one data set, in memory."""
    disk = MemoryFileSystem()
    for number, file in enumerate(FILES):
        path = shard(tmp_path / "x.parquet", [f"{number} first", f"{number} second"])
        disk.pipe(f"datasets/some/speech@abc123/{file}", path.read_bytes())
    siblings = [types.SimpleNamespace(rfilename=name) for name in (*FILES, "README.md")]

    def dataset_info(self, name, revision, timeout):
        assert revision == "refs/convert/parquet"
        if name != "some/speech":
            response = types.SimpleNamespace(headers={}, request=None)
            raise errors.RepositoryNotFoundError("none", response=response)
        return types.SimpleNamespace(sha="abc123", siblings=siblings)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: disk)


def test_a_data_set_of_the_hub(hub):
    for place in ("hf:some/speech", "hf:some/speech:clean", "hf:some/speech:clean:test"):
        found = find_clips(place)
        assert [c.text for c in found.clips] == ["0 first", "0 second", "1 first", "1 second"]
    assert "some/speech of the Hugging Face hub, clean/test, revision abc123" in found.summary
    assert find_clips("hf:some/speech:clean:train").clips[0].text == "2 first"


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("hf:speech", ConfigError, "hf:speech: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG"),
        ("hf:some/speech:clean:dev", ConfigError, "it has clean:test, clean:train; expected"),
        (
            "hf:some/none",
            UnavailableError,
            "some/none cannot be had from the Hugging Face hub: none; expected a data",
        ),
    ],
)
def test_what_the_hub_does_not_have(hub, place, error, message):
    with pytest.raises(error, match=message):
        find_clips(place)


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    def dataset_info(*_, **__):
        raise OSError("Name or service not known\nand a long trace")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    with pytest.raises(
        UnavailableError,
        match=r"Name or service not known; expected .*; without a network, name a folder on",
    ):
        find_clips("hf:some/speech")
