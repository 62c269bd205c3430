"""Scenarios run each on a server of its own, and whatever they find is kept."""

import dataclasses
import json
import re

import pytest

import eval.config
from eval.__main__ import main
from eval.record import Check
from eval.server import role_of
from eval.soak import MIXED, SCENARIOS, attacks, run
from eval.soak.attacks import KILLERS
from eval.soak.run import soak
from serve.contract.errors import AudioError, ConfigError

GOOD = Check("good", True, "yes")
ALL = {"minutes": 5, "actions": None, "seed": 0}


@pytest.fixture
def scenarios(monkeypatch):
    """Scenarios by name, which tests set."""
    scenarios = {}
    monkeypatch.setattr(run, "_SCENARIOS", scenarios)
    return scenarios


def kept(folder):
    return json.loads((folder / "soak.json").read_text())["figures"]["scenarios"]


def test_every_scenario_can_be_run():
    assert run._SCENARIOS.keys() == {MIXED, *SCENARIOS}


def test_findings_are_written_as_they_come(scenarios, tmp_path, run_of):
    def killers(settings):
        yield GOOD
        yield "tried", 7
        raise AudioError("odd")

    def floods(settings):
        (first,) = kept(tmp_path)
        assert first["figures"] == {"tried": 7.0}
        checks = [(check["name"], check["passed"]) for check in first["checks"]]
        assert checks == [("good", True), ("the scenario comes to its end", False)]
        yield GOOD
        raise KeyboardInterrupt

    scenarios.update(killers=killers, floods=floods)
    with pytest.raises(KeyboardInterrupt):
        soak(run_of(command="soak"), **ALL, scenarios=["killers", "floods"])
    _, second = kept(tmp_path)
    assert [check["passed"] for check in second["checks"]] == [True, None]


def test_a_failed_check_fails_the_command(scenarios, tmp_path, capsys):
    scenarios["killers"] = lambda _: iter([Check("it lives", passed, "seen")])
    arguments = ["soak", "--config", "configs/demo.toml", "--scenario", "killers"]
    arguments += ["--output", str(tmp_path)]
    passed = True
    assert main(arguments) == 0
    passed = False
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert re.search(r"\| killers +\| FAILED \| +0 s \| it lives: seen \|", out)
    whole = (tmp_path / "report.md").read_text()
    assert "## killers: requests that ended" in whole
    assert "- **FAILED**: killers: it lives. seen" in whole


def test_an_unknown_scenario_is_refused_by_name(run_of):
    with pytest.raises(ConfigError, match="no scenario 'stal'; there are short-beside-long, "):
        soak(run_of(), **ALL, scenarios=["stal"])


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server_is_attacked(nano_config, tmp_path, monkeypatch, run_of):
    """With quick attacks, because the path is tested and not the server."""
    quick = {name: KILLERS[name] for name in ("a playlist", "a torn message by gRPC")}
    monkeypatch.setattr(attacks, "KILLERS", quick)
    product = eval.config.EvaluationProduct(**vars(nano_config()))
    soak(run_of(product, "soak"), **ALL, scenarios=["killers"])
    (finding,) = kept(tmp_path)
    assert all(check["passed"] for check in finding["checks"]), finding
    good = {check["name"] for check in finding["checks"]}
    assert good >= {"a playlist: the server lives and answers", "it stops when it is asked to"}


@pytest.mark.nightly
def test_a_server_that_does_not_start_fails_the_scenario(nano_config, tmp_path, run_of):
    product = eval.config.EvaluationProduct(**vars(nano_config()))
    product = dataclasses.replace(product, engine=str(tmp_path / "none"))
    soak(run_of(product, "soak"), **ALL, scenarios=["killers"])
    (finding,) = kept(tmp_path)
    (check,) = finding["checks"]
    assert check["passed"] is False and "did not start" in check["detail"]


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "-m", "serve", "start", "--config", "a"], "supervisor"),
        (["python", "-m", "serve.gateway", "--folder", "a"], "gateway"),
        (["/x/bin/tritonserver", "--model-repository=/tmp/models"], "tritonserver"),
        (["/b/triton_python_backend_stub", "/tmp/e/models/whisper/1/model.py"], "whisper"),
        (["python", "-c", "from serve.speech.sandbox.server import main"], "sandbox"),
        ([], "unnamed"),
    ],
)
def test_processes_are_named_by_what_they_do(command, role):
    assert role_of(command) == role
