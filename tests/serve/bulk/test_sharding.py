"""Which files a run has, in which shards, and what it refuses; no Ray."""

import http.server
import json
import threading

import pytest

from serve.bulk import store
from serve.bulk.sharding import (
    BulkOutput,
    Shard,
    find_files,
    keep_or_compare,
    places_below,
    shards_of,
)
from serve.cli import bulk
from serve.cli.main import main
from serve.contract.errors import ConfigError, FileError


@pytest.fixture
def folder(tmp_path):
    """Audio in two folders of one, and other files."""
    for name in ("b.wav", "sub/a.MP3", "a b.flac", "notes.txt", ".hidden.wav"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "in"


def manifest(folder, *files):
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps({"file": file, "text": "x"}) + "\n\n" for file in files))
    return str(path)


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])  # the last is fsspec's
def test_a_folder_is_its_audio_in_order_of_names(folder, scheme):
    name = f"{scheme}{folder}"
    files, others = find_files(name)
    assert files == [f"{name}/a b.flac", f"{name}/b.wav", f"{name}/sub/a.MP3"]
    assert others == 1
    assert [store.read(file) for file in files] == [b"a b.flac", b"b.wav", b"sub/a.MP3"]


def test_a_manifest_names_files_beside_it_and_anywhere(folder):
    name = manifest(folder, "b.wav", "/elsewhere/c.wav", "s3://bucket/d.wav", "b.wav", "notes.txt")
    files, others = find_files(name)
    expected = [f"{folder}/b.wav", "/elsewhere/c.wav", "s3://bucket/d.wav", f"{folder}/notes.txt"]
    assert (files, others) == (expected, 0)


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_file_is_written_as_a_whole_and_replaced(tmp_path, scheme):
    name = f"{scheme}{tmp_path}/new/folder/file"
    for content in (b"first", b"second"):
        store.write(name, content)
        assert store.read(name) == content
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["file"]
    store.delete(name)
    store.delete(name)
    assert store.names_in(f"{scheme}{tmp_path}") == []


def test_what_cannot_be_reached_says_so(tmp_path):
    with pytest.raises(FileError, match=r"cannot reach 'nosuch://bucket'.*expected a folder, or a"):
        store.read("nosuch://bucket/a.wav")
    with pytest.raises(FileError, match=r"cannot read /no/such.wav: .*expected a file that exists"):
        store.read("/no/such.wav")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write .*expected a writable --output"):
        store.write(f"{tmp_path}/file/below", b"")


def test_a_name_that_is_not_utf_8_is_told(tmp_path):
    (tmp_path / "\udcff.wav").touch()
    with pytest.raises(FileError, match=r"\\xff.wav is not UTF-8; rename the file"):
        find_files(str(tmp_path))


def test_shards_hold_each_file_once_in_order():
    files = [str(i) for i in range(7)]
    shards = shards_of(files, 3)
    assert shards == [Shard(0, ("0", "1", "2")), Shard(1, ("3", "4", "5")), Shard(2, ("6",))]


def test_files_lie_as_their_recordings_do(folder):
    name = str(folder)
    (folder / "b.mp3").touch()
    files, _ = find_files(name)
    assert places_below(files, name) == ["a b", "b.mp3", "b.wav", "sub/a"]
    assert shards_of(files, 3, places_below(files, name))[1] == Shard(1, (files[3],), ("sub/a",))
    listed = manifest(
        folder, "sub/../b.wav", "/elsewhere/c.wav", "s3://bucket/d.wav", "../../e.wav"
    )
    away = str(folder.parents[1] / "e").lstrip("/")
    files, _ = find_files(listed)
    assert places_below(files, listed) == ["b", "elsewhere/c", "s3/bucket/d", away]


def test_what_is_done_is_told_by_whole_files_of_transcripts(tmp_path):
    output = BulkOutput(str(tmp_path), "parquet")
    assert output.done() == set()
    store.write(output.transcripts(12), b"")
    (tmp_path / "transcripts" / ".000013.parquet.abc").touch()  # a writer died
    store.write(output.failed(14), b"")
    (tmp_path / "transcripts" / "notes.parquet").touch()
    assert output.done() == {12}


def test_another_run_never_mixes_with_one(tmp_path):
    output = BulkOutput(str(tmp_path), "jsonl")
    kept = {"files": 3, "options": {"language": None, "beam_size": 5, "speech": {"vad": True}}}
    keep_or_compare(output, kept)
    keep_or_compare(output, kept)
    other = {"files": 4, "options": {"language": "en", "beam_size": 5, "speech": {"vad": True}}}
    with pytest.raises(ConfigError) as refused:
        keep_or_compare(output, other)
    assert str(refused.value) == (
        f"{tmp_path} has a run with other settings: files was 3 and is now 4; options.language was "
        'null and is now "en"; choose another --output, or use the same settings'
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--input", "/no/such"], "/no/such does not exist; expected a folder of audio, or a"),
        (["--input", "{empty}"], "{empty} has no audio; expected a folder"),
        (["--input", "{folder}", "--shard-files", "0"], "--shard-files 0; expected at least 1"),
        (["--input", "{folder}", "--output", "{folder}/b.wav/x"], "expected a writable --output"),
        (["--input", "{folder}", "--format", "jsonl,parquet"], "expected jsonl or parquet, and"),
        (["--input", "{folder}", "--cue", "max_line_width=9"], "needs --format srt or vtt"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    names = {"folder": str(folder), "empty": str(tmp_path / "empty")}
    toml = tmp_path / "some.toml"
    toml.write_text("")
    words = [argument.format(**names) for argument in arguments]
    assert main(["bulk", "--config", str(toml), "--output", str(tmp_path / "out"), *words]) == 2
    errors = capsys.readouterr().err
    assert message.format(**names) in errors
    assert len(errors.splitlines()) == 1


def test_s3_is_where_the_environment_says(monkeypatch):
    """A server of one object, as pyarrow asks for it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            there = self.path == "/calls/a%20b.wav"
            self.send_response(200 if there else 404)
            self.send_header("Content-Length", "5" if there else "0")
            self.end_headers()
            if there and self.command == "GET":
                self.wfile.write(b"audio")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        store._opened.cache_clear()
        try:
            assert store.read("s3://calls/a b.wav") == b"audio"
            with pytest.raises(FileError, match="it does not exist"):
                store.read("s3://calls/c.wav")
            store._opened.cache_clear()
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "localhost:9000")
            with pytest.raises(FileError, match=r"'localhost:9000'; expected http://"):
                store.read("s3://calls/a b.wav")
        finally:
            store._opened.cache_clear()
            server.shutdown()


def test_where_packages_are_missing_they_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bulk, "_NEEDED", ("json", "no_such_package"))
    (tmp_path / "some.toml").touch()
    words = ["--config", tmp_path / "some.toml", "--input", tmp_path, "--output", tmp_path]
    assert main(["bulk", *map(str, words)]) == 2
    assert "not installed: no_such_package; install" in capsys.readouterr().err
