"""Scenarios run each on its own server, and whatever they find is kept."""

import functools
import json
import pkgutil
import re

import pytest

import eval.config
from build.clips import load_clips
from eval.__main__ import main
from eval.server import role_of
from eval.soak import SCENARIOS, scenarios
from eval.soak.run import soak
from eval.soak.stage import Stage
from serve.contract.errors import AudioError
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits
from serve.speech.sandbox import client as sandbox_client


def kept(folder):
    return json.loads((folder / "soak.json").read_text())["figures"]["scenarios"]


def test_every_scenario_can_be_run():
    for entry, _ in SCENARIOS.values():
        assert callable(pkgutil.resolve_name(f"eval.soak.{entry}"))


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "-m", "serve", "start", "--config", "a"], "supervisor"),
        (["python", "-m", "serve.gateway", "--folder", "a"], "gateway"),
        (["/x/bin/tritonserver", "--model-repository=/tmp/models"], "tritonserver"),
        (["/b/triton_python_backend_stub", "/tmp/e/models/whisper/1/model.py"], "whisper"),
        (["python", "-c", sandbox_client._BOOTSTRAP], "sandbox"),
        ([], "unnamed"),
    ],
)
def test_processes_have_the_roles_that_disruptions_name(command, role):
    assert role_of(command) == role


def test_findings_are_written_as_they_come(monkeypatch, tmp_path, run_of):
    def killers(stage):
        stage.add("tried", 7)
        raise AudioError("odd")

    def floods(stage):
        (first,) = kept(tmp_path)
        figures = {one["name"]: (one["value"], one["passed"]) for one in first["figures"]}
        assert figures["tried"] == (7.0, True)
        assert figures["scenario ended early"] == (1.0, False)
        raise KeyboardInterrupt

    monkeypatch.setattr(scenarios, "killers", killers)
    monkeypatch.setattr(scenarios, "floods", floods)
    with pytest.raises(KeyboardInterrupt):
        soak(run_of(command="soak"), minutes=5, seed=0, scenarios=["killers", "floods"])
    _, second = kept(tmp_path)
    assert second["figures"][0]["passed"] is None


def test_a_broken_limit_fails_the_command(monkeypatch, tmp_path, capsys):
    command = f"soak --config configs/demo.toml --scenario killers --output {tmp_path}"
    for value, code in ((1, 0), (3, 1)):
        found = functools.partial(Stage.at_most, name="waits, s", value=value, limit=2)
        monkeypatch.setattr(scenarios, "killers", found)
        assert main(command.split()) == code
    out = capsys.readouterr().out
    assert re.search(r"\| waits, s +\| +3 \| +at most 2 \| +FAILED \|", out)
    whole = (tmp_path / "report.md").read_text()
    assert "- **FAILED**: killers: waits, s. 3, at most 2" in whole


def test_an_unknown_scenario_is_refused_by_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["soak", "--config", "configs/demo.toml", "--scenario", "stal"])
    assert "invalid choice: 'stal'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server_holds(nano_config, tmp_path, run_of):
    product = eval.config.EvaluationProduct(**vars(nano_config()))
    soak(run_of(product, "soak"), minutes=1, seed=1, scenarios=None)
    record = json.loads((tmp_path / "soak.json").read_text())
    bad = [check for check in record["checks"] if check["passed"] is False]
    assert not bad, bad
    (finding,) = record["figures"]["scenarios"]
    values = {figure["name"]: figure["value"] for figure in finding["figures"]}
    assert values["disruptions"] >= 1 and values["requests answered"] >= 1, values


def test_a_long_file_is_made_of_the_clips_in_turn(monkeypatch):
    monkeypatch.setattr("eval.soak.scenarios._HOUR_S", 12)
    clips = tuple(load_clips("tests/data/manifest.jsonl"))[:3]
    samples = audio.join_blocks(audio.decode(scenarios.hour_of(clips), AudioLimits(13.0)))
    assert abs(len(samples) - 12 * SAMPLE_RATE) < SAMPLE_RATE // 4
