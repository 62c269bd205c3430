"""Measure the gain of each runtime option: throughput and latency with one option changed."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from eval.bench.floor import Ceilings
from eval.bench.plan import BenchPlan
from eval.bench.table import OURS, Measurement, refused
from eval.bench.workloads import RuntimeSession, with_slots
from eval.config import EvaluationProduct
from eval.record import Say
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.engine import Engine
from serve.contract.errors import UnavailableError

FULL = f"{OURS}, full configuration"


def variants(
    config: EvaluationProduct, slots: int
) -> Iterator[tuple[str, RuntimeConfig, Precision]]:
    """Yield the name, runtime and weight precision of the full configuration and its variants."""
    full, precision = with_slots(config, slots), config.build.precision
    changes: list[dict[str, Any]] = [
        {"cuda_graph": not full.cuda_graph},
        {"kernels": "torch", "cuda_graph": False},  # a CUDA graph cannot wait for the host
        {"cross_kv": "full" if full.cross_kv == "int8" else "int8"},
        {"encoder_precision": "full" if full.encoder_precision == "fp8" else "fp8"},
    ]
    yield FULL, full, precision
    for change in changes:
        name = ", ".join(f"{key} {str(value).lower()}" for key, value in change.items())
        yield name, dataclasses.replace(full, **change), precision
    other: Precision = "fp16" if precision == "int8" else "int8"
    yield f"weights {other}", full, other


def ablate(
    engine: Engine, config: EvaluationProduct, plan: BenchPlan, ceilings: Ceilings, progress: Say
) -> Iterator[Measurement]:
    """Yield throughput and latency of every variant, or a row that says why it cannot run."""
    for name, runtime, precision in variants(config, plan.slots[0]):
        progress(f"ablation: {name}")
        manifest = dataclasses.replace(engine.manifest, precision=precision)
        varied = dataclasses.replace(config, runtime=runtime)
        try:
            session = RuntimeSession(
                dataclasses.replace(engine, manifest=manifest), varied, plan, ceilings
            )
        except UnavailableError as error:
            yield refused("ablation, throughput", name, "RTFx", error)
            continue
        for workload in ("throughput", "latency"):
            for row in session.workloads[workload]():
                yield dataclasses.replace(row, workload=f"ablation, {row.workload}", system=name)
        session.runtime.close()
        del session  # frees the GPU's memory for the next variant
