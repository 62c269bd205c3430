"""`python -m eval bench`: ceilings, workloads, server, peers; each row is kept once it is known."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eval.bench import WORKLOADS, BenchPlan
from eval.bench.floor import Ceilings, measure_ceilings
from eval.bench.peers import PEERS, measure_peer, missing_for
from eval.bench.table import OURS, Measurement, ratio, refused, scaling_check, table_of
from eval.bench.workloads import (
    measure_runtime,
    measure_start,
    release_memory,
    run_workloads,
    with_slots,
)
from eval.config import EvaluationProduct, changed
from eval.random_whisper import Shape, published_shape, random_engine, require_transformers
from eval.record import Check, ReportSection, Result, Run, Say, missing_packages
from serve.contract.config import Precision
from serve.contract.devices import with_gpu_numbers
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, UnavailableError

_SERVER_PACKAGES = ("pytriton", "soundfile", "tritonclient")  # besides the runtime's


def bench(run: Run, **settings: Any) -> Result:
    """Measure all workloads that the flags name; an interrupt keeps the measured rows.

    Args:
        run: the run, with a config for a GPU.
        settings: the fields of `BenchPlan`. `peers` None measures all installed peers.

    Raises:
        EarshotError: `check` or `measurements` failed, or the record cannot be written.
    """
    devices = settings["devices"] = tuple(settings["devices"] or ())
    if settings["peers"] is None:
        missing_by_peer = {} if devices else {name: missing_for(name) for name in PEERS}
        settings["peers"] = tuple(name for name, reason in missing_by_peer.items() if not reason)
        for reason in filter(None, missing_by_peer.values()):
            run.say(f"left out: {reason}")
    run.flags["peers"] = settings["peers"]
    plan = BenchPlan(**settings)
    config = configured(run.config, plan)
    check(config, plan)
    cudnn: Any = torch.backends.cudnn  # torch's annotations are incomplete
    run.versions |= {"CUDA": torch.version.cuda or "none", "cuDNN": str(cudnn.version() or "none")}
    shape, rows = published_shape(config.build.checkpoint), list[Measurement]()
    _save(run, rows, complete=False)
    for measurement in measurements(shape, config, plan, run.say):
        rows.append(measurement)
        _save(run, rows, complete=False)
        run.say(str(measurement))
    checks = [scaling_check(rows)] if devices else []
    return _save(run, rows, *checks, complete=True)


def _save(run: Run, measured: Sequence[Measurement], *checks: Check, complete: bool) -> Result:
    """Keep the rows so far, each with how many times as fast Earshot is."""
    rows = [{**vars(row), "earshot_over_this": ratio(row, measured)} for row in measured]
    sections = (ReportSection("Figures", [table_of(measured)]),) if measured else ()
    result = Result({"complete": complete, "rows": rows}, checks, sections)
    run.keep(result)
    return result


def configured(config: EvaluationProduct, plan: BenchPlan) -> EvaluationProduct:
    """Set the plan's beam as the default, with a row for each beam."""
    config = changed(config, "transcriber", beam_size=plan.beam_size)
    return with_slots(config, plan.slots[0] if plan.devices else config.runtime.slots)


def check(config: EvaluationProduct, plan: BenchPlan) -> None:
    """Refuse a plan that cannot be run before anything is measured.

    Raises:
        ConfigError: a name is unknown, or the config is not for a GPU.
        UnavailableError: there is no GPU, or a package is not installed.
    """
    workloads = "workloads", plan.workloads, list(WORKLOADS)
    for kind, names, known in (workloads, ("peers", plan.peers, list(PEERS))):
        if unknown := sorted({*names} - {*known}):
            raise ConfigError(f"unknown {kind}: {', '.join(unknown)}; known: {', '.join(known)}")
    missing = missing_packages(_SERVER_PACKAGES)
    if (plan.through_server or plan.devices) and missing:
        flag = "--device" if plan.devices else "--through-server"
        raise UnavailableError(
            f"{flag} needs the packages {', '.join(missing)}, which are not installed"
        )
    if reasons := [*filter(None, map(missing_for, plan.peers))]:
        raise UnavailableError("; ".join(reasons))
    device, count = config.runtime.device, torch.cuda.device_count()
    if not plan.devices and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(
            f'bench needs runtime.device = "cuda" or one GPU such as "cuda:0", got {device!r}; '
            "measure several by --device"
        )
    for name in plan.devices or (device,):
        numbers = [int(number) for number in re.findall(r"\d+", name)] or [0]
        if name.startswith("cuda") and max(numbers) >= count:
            raise UnavailableError(
                f"the device {name!r} is not there: torch sees {count} CUDA devices here"
            )
    require_transformers()


def measurements(
    shape: Shape, config: EvaluationProduct, plan: BenchPlan, say: Say
) -> Iterator[Measurement]:
    """Measure everything in the plan, one after the other; with devices a server on each alone.

    Raises:
        EarshotError: something failed that is no refusal.
    """
    device = config.runtime.device
    with random_engine(shape, config.build.precision, say) as engine:
        if plan.devices:
            from eval.bench.server import measure_scaling  # noqa: PLC0415 - needs more packages

            runtimes = [
                with_gpu_numbers(dataclasses.replace(config.runtime, device=name))
                for name in plan.devices
            ]
            yield from measure_scaling(config, engine.path, runtimes, plan.seconds, say)
            return
        say("ceilings of this machine")
        ceilings = measure_ceilings(config.runtime, engine.manifest.dims)
        yield from ceilings.measurements()
        if "start" in plan.workloads:
            try:
                yield measure_start(engine.path, config.runtime)
            except UnavailableError as error:
                yield refused("start", OURS, "s", error)
        yield from run_workloads(engine, config, plan, ceilings, say)
        if plan.ablate:
            other: Precision = "fp16" if config.build.precision == "int8" else "int8"
            with random_engine(shape, other, say) as other_engine:
                yield from ablate(engine, other_engine, config, plan, ceilings, say)
        if plan.through_server:
            from eval.bench.server import through_server  # noqa: PLC0415 - needs more packages

            release_memory(device)
            try:
                yield from through_server(config, engine.path, plan, say)
            except UnavailableError as error:
                yield refused("throughput", f"{OURS}, through Triton", "RTFx", error)
    for name in plan.peers:
        say(f"peer {name}")
        release_memory(device)
        yield from measure_peer(name, shape, device, plan.seconds, say)


# ---------------------------------------------------------------- ablation


FULL = f"{OURS}, full configuration"


def ablate(
    engine: Engine,
    other: Engine,
    config: EvaluationProduct,
    plan: BenchPlan,
    ceilings: Ceilings,
    say: Say,
) -> Iterator[Measurement]:
    """Yield opening, throughput and latency of the full configuration and of each variant of it.

    A variant that this machine refuses yields the reason. `other` has weights of another precision.
    """
    full = with_slots(config, plan.slots[0])
    fp8 = full.runtime.encoder_precision == "fp8"
    changes: list[dict[str, Any]] = [
        {},
        {"cuda_graph": not full.runtime.cuda_graph},
        # The torch kernels synchronize with the host, which a CUDA graph cannot contain.
        {"kernels": "torch", "cuda_graph": False},
        {"cross_kv": "full" if full.runtime.cross_kv == "int8" else "int8"},
        {"encoder_precision": "full" if fp8 else "fp8"},
        {"weights": other.manifest.precision},
    ]
    for change in changes:
        name = ", ".join(f"{key} {str(value).lower()}" for key, value in change.items()) or FULL
        say(f"ablation: {name}")
        variant = other if change.pop("weights", None) else engine
        changed_config, names = changed(full, "runtime", **change), ("throughput", "latency")
        for row in measure_runtime(variant, changed_config, plan, ceilings, say, names):
            yield dataclasses.replace(row, workload=f"ablation, {row.workload}", system=name)
