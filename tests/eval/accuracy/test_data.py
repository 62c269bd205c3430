import json

import pytest

from eval.accuracy.data import load_clips, read_rows, row_to_json, ten_second_clip, write_text
from serve.errors import ConfigError
from tests.eval_fakes import row, write_clips


def manifest(folder, *lines):
    path = folder / "manifest.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


GOOD = {"file": "a.wav", "text": "Hello.", "language": "en", "duration": 2, "voice": "x"}


def test_reads_clips_and_ignores_other_keys(tmp_path):
    (tmp_path / "a.wav").touch()
    (tmp_path / "b.wav").touch()
    silent = {"file": "b.wav", "text": "", "language": None, "duration": 5.0}
    clips = load_clips(manifest(tmp_path, GOOD, "", silent))
    assert [(c.file, c.text, c.language, c.duration_s) for c in clips] == [
        ("a.wav", "Hello.", "en", 2.0),
        ("b.wav", "", None, 5.0),
    ]
    assert clips[0].path == tmp_path / "a.wav"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "lists no clips"),
        (["{"], r"manifest.jsonl:1 is not JSON"),
        (["[]"], "must be a JSON object, got list"),
        ([GOOD, {**GOOD, "file": "gone.wav"}], r":2: .*gone.wav does not exist"),
        ([GOOD, GOOD], r":2: a.wav is listed twice"),
        ([{k: v for k, v in GOOD.items() if k != "text"}], "'text' is missing"),
        ([{**GOOD, "text": None}], "text is None; expected str"),
        ([{**GOOD, "duration": "2"}], "duration is '2'; expected int or float"),
        ([{**GOOD, "duration": True}], "duration is True"),
        ([{**GOOD, "duration": 0}], "expected seconds above 0"),
        ([{**GOOD, "duration": float("nan")}], "expected seconds above 0"),
        ([{**GOOD, "language": None}], "needs its language"),
    ],
)
def test_refuses_by_line_and_field(tmp_path, lines, said):
    (tmp_path / "a.wav").touch()
    with pytest.raises(ConfigError, match=said):
        load_clips(manifest(tmp_path, *lines))


def test_missing_manifest(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the manifest"):
        load_clips(tmp_path / "none.jsonl")


def test_bundled_manifest_is_valid():
    clips = load_clips("tests/data/manifest.jsonl")
    assert len(clips) >= 12
    nearest = ten_second_clip(clips)
    assert nearest is not None and abs(nearest.duration_s - 10) < 1


def test_ten_second_clip_needs_speech(tmp_path):
    clips = write_clips(tmp_path, {"a": "", "b": "x", "c": "", "d": "y"})  # 2, 6, 10, 14 s
    assert ten_second_clip(clips).file in ("b", "d")
    assert ten_second_clip(clips[:1]) is None


def test_rows_survive_the_file(tmp_path):
    rows = [
        row("a", "ça va", "ça va\nbien\u2028sí"),
        row("b", "", "", prediction=None, error="Lost: x"),
    ]
    path = tmp_path / "rows.jsonl"
    write_text(path, "".join(row_to_json(r) + "\n" for r in rows))
    assert read_rows(path) == rows
    assert read_rows(path)[1].text == ""
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_rows_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(row_to_json(row("a", "x", "x")) + '\n{"file": "b"')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2 is not a prediction"):
        read_rows(path)
