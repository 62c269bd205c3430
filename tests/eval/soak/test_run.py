"""Scenarios run each on a server of its own, and whatever they find is kept."""

import dataclasses
import json
import re
import threading

import pytest

import eval.config
from build.clips import load_clips
from eval.__main__ import main
from eval.record import Check
from eval.server import request, role_of
from eval.soak import MIXED, SCENARIOS, attacks, run
from eval.soak.attacks import KILLERS
from eval.soak.jobs import Receiver
from eval.soak.run import soak
from eval.soak.scenarios import hour_of
from serve.contract.errors import AudioError, ConfigError
from serve.speech import audio
from serve.speech.features import SAMPLE_RATE
from serve.speech.meter import AudioLimits

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


# ---------------------------------------------------------------- hours of audio


def test_a_long_file_is_made_of_the_clips_in_turn(monkeypatch):
    monkeypatch.setattr("eval.soak.scenarios._HOUR_S", 12)
    clips = tuple(load_clips("tests/data/manifest.jsonl"))[:3]
    samples = audio.whole(audio.decode(hour_of(clips), AudioLimits(12.0)))
    assert len(samples) == 12 * SAMPLE_RATE


# ---------------------------------------------------------------- jobs


@pytest.fixture
def receiver():
    with Receiver(seed=0) as receiver:
        threading.Thread(target=receiver.serve_forever, args=(0.01,), daemon=True).start()
        yield receiver
        receiver.shutdown()


def hook(receiver, id, body=b"{}"):
    address = receiver.url.removeprefix("http://")
    return request(address, "POST", "/", body, {"webhook-id": id}, timeout_s=10.0)[0]


def test_webhooks_are_counted_by_their_ids(receiver):
    statuses = [hook(receiver, f"msg_{n}") for n in range(40)]
    rejected = [n for n, status in enumerate(statuses) if status == 503]
    assert 0 < len(rejected) < 20
    assert {hook(receiver, f"msg_{n}") for n in rejected} == {204}  # once each
    assert len(receiver.taken) == 40
    taken = [hook(receiver, "msg_0", b'{"other": 1}') for _ in range(3)].count(204)
    assert receiver.taken["msg_0"] == 1 + taken >= 3
    assert len(receiver.bodies["msg_0"]) == 2


@pytest.mark.nightly
@pytest.mark.server
def test_no_job_is_lost_while_processes_are_killed(nano_config, tmp_path, run_of, monkeypatch):
    monkeypatch.setattr("eval.soak.jobs._APART_S", (1.0, 2.0))
    product = eval.config.EvaluationProduct(**vars(nano_config()))
    soak(run_of(product, "soak"), minutes=0.3, actions=None, seed=1, scenarios=["jobs"])
    record = json.loads((tmp_path / "soak.json").read_text())
    assert record["verdict"] == "passed", record["checks"]
    (finding,) = record["figures"]["scenarios"]
    assert finding["figures"]["kills"] >= 1 and finding["figures"]["accepted (202)"] == 12
