"""The command over an engine of a tiny shape with random weights, and a stand-in for nsys."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.profile import UNDER_NSYS
from eval.random_whisper import PUBLISHED
from serve.native.stopwatch import Stopwatch
from tests.eval.bench.conftest import tiny

__all__ = ["tiny"]  # a fixture

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def config(tmp_path, tiny, monkeypatch):
    """A config of the tiny shape, for a CPU."""
    monkeypatch.setitem(PUBLISHED, "large-v3-turbo", tiny)
    path = tmp_path / "tiny.toml"
    path.write_text(
        'name = "tiny"\n[build]\ncheckpoint = "openai/whisper-large-v3-turbo"\n'
        "[runtime]\nslots = 2\nthreads = 1\n[transcriber]\nmax_tokens = 6\n"
    )
    return path


def test_a_load_is_profiled(config, tmp_path, capsys):
    clip = {"file": f"{DATA}/en_question.wav", "text": "what", "language": "en"}
    (tmp_path / "clips.jsonl").write_text(json.dumps(clip))
    clips = [
        "--clips",
        str(tmp_path / "clips.jsonl"),
        "--requests",
        "2",
        "--at-once",
        "1",
        "--words",
    ]
    output = ["--output", str(tmp_path / "out")]
    assert main(["profile", "--config", str(config), "--random-weights", *clips, *output]) == 0
    assert Stopwatch.ranges is None
    printed = capsys.readouterr().out
    assert "aten::" in printed and "of audio" in printed
    figures = json.loads((tmp_path / "out" / "profile.json").read_text())["figures"]
    phases = {phase["name"]: phase for phase in figures["phases"]}
    assert {"encode", "prompts", "steps", "words"} < phases.keys()
    assert all(phase["busy_s"] > 0 for name, phase in phases.items() if name != "between")
    assert 0 < figures["busy_s"] <= figures["seconds"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<title>profile: tiny</title>" in page and "<script" not in page
    for section in ("phases", "kernels", "gaps", "conditions"):
        assert f'<section id="{section}">' in page
    with gzip.open(tmp_path / "out" / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"load", "encode", "prompts", "steps", "words"} <= names


def test_nsys_is_refused_by_name_where_it_is_missing(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile", "--config", str(config), "--nsys"]) == 1
    assert "nsys is not in PATH; install it, or leave --nsys out" in capsys.readouterr().err


def test_nsys_runs_the_same_load(config, tmp_path, capsys, monkeypatch):
    program, calls = tmp_path / "nsys", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" under=${UNDER_NSYS} >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    options = ["profile", "--config", str(config), "--output", str(tmp_path / "out"), "--nsys"]
    assert main(options) == 2
    assert "needs runtime.device = \"cuda\", got 'cpu'" in capsys.readouterr().err
    config.write_text(config.read_text().replace("[runtime]", '[runtime]\ndevice = "cuda:0,1"'))
    again = ["python", "-m", "eval", *options, "--words"]
    monkeypatch.setattr(sys, "orig_argv", again)
    assert main(again[3:]) == 0
    assert str(tmp_path / "out" / "profile.nsys-rep") in capsys.readouterr().out
    called = calls.read_text().split()
    assert called[0] == "profile" and "--capture-range=cudaProfilerApi" in called
    assert called[-len(again) - 1 :] == [*again, "under=1"]
    program.write_text("#!/bin/sh\nexit 3\n")
    assert main(options) == 1
    assert "ended with status 3" in capsys.readouterr().err
