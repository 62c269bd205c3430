import pytest

from eval.accuracy.predictions import clip_nearest_10_s, read_calls
from eval.record import write_text
from serve.contract.codec import to_json
from serve.contract.errors import ConfigError, FileError
from tests.eval.fakes import timed_call, write_clips


def test_the_clip_nearest_10_s_needs_speech(tmp_path):
    clips = write_clips(tmp_path, {"a": "", "b": "x", "c": "", "d": "y"})  # 2, 6, 10, 14 s
    assert clip_nearest_10_s(clips).file in ("b", "d")
    assert clip_nearest_10_s(clips[:1]) is None


def test_rows_survive_the_file(tmp_path):
    rows = [
        timed_call("a", "ça va", "ça va\nbien\u2028sí"),
        timed_call("b", "", "", prediction=None, error="Lost: x"),
    ]
    path = tmp_path / "rows.jsonl"
    write_text(path, "".join(to_json(r) + "\n" for r in rows))
    assert read_calls(path) == rows
    assert read_calls(path)[1].text == ""
    assert list(tmp_path.iterdir()) == [path]


def test_predictions_that_are_not_text(tmp_path):
    """They once ended in a stack trace."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(FileError, match=r"rows.jsonl: byte 0 is not UTF-8"):
        read_calls(path)


def test_rows_of_another_version_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"file": "b"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: reference is missing; has file; expect"):
        read_calls(path)
