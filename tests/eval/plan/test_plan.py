"""Planning: what a load needs, what is refused, and what autoscaling makes of a day."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from eval.__main__ import main
from eval.bench import run as bench
from eval.bench.table import OURS, Measurement, refused
from eval.config import load_config
from eval.plan.day import arrivals_per_s
from eval.plan.measured import COMMITTED, Level, Measured, find_measured
from eval.plan.policy import SYNC_S, Autoscaler, Policy, Step, read_policy
from eval.plan.replay import replay
from eval.plan.run import steady
from eval.plan.sweep import SHARES, Simulation, choose, fixed, with_share
from serve.contract.errors import ConfigError

CONFIG = "configs/large-v3-turbo.toml"
TURBO = load_config(CONFIG)
TURBO = dataclasses.replace(TURBO, transcriber=dataclasses.replace(TURBO.transcriber, beam_size=1))
POLICY = Path("deploy/kubernetes/components/keda/scale.yaml")
# A GPU of round numbers.
GPU = Measured("here", "made up", 100.0, (Level(50, 0.1, 0.2), Level(90, 0.3, 0.6)), None, 10.0)
STEPS = (Step(2, 100.0, 30),), (Step(1, 0.0, 60),)
SCALED = Policy(1, 10, 0.1, 60.0, *STEPS, 0, 300)


# ---------------------------------------------------------------- what a load needs


@pytest.mark.parametrize("p99_s, each", [(0.2, 50), (0.4, 70), (0.6, 90), (9.0, 90)])
def test_a_gpu_takes_what_its_p99_allows(p99_s, each):
    assert GPU.most_per_s(p99_s) == pytest.approx(each, abs=0.1)


def test_a_p99_that_was_never_measured_is_refused(capsys):
    arguments = ["--config", CONFIG, "--load", "10", "--p99", "0.01", "--beam-size", "1"]
    assert main(["plan", *arguments]) == 2
    assert "--p99 0.01 cannot be promised: at 59 requests" in capsys.readouterr().err


def test_gpus_and_cost():
    lines = steady(GPU, 400.0, 0.4, 2.0)
    found = {line.partition(" ")[0]: line for line in lines}
    assert found["GPUs"].split()[1] == "6"  # of 70 a second
    assert found["audio"].split()[1] == "4000"
    assert float(found["cost"].split()[1]) == pytest.approx(6 * 2 / 4000)
    assert "give --price" in steady(GPU, 400.0, 0.4, None)[-1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config", "configs/demo.toml"], "nothing has been measured of demo"),
        (["--config", CONFIG], "beam_size = 1, and this is 5"),
        (["--config", CONFIG, "--measured", "nowhere.json"], "nowhere.json"),
        (["--config", CONFIG, "--beam-size", "1", "--simulate"], "--provision-s"),
    ],
)
def test_what_nobody_measured_or_told_is_refused(capsys, arguments, said):
    assert main(["plan", *arguments, "--load", "10", "--p99", "1"]) == 2
    assert said in capsys.readouterr().err


def bench_file(tmp_path, change):
    text = (COMMITTED / "large-v3-turbo.json").read_text(encoding="utf-8")
    table = json.loads(text)
    change(table)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return path


def test_what_the_bench_writes_is_read(tmp_path, monkeypatch):
    path, written = tmp_path / "bench.json", []
    rows = json.loads((COMMITTED / "large-v3-turbo.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        row["system"] = row["system"].replace("earshot", "earshot, 64 slots", row["system"] == OURS)
        written.append(Measurement(**row, ideal=None))
    written.append(Measurement("latency", "vllm", 63.9, "ms", None))
    written.append(refused("mlperf", OURS, "samples/s", ConfigError("no memory")))
    monkeypatch.setattr(bench, "check", lambda *_: None)
    monkeypatch.setattr(bench, "device_facts", lambda *_: {"device": "H200"})
    monkeypatch.setattr(bench, "measurements", lambda *_: iter(written))
    arguments = ["--config", CONFIG, "--json", str(path), "--peers="]
    assert main(["bench", *arguments]) == 0
    committed, found = find_measured(TURBO, None), find_measured(TURBO, path)
    apart = {"source": "", "conditions": ""}
    assert dataclasses.replace(found, **apart) == dataclasses.replace(committed, **apart)
    assert found.conditions.endswith("; device H200")
    assert committed.server_s == pytest.approx(0.0062)


@pytest.mark.parametrize(
    "key, value",
    [("cuda_graph", False), ("cross_kv", "full"), ("encoder_precision", "fp8")],
)
def test_figures_of_other_settings_are_refused(tmp_path, key, value):
    path = bench_file(tmp_path, lambda table: table["settings"]["runtime"].__setitem__(key, value))
    with pytest.raises(ConfigError, match=f"runtime.{key} = {value!r}"):
        find_measured(TURBO, path)


def test_a_file_without_an_open_loop_is_refused(tmp_path):
    path = bench_file(tmp_path, lambda table: table.__setitem__("rows", table["rows"][:3]))
    with pytest.raises(ConfigError, match="no figures of the workload open-loop"):
        find_measured(TURBO, path)


# ---------------------------------------------------------------- a day


def test_a_day_is_the_same_for_its_seed_and_has_its_mean():
    day = arrivals_per_s(40.0, 3)
    assert np.array_equal(day, arrivals_per_s(40.0, 3))
    assert not np.array_equal(day, arrivals_per_s(40.0, 4))
    assert day.mean() == pytest.approx(40)
    assert day.min() > 0 and day.max() > 1.5 * day.mean()
    night, afternoon = day[120:240].mean(), day[840:960].mean()
    assert afternoon > 3 * night


def even(per_s, minutes=60):
    return np.full(minutes, float(per_s))


def test_an_even_load_has_the_p99_that_was_measured():
    day = replay(GPU, fixed(SCALED, 2), even(140), 10.0, 256, 0.45)
    assert day.p99_s == pytest.approx(0.4, rel=0.01)  # 70 each
    assert (day.refused, day.minutes_over, day.most) == (0, 0, 2)
    assert day.gpu_hours == pytest.approx(2)
    assert day.audio_hours == pytest.approx(140 * 10)


def test_what_is_too_much_waits_and_then_is_refused():
    day = replay(GPU, fixed(SCALED, 1), even(150), 10.0, 256, 1.0)
    # 50 a second more than there is room for, but for the queue's 256.
    assert day.refused == pytest.approx((50 * 3600 - 256) / (150 * 3600))
    assert day.worst_minute_s > 256 / 100
    assert day.minutes_over == 60


def test_more_load_brings_gpus_after_their_start_and_less_takes_them_away():
    load = np.concatenate([even(30, 20), even(200, 40), even(30, 60)])
    slow = replay(GPU, SCALED, load, 600.0, 256, 1.0)
    quick = replay(GPU, SCALED, load, 5.0, 256, 1.0)
    assert quick.gpus[19] == slow.gpus[19] == 1
    assert quick.gpus[22] >= 3 and slow.gpus[22] == 1
    assert quick.gpus[-1] == slow.gpus[-1] == 1
    assert quick.refused < slow.refused


def test_the_autoscaler_follows_kubernetes():
    scaler = Autoscaler(SCALED)
    assert scaler.look(1, 1, 0.0, 62.0) == 1  # within a tenth of 60
    assert scaler.look(1, 1, 0.0, 130.0) == 3
    assert scaler.look(3, 1, 0.5, 130.0) == 3  # 5 by the queue, of one that is ready; 2 in 30 s
    assert scaler.look(3, 3, 0.5, 130.0) == 6  # twice as many in 30 s
    for _ in range(300 // SYNC_S):  # what was wanted in the last five minutes counts
        assert scaler.look(6, 6, 0.0, 10.0) == 6
    assert scaler.look(6, 6, 0.0, 10.0) == 5  # one a minute
    assert scaler.look(5, 5, 0.0, 10.0) == 5


def test_what_is_deployed_is_what_the_simulation_chooses():
    measured, policy = find_measured(TURBO, None), read_policy(POLICY)
    days = [arrivals_per_s(400.0, 1)]
    limits = (300.0 + measured.start_s, TURBO.transcriber.max_pending, 0.5)
    simulation = Simulation(measured, days, *limits)
    tried = [policy, *(with_share(policy, measured, share) for share in SHARES[:3])]
    outcomes = simulation.outcomes(tried, lambda _: None)
    chosen = choose(outcomes, policy, 0.5)
    assert chosen is not None and chosen.policy == policy


def test_a_file_that_is_no_scaled_object_is_refused(tmp_path, capsys):
    (tmp_path / "scale.yaml").write_text("kind: Deployment")
    arguments = ["--config", CONFIG, "--load", "10", "--p99", "1", "--beam-size", "1"]
    arguments += ["--simulate", "--provision-s", "1", "--policy", str(tmp_path / "scale.yaml")]
    assert main(["plan", *arguments]) == 2
    assert "is no ScaledObject" in capsys.readouterr().err
    text = POLICY.read_text(encoding="utf-8").replace("minReplicaCount: 2", "minReplicaCount: 0")
    (tmp_path / "scale.yaml").write_text(text, encoding="utf-8")
    assert main(["plan", *arguments]) == 2
    assert "minReplicaCount = 0; expected at least 1" in capsys.readouterr().err


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    arguments = ["--config", CONFIG, "--load", "150", "--p99", "0.5", "--beam-size", "1"]
    arguments += ["--simulate", "--provision-s", "30", "--days", "1", "--price", "3"]
    assert main(["plan", *arguments, "--output", str(tmp_path)]) == 0
    table = (tmp_path / "plan.md").read_text(encoding="utf-8")
    assert "**(deployed)**" in table and table in capsys.readouterr().out + table
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(Path(tmp_path / "plan.json").read_text(encoding="utf-8"))["figures"]["rows"]
    assert len(rows) > 5
