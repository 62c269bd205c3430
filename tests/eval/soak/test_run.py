"""Scenarios are run each on a server of its own, and whatever they find is kept."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

import eval.config
from build.clips import load_clips
from eval.__main__ import main
from eval.record import Check
from eval.server import role_of
from eval.soak import attacks, run, stage
from eval.soak.attacks import KILLERS
from eval.soak.plan import SCENARIOS
from eval.soak.run import soak
from serve.contract.errors import AudioError, ConfigError, EarshotError

CLIPS = "tests/data/manifest.jsonl"
GOOD = Check("good", True, "yes")
ALL = {"minutes": 5, "actions": None, "seed": 0}


@pytest.fixture
def acted(monkeypatch):
    """Servers that are none; what attacks yield is set by name."""
    attacks = {}

    @contextlib.contextmanager
    def fake(config, clips, say):
        server = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), stop=lambda: (0, 1.5))
        yield SimpleNamespace(server=server)

    monkeypatch.setattr(run, "stage", fake)
    monkeypatch.setattr(run, "_ATTACKS", attacks)
    return attacks


def test_every_scenario_has_its_attack():
    assert run._ATTACKS.keys() | run._OF_THEIR_OWN.keys() == SCENARIOS.keys()
    assert run._CONFIGS.keys() <= SCENARIOS.keys()


def test_findings_are_written_as_they_come(acted, tmp_path, run_of):
    def killers(stage):
        yield GOOD
        yield "tried", 7
        raise AudioError("odd")

    def descriptors(stage):
        (first,) = json.loads((tmp_path / "soak.json").read_text())["figures"]["scenarios"]
        assert first["figures"] == {"tried": 7.0, "stopped after SIGTERM, s": 1.5}
        told = [(check["name"], check["passed"]) for check in first["checks"]]
        assert ("good", True) in told
        assert ("the scenario comes to its end", False) in told
        raise KeyboardInterrupt

    acted.update(killers=killers, descriptors=descriptors)
    with pytest.raises(KeyboardInterrupt):
        soak(run_of(command="soak"), **ALL, scenarios=["killers", "descriptors"])
    assert len(json.loads((tmp_path / "soak.json").read_text())["figures"]["scenarios"]) == 1


def test_a_failed_check_fails_the_command(acted, tmp_path, capsys):
    acted["killers"] = lambda stage: iter([Check("it lives", acted["passed"], "seen")])
    arguments = ["soak", "--config", "configs/demo.toml", "--scenario", "killers"]
    arguments += ["--output", str(tmp_path)]
    acted["passed"] = True
    assert main(arguments) == 0
    acted["passed"] = False
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert re.search(r"\| killers +\| FAILED \| +0 s \| it lives: seen \|", out)
    whole = (tmp_path / "report.md").read_text()
    assert "## killers: requests that ended" in whole and "- FAILED: it lives: seen" in whole


def test_an_unknown_scenario_is_refused_by_name(run_of):
    with pytest.raises(ConfigError, match="no scenario 'stal'; there are short-beside-long, "):
        soak(run_of(), **ALL, scenarios=["stal"])


@pytest.mark.nightly
@pytest.mark.server
def test_a_real_server_is_attacked(nano_config, monkeypatch):
    """With what is quick, so that the path is tried, not the server."""
    quick = {name: KILLERS[name] for name in ("a playlist", "a torn message by gRPC")}
    monkeypatch.setattr(attacks, "KILLERS", quick)
    config = eval.config.Config(**vars(nano_config()))
    found = run.attacked("killers", config, tuple(load_clips(CLIPS))[:2], lambda _: None)
    assert found.verdict == "passed", found
    good = {check.name for check in found.checks if check.passed}
    assert good >= {"a playlist: the server lives and answers", "it stops when it is asked to"}


@pytest.mark.nightly
def test_a_server_that_does_not_start_says_why(nano_config, tmp_path):
    config = dataclasses.replace(nano_config(), engine=str(tmp_path / "none"))
    server = stage.stage(eval.config.Config(**vars(config)), (), lambda _: None)
    with pytest.raises(EarshotError, match=r"did not start(?s:.*)none"):
        server.__enter__()


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
