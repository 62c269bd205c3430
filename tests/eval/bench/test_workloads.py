"""The workloads on a CPU and a tiny shape."""

import dataclasses

import pytest

from eval.bench import BenchPlan
from eval.bench.run import ablate
from eval.bench.table import Measurement
from eval.bench.workloads import MLPERF_MEAN, mlperf_lengths, run_workloads
from eval.config import load_config
from serve.contract.config import RuntimeConfig
from tests.eval.bench.conftest import CEILINGS, PLAN, quiet


@pytest.mark.nightly
def test_every_workload_ends_with_its_forced_lengths(config, engine):
    lines = []
    rows = list(run_workloads(engine, config, PLAN, CEILINGS, lines.append))
    two = ["opening", "latency", "throughput", "words", "open loop, saturated"]
    two += [f"open loop, {share} % load" for share in (30, 50, 70, 85, 95)]
    three = ["opening", "throughput", "words", "MLPerf-shaped", "MLPerf-shaped, always full"]
    assert [row.workload for row in rows] == two + three
    assert [row.system[-7:] for row in rows] == ["2 slots"] * 10 + ["3 slots"] * 5
    assert all(row.value > 0 and row.is_ours for row in rows)
    by_name = {row.workload: row for row in rows}
    assert by_name["MLPerf-shaped"].figures["windows"] >= 6
    for name in ("throughput", "words", "MLPerf-shaped", "MLPerf-shaped, always full"):
        assert by_name[name].figures["seconds"] >= PLAN.seconds
    for share in (30, 95):
        found = by_name[f"open loop, {share} % load"].figures
        assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert "workload open-loop with 2 slots" in lines


def test_slots_that_the_machine_refuses_become_a_line(config, engine):
    config = dataclasses.replace(config, runtime=RuntimeConfig(cuda_graph=True, threads=1))
    (row,) = run_workloads(engine, config, BenchPlan(slots=(2,)), CEILINGS, quiet)
    assert row.value is None and row.detail.startswith("refused: runtime.cuda_graph = true needs")


def test_mlperf_lengths_have_their_mean_and_their_limits():
    lengths = [next(dice) for dice in [mlperf_lengths()] for _ in range(5000)]
    assert sum(lengths) / 5000 == pytest.approx(MLPERF_MEAN, rel=0.02)
    assert min(lengths) >= 4 and max(lengths) == 200


# ---------------------------------------------------------------- ablation


def test_a_variant_changes_one_option(engine, monkeypatch):
    measured = []

    def measure(engine, config, *_):
        measured.append((engine.manifest.precision, dataclasses.asdict(config.runtime)))
        yield Measurement("throughput", "earshot", 1.0, "RTFx")

    monkeypatch.setattr("eval.bench.run.measure_runtime", measure)
    config = load_config("configs/large-v3-turbo.toml")
    manifest = dataclasses.replace(engine.manifest, precision="fp16")
    other = dataclasses.replace(engine, manifest=manifest)
    rows = list(ablate(engine, other, config, PLAN, CEILINGS, quiet))
    assert {row.workload for row in rows} == {"ablation, throughput"}
    names = [row.system for row in rows]
    (precision, full), *others = measured
    for name, (weights, runtime) in zip(names[1:], others, strict=True):
        changed = [key for key in full if full[key] != runtime[key]]
        assert len(changed) == name.count(",") + 1 - name.startswith("weights")
        assert name.startswith("weights") == (weights != precision)
