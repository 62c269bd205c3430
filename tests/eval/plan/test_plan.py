"""Planning: what a load needs, and what is refused."""

import dataclasses
import json

import pytest

from eval.__main__ import main
from eval.bench import run as bench
from eval.bench.table import OURS, Measurement, refused
from eval.config import changed, load_config
from eval.plan.run import COMMITTED, Measured, find_measured, steady
from serve.contract.errors import ConfigError

CONFIG = "configs/large-v3-turbo.toml"
TURBO = changed(load_config(CONFIG), "transcriber", beam_size=1)
# A GPU of round numbers.
GPU = Measured("here", "made up", 100.0, ((50, 0.2), (90, 0.6)))


# ---------------------------------------------------------------- what a load needs


@pytest.mark.parametrize("p99_s, per_s", [(0.2, 50), (0.4, 70), (0.6, 90), (9.0, 90)])
def test_a_gpu_takes_what_its_p99_allows(p99_s, per_s):
    assert GPU.max_per_s(p99_s) == pytest.approx(per_s, abs=0.1)


def test_gpus_and_cost():
    found = {name: value.split() for name, value in steady(GPU, 400.0, 0.4, 2.0)}
    assert found["GPUs"][0] == "6"  # of 70 a second
    assert found["audio"][0] == "4000"
    assert float(found["cost"][0]) == pytest.approx(6 * 2 / 4000)
    assert "give --price" in dict(steady(GPU, 400.0, 0.4, None))["cost"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--config", "configs/demo.toml"],
            "cannot read eval/plan/measured/demo.json: No such file or directory; measure it",
        ),
        (
            ["--config", CONFIG],
            "beam_size = 1, expected 5, as the config says. Plan for --beam-size 1, or measure it",
        ),
        (["--config", CONFIG, "--measured", "nowhere.json"], "nowhere.json"),
        (["--config", CONFIG, "--beam-size", "1", "--p99", "0.01"], "cannot be promised: at 59"),
    ],
)
def test_what_was_not_measured_is_refused(capsys, arguments, message):
    assert main(["plan", "--load", "10", "--p99", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def committed():
    return json.loads((COMMITTED / "large-v3-turbo.json").read_text(encoding="utf-8"))


def test_what_the_bench_writes_is_read(tmp_path, monkeypatch):
    path, written = tmp_path / "bench.json", []
    for row in committed()["figures"]["rows"]:
        row["system"] = row["system"].replace("earshot", "earshot, 64 slots", row["system"] == OURS)
        written.append(Measurement(**row, ideal=None))
    written.append(Measurement("latency", "vllm", 63.9, "ms", None))
    written.append(refused("mlperf", OURS, "samples/s", ConfigError("no memory")))
    monkeypatch.setattr(bench, "check", lambda *_: None)
    monkeypatch.setattr(bench, "measurements", lambda *_: iter(written))
    arguments = ["--config", CONFIG, "--output", str(tmp_path), "--peers="]
    assert main(["bench", *arguments]) == 0
    default, found = find_measured(TURBO, None), find_measured(TURBO, path)
    same = {"source": "", "conditions": ""}
    assert dataclasses.replace(found, **same) == dataclasses.replace(default, **same)
    assert "; GPU " in found.conditions
    # The p99 of the runtime, and 6.2 ms for the server.
    assert default.levels[0] == (59.3, pytest.approx(0.059 + 0.0062))


def test_figures_of_other_settings_or_workloads_are_refused(tmp_path):
    path, table = tmp_path / "bench.json", committed()
    del table["figures"]["rows"][3:]
    path.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks figures of latency or of the open loop"):
        find_measured(TURBO, path)
    table["settings"]["runtime"]["cross_kv"] = "full"
    path.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"runtime\.cross_kv = 'full'"):
        find_measured(TURBO, path)
