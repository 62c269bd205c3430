"""Our tokens against CTranslate2's own, on the demo checkpoint."""

import dataclasses
import json
import re

import pytest

from build.checkpoint import open_checkpoint
from build.config import BuildConfig
from eval.accuracy import prepare, same_tokens
from eval.config import Config, EvalConfig
from eval.measurement import verdict
from serve.contract.config import RuntimeConfig
from tests.checkpoints import write_engine

CLIPS = ("en_thanks.flac", "es_question.wav")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(same_tokens, "prepare_engine", lambda *_: None)
    build = BuildConfig(precision="fp16")
    engine = write_engine(open_checkpoint(build.checkpoint), tmp_path / "engine", "fp16")
    return Config(engine=str(engine.path), build=build, runtime=RuntimeConfig(threads=1))


@pytest.fixture
def manifest(tmp_path):
    source = same_tokens.Path("tests/data").resolve()
    lines = (source / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    path = tmp_path / "manifest.jsonl"
    path.write_text(
        "".join(
            json.dumps({**entry, "file": str(source / entry["file"])}) + "\n"
            for entry in entries
            if entry["file"] in CLIPS
        )
    )
    return str(path)


@pytest.mark.nightly
def test_tokens_equal_ctranslate2s_and_both_are_scored_alike(config, manifest, monkeypatch, run_of):
    told = []
    config = dataclasses.replace(config, eval=EvalConfig(manifest=manifest))
    run = run_of(config, said=told)
    result = same_tokens.compare_tokens(run, beams=(1, 5))
    assert result.figures == {"beam 1": 1.0, "beam 5": 1.0}
    assert verdict(result.checks) == "passed"
    assert told == [f"beam {beam}: 2 of 2 windows equal, 100.00%" for beam in (1, 5)]

    decode = same_tokens._Theirs.decode

    def greedy(self, window, beam):  # what is said of another search is told, and what it costs
        tokens, score = decode(self, window, 1)
        return (tokens[:-1], score) if "es_" in window.name else (tokens, score)

    monkeypatch.setattr(same_tokens._Theirs, "decode", greedy)
    told.clear()
    result = same_tokens.compare_tokens(run, beams=(1,))
    assert (result.figures, verdict(result.checks)) == ({"beam 1": 0.5}, "failed")
    found = re.search(
        r"equal up to token (\d+); ours scores (\S+), theirs (\S+) .* (\S+)\)", told[0]
    )
    ours, theirs, reported = (float(number) for number in found.groups()[1:])
    assert ours > theirs + 0.01
    assert ours == pytest.approx(reported, abs=2e-4)  # of the whole sequence
