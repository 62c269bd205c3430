"""What streams play."""

import json

import numpy as np
import pytest
import soundfile

from eval.config import EvalConfig, EvaluationProduct
from eval.live import passages
from serve.contract.errors import ConfigError
from serve.speech.rate import SAMPLE_RATE


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("eval.accuracy.passages.CACHE", tmp_path / "cache")


@pytest.fixture
def table(tmp_path):
    """Writes a manifest of clips with tones; returns its path."""

    def write(*clips):
        lines = []
        for number, (seconds, fields) in enumerate(clips):
            file = f"{number}.wav"
            tone = np.sin(np.arange(round(seconds * SAMPLE_RATE)) * 0.1) * 0.1
            soundfile.write(tmp_path / file, tone, SAMPLE_RATE)
            entry = {"file": file, "text": f"text {number}", "language": "en", "duration": seconds}
            lines.append(json.dumps(entry | fields))
        path = tmp_path / "manifest.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def by(speaker, group="a", half="report"):
    return {"speaker": speaker, "group": group, "half": half}


def played(place, half="", groups=EvalConfig.gate_groups):
    return passages(
        EvaluationProduct(eval=EvalConfig(manifest=place, half=half, gate_groups=groups)), 10.0
    )


def texts(clips):
    return [clip.text for clip in clips]


def test_clips_of_each_speaker_are_joined_and_groups_take_turns(table):
    place = table(
        *[(4.0, by("one"))] * 4, *[(4.0, by("two", "b"))] * 2, (4.0, by("three", "b", "choose"))
    )
    found = played(place, "report")
    assert texts(found) == ["text 0 text 1", "text 4 text 5", "text 2 text 3"]
    assert all(8.3 <= clip.duration_s <= 8.8 for clip in found), "with a pause between"
    assert texts(played(place))[-1] == "text 2 text 3"
    with pytest.raises(ConfigError, match="lists no clips of the half 'other'"):
        played(place, "other")


def test_what_stays_short_is_left_out_where_there_are_passages(table):
    long_alone = (6.0, {"group": "b", "half": "report"})
    place = table(*[(4.0, by("one"))] * 2, (2.0, by("two")), long_alone)
    assert texts(played(place)) == ["text 0 text 1", "text 3"]
    place = table((2.0, {"group": "b"}), (1.0, {"group": "a"}))
    assert texts(played(place)) == ["text 1", "text 0"], "as they are"


def test_of_the_configs_own_clips_the_groups_of_its_gates_are_taken(table):
    place = table((6.0, by("one")), (6.0, by("two", "hard")))
    assert texts(played(place, groups=("a",))) == ["text 0"]
    assert texts(played(place)) == ["text 0", "text 1"]


def test_what_has_no_text_says_nothing(table):
    place = table((6.0, by("one")), (6.0, {"text": "", "language": None}))
    assert texts(played(place)) == ["text 0"]
    with pytest.raises(ConfigError, match="has no clip with text; expected some"):
        played(table((6.0, {"text": "", "language": None})))
