"""How a shard becomes a file: what is set aside, what is done again, what ends a run; no Ray."""

import json
import os

import pytest
from pyarrow import parquet

from serve.bulk import worker
from serve.bulk.sharding import BulkOutput
from serve.bulk.worker import ShardWorker
from serve.contract.config import Config
from serve.contract.errors import DeviceError, EngineError, OptionError, OverloadedError
from serve.contract.messages import Request
from serve.speech.cues import CueOptions
from tests.fakes import FakeTranscriber


class Scripted(FakeTranscriber):
    """Raises what it was given for a file's bytes, once each; else answers."""

    def __init__(self, raises=None):
        super().__init__()
        self.raises = raises or {}

    def transcribe(self, request):
        if request.audio in self.raises:
            raise self.raises.pop(request.audio)
        return super().transcribe(request)


@pytest.fixture
def files(tmp_path):
    for name in ("a", "b", "c", "empty"):
        (tmp_path / name).write_bytes(b"" if name == "empty" else name.encode())
    return [f"{tmp_path}/{name}" for name in ("a", "empty", "b", "missing", "c")]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a worker on a transcriber that does as it is told."""

    def start(raises=None, format="jsonl", **more):
        transcriber = Scripted(raises)
        monkeypatch.setattr(worker, "open_transcriber", lambda config: transcriber)
        output = BulkOutput(str(tmp_path / "out"), format, **more)
        monkeypatch.setattr(worker, "MAX_AUDIO_MB", 1)
        do = ShardWorker(Config(), Request(b"", language="es"), output)
        return lambda row: do({"places": [], **row}), output, transcriber

    return start


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_a_shard_holds_what_was_heard_and_the_rest_is_set_aside(start, files):
    do, output, transcriber = start()
    report = do({"number": 7, "files": files})
    assert (report["files"], report["refused"]) == (5, "")
    heard = lines(output.transcripts(7))
    assert [line["file"] for line in heard] == [files[0], files[2], files[4]]
    assert heard[0]["text"].startswith("Hello")
    assert report["audio_s"] == pytest.approx(sum(line["duration"] for line in heard))
    empty, missing = lines(output.failed(7))
    assert (empty["file"], missing["file"]) == (files[1], files[3])
    assert "0 bytes" in empty["error"] and "cannot read" in missing["error"]
    assert {request.language for request in transcriber.requests} == {"es"}
    assert output.gather_failed() == 2


def test_each_recording_gets_files_of_the_formats_that_have_one(start, files, tmp_path):
    do, output, _ = start(texts=("srt", "tsv"), cues=CueOptions(max_line_width=9))
    places = ["a", "empty", "below/b", "missing", "c"]
    do({"number": 0, "files": files, "places": places})
    found = {
        path.relative_to(tmp_path / "out/files").as_posix()
        for path in (tmp_path / "out/files").rglob("*.*")
    }
    assert found == {
        f"{name}.{suffix}" for name in ("a", "below/b", "c") for suffix in ("srt", "tsv")
    }
    assert "\nHello &\ngoodbye.\n" in (tmp_path / "out/files/below/b.srt").read_text()
    assert (tmp_path / "out/files/c.tsv").read_text().startswith("start\tend\ttext\n0\t")
    assert output.done() == {0}


def test_a_shard_that_is_done_is_left_alone(start, files):
    do, _, transcriber = start()
    do({"number": 0, "files": files[:1]})
    assert do({"number": 0, "files": files[:1]})["files"] == 1
    assert len(transcriber.requests) == 1


def test_what_an_unfinished_try_set_aside_is_forgotten(start, files):
    do, output, _ = start()
    worker.store.write(output.failed(0), b'{"file":"a","error":"a network that was away"}\n')
    do({"number": 0, "files": files[:1]})
    assert output.gather_failed() == 0


def test_where_there_is_no_room_a_file_waits(start, files, monkeypatch):
    monkeypatch.setattr(worker, "_RETRY_S", 0.0)
    do, output, _ = start({b"a": OverloadedError("full")})
    assert do({"number": 0, "files": files[:1]})["files"] == 1
    assert output.gather_failed() == 0


def test_a_device_that_fails_leaves_the_shard_to_a_new_process(start, files, monkeypatch):
    do, output, _ = start({b"b": DeviceError("the device is gone")})
    assert do({"number": 0, "files": files})["undone"] == "the device is gone"
    assert output.done() == set() and output.gather_failed() == 0

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(worker.os, "_exit", leave)
    with pytest.raises(SystemExit):
        do({"number": 1, "files": files})


def test_what_is_no_file_or_too_long_is_set_aside_unread(start, tmp_path):
    pipe, long = tmp_path / "pipe", tmp_path / "long"
    os.mkfifo(pipe)
    long.touch()
    os.truncate(long, 1 << 40)
    do, output, transcriber = start()
    do({"number": 0, "files": [str(pipe), str(tmp_path), str(long)]})
    errors = [line["error"] for line in lines(output.failed(0))]
    expected = ["it is not a regular file", "it is a folder", "more than 1 MiB"]
    assert all(text in error for text, error in zip(expected, errors, strict=True))
    assert transcriber.requests == []


def test_an_output_that_takes_nothing_ends_the_run(start, files, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "transcripts").touch()  # where a folder should be
    do, _, _ = start()
    assert "expected a writable --output" in do({"number": 0, "files": files})["refused"]


def test_an_option_that_cannot_be_honoured_sets_no_file_aside(start, files):
    do, output, _ = start({b"a": OptionError("language 'xx' is unknown")})
    assert do({"number": 0, "files": files})["refused"] == "language 'xx' is unknown"
    assert output.done() == set() and output.gather_failed() == 0


def test_an_engine_that_cannot_be_opened_is_told_by_each_shard(monkeypatch, tmp_path):
    def fail(config):
        raise EngineError("no engine at /no")

    monkeypatch.setattr(worker, "open_transcriber", fail)
    do = ShardWorker(Config(), Request(b""), BulkOutput(str(tmp_path), "jsonl"))
    row = {"number": 0, "files": ["a"], "places": []}
    assert do(row)["refused"].startswith("no engine at /no (on ")


def test_shards_of_parquet_have_the_same_columns_even_with_nothing_in_them(start, files):
    do, output, _ = start(format="parquet")
    do({"number": 0, "files": files})
    do({"number": 1, "files": files[1:2]})
    whole, none = (parquet.read_table(output.transcripts(number)) for number in (0, 1))
    assert whole.schema == none.schema
    (words,) = [
        one for one in whole.schema.field("segments").type.value_type if one.name == "words"
    ]
    told = [field.name for field in words.type.value_type]
    assert told == ["start", "end", "word", "probability", "confidence", "low_confidence"]
    assert whole.column("file").to_pylist() == [files[0], files[2], files[4]]
    assert whole.column("segments")[0].as_py()[0]["text"] == " Hello & goodbye."
    assert none.num_rows == 0
