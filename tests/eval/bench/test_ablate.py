"""Options turned one at a time, with their error."""

import dataclasses

import pytest

from eval.bench import ablate
from eval.bench.ablate import run_ablation, variants
from eval.bench.table import ratio
from eval.config import load_config
from serve.contract.config import RuntimeConfig


@pytest.mark.nightly
def test_each_option_is_turned_alone_and_its_error_is_measured(
    config, engine, plan, ceilings, quiet
):
    runtime = dataclasses.replace(config.runtime, compute_type="float32")
    config = dataclasses.replace(config, runtime=runtime)
    plan = dataclasses.replace(plan, seconds=0.01, requests=1)
    rows = list(run_ablation(engine, config, plan, ceilings, quiet))
    systems = list(dict.fromkeys(row.system for row in rows))
    assert systems == [
        "earshot, full configuration",
        "cuda_graph true",
        "kernels torch, cuda_graph false",
        "cross_kv int8",
        "encoder_precision fp8",
        "weights fp16",
    ]
    of = {(row.system, row.workload): row for row in rows}
    assert of["cuda_graph true", "ablation, throughput"].value is None
    for system in (systems[0], systems[2], systems[5]):  # these compute as the reference does
        error = of[system, "ablation, logit error"]
        assert error.value < 5e-3 and error.figures["equal_tokens"] == 1.0
        assert error.figures["tokens"] == ablate.TOKENS
    assert 1e-3 < of["cross_kv int8", "ablation, logit error"].value < 10
    slower = of["weights fp16", "ablation, throughput"]
    assert ratio(slower, rows) == pytest.approx(
        of[systems[0], "ablation, throughput"].value / slower.value
    )


def test_a_turned_option_keeps_the_others():
    config = load_config("configs/large-v3-turbo.toml")
    full, *others = variants(config, 64)
    assert full.runtime == config.runtime and full.precision == "int8"
    for other in others:
        changed = {
            field.name
            for field in dataclasses.fields(RuntimeConfig)
            if getattr(other.runtime, field.name) != getattr(full.runtime, field.name)
        }
        assert len(changed) <= (2 if other.runtime.kernels == "torch" else 1)
        assert bool(changed) != (other.precision != full.precision)
