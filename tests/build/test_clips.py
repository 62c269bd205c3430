import json

import pytest

from build.clips import load_clips
from serve.contract.errors import ConfigError


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
    told = {**GOOD, "group": "en/readers", "half": "report"}
    clips = load_clips(manifest(tmp_path, told, "", silent))
    assert [(c.file, c.text, c.language, c.duration_s) for c in clips] == [
        ("a.wav", "Hello.", "en", 2.0),
        ("b.wav", "", None, 5.0),
    ]
    assert clips[0].path == tmp_path / "a.wav"
    assert [(c.group, c.half) for c in clips] == [("en/readers", "report"), ("", "")]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "lists no clips"),
        (["{"], r"manifest.jsonl:1 is not JSON"),
        ([GOOD, {**GOOD, "file": "gone.wav"}], r":2: .*gone.wav does not exist"),
        ([GOOD, GOOD], r":2: a.wav is listed twice"),
        (
            [{k: v for k, v in GOOD.items() if k != "text"}],
            ":1: text is missing; has file, language, duration, voice",
        ),
        ([{**GOOD, "text": None}], "text = None; expected text"),
        ([{**GOOD, "duration": 0}], "duration = 0; expected more than 0"),
        ([{**GOOD, "language": None}], "needs a language"),
    ],
)
def test_refuses_by_line_and_field(tmp_path, lines, said):
    (tmp_path / "a.wav").touch()
    with pytest.raises(ConfigError, match=said):
        load_clips(manifest(tmp_path, *lines))
