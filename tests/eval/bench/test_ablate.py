"""`python -m eval bench --ablate`: each option of the runtime is changed alone."""

import dataclasses

import pytest

from eval.bench.run import FULL, ablate, variants
from eval.config import load_config


@pytest.mark.nightly
def test_every_variant_is_measured_or_refused(config, engine, plan, ceilings, quiet):
    plan = dataclasses.replace(plan, seconds=0.01, requests=1)
    rows = list(ablate(engine, config, plan, ceilings, quiet))
    values = {(row.system, row.workload): row.value for row in rows}
    assert values["cuda_graph true", "ablation, throughput"] is None  # there is no GPU
    for name in (FULL, "kernels torch, cuda_graph false", "weights fp16"):
        assert values[name, "ablation, throughput"] > 0
        assert values[name, "ablation, latency"] > 0


def test_a_variant_changes_one_option():
    config = load_config("configs/large-v3-turbo.toml")
    (_, full, precision), *others = variants(config, 64)
    for name, runtime, weights in others:
        before, after = dataclasses.asdict(full), dataclasses.asdict(runtime)
        changed = [key for key in before if before[key] != after[key]]
        assert len(changed) == name.count(",") + 1 - name.startswith("weights")
        assert name.startswith("weights") == (weights != precision)
