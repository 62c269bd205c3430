"""`python -m eval bench`: ceilings, workloads, server, peers; each row is kept once it is known."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.bench import DRAFT_LAYERS, DRAFT_TOKENS, WORKLOADS, BenchPlan
from eval.bench.floor import Ceilings, measure_ceilings
from eval.bench.peers import PEERS, check_peers, measure_peer
from eval.bench.table import OURS, Measurement, ratio, refused, table_of
from eval.bench.workloads import (
    RuntimeSession,
    measure_start,
    release_memory,
    run_workloads,
    system_name,
    with_slots,
)
from eval.config import EvaluationProduct, changed
from eval.random_whisper import RandomEngine, published_shape, random_engine, write_engine
from eval.record import Check, ReportSection, Result, Run, Say, missing_packages
from serve.contract.config import Precision, RuntimeConfig
from serve.contract.devices import counted, first_of, names_of
from serve.contract.engine import Engine
from serve.contract.errors import ConfigError, UnavailableError

_SERVER_PACKAGES = ("pytriton", "soundfile", "tritonclient")  # beyond those of the runtime


def bench(run: Run, *, peers: tuple[str, ...] | None, **of_plan: Any) -> Result:
    """Measure all workloads that the flags name; an interrupt keeps the measured rows.

    Args:
        run: the run; its config is for a GPU.
        peers: their names; None: all that are installed.
        of_plan: the fields of `BenchPlan`.

    Raises:
        EarshotError: as `check` and `measurements`, or the record cannot be written.
    """
    devices = tuple(of_plan.pop("devices", None) or ())
    if peers is None:
        peers = () if devices else installed_peers(run.say)
    plan = BenchPlan(**of_plan, peers=peers, devices=devices)
    run.flags["peers"] = plan.peers
    config = configured(run.config, plan)
    check(config, plan)
    cudnn: Any = torch.backends.cudnn  # its annotations are incomplete
    run.versions |= {"CUDA": torch.version.cuda or "none", "cuDNN": str(cudnn.version() or "none")}
    engine = engine_for(config, plan)
    rows: list[Measurement] = []
    _keep(run, rows, complete=False)
    measure = scaling if plan.devices else measurements
    for measurement in measure(engine, config, plan, run.say):
        rows.append(measurement)
        _keep(run, rows, complete=False)
        run.say(str(measurement))
    checks: tuple[Check, ...] = ()
    if plan.devices:
        from eval.bench.server import scaling_check  # noqa: PLC0415 - needs the server's packages

        checks = (scaling_check(rows, os.cpu_count() or 1),)
    return _keep(run, rows, complete=True, checks=checks)


def _keep(
    run: Run, measured: Sequence[Measurement], *, complete: bool, checks: tuple[Check, ...] = ()
) -> Result:
    """Keep the rows so far, each with how many times as fast Earshot is."""
    rows = [{**vars(row), "earshot_over_this": ratio(row, measured)} for row in measured]
    sections = (ReportSection("Figures", [table_of(measured)]),) if measured else ()
    result = Result({"complete": complete, "rows": rows}, checks, sections)
    run.keep(result)
    return result


def installed_peers(progress: Say) -> tuple[str, ...]:
    """Return the peers that this machine has, and report each that it lacks."""
    installed = []
    for name in PEERS:
        try:
            check_peers([name])
            installed.append(name)
        except UnavailableError as error:
            progress(f"left out: {error}")
    return tuple(installed)


def configured(config: EvaluationProduct, plan: BenchPlan) -> EvaluationProduct:
    """Set the plan's beam as the default, with a row for each beam, and its draft."""
    config = changed(config, "transcriber", beam_size=plan.beam_size)
    slots = plan.slots[0] if plan.devices else config.runtime.slots
    runtime = with_slots(config, slots)
    if plan.draft_acceptance is not None:
        runtime = dataclasses.replace(runtime, draft_tokens=runtime.draft_tokens or DRAFT_TOKENS)
    return dataclasses.replace(config, runtime=runtime)


def check(config: EvaluationProduct, plan: BenchPlan) -> None:
    """Refuse a plan that cannot be run before anything is measured.

    Raises:
        ConfigError: a name is unknown, or the config is not for a GPU.
        UnavailableError: there is no GPU, or a peer or the server is not installed.
    """
    for kind, names, known in (
        ("workloads", plan.workloads, WORKLOADS),
        ("peers", plan.peers, PEERS),
    ):
        if unknown := sorted(set(names) - set(known)):
            raise ConfigError(f"unknown {kind}: {', '.join(unknown)}; known: {', '.join(known)}")
    missing = missing_packages(_SERVER_PACKAGES)
    if (plan.through_server or plan.devices) and missing:
        flag = "--device" if plan.devices else "--through-server"
        raise UnavailableError(
            f"{flag} needs the packages {', '.join(missing)}, which are not installed"
        )
    check_peers(plan.peers)
    device = config.runtime.device
    if not plan.devices and not device.startswith("cuda"):
        raise ConfigError(f'bench needs runtime.device = "cuda", got {device!r}')
    if not plan.devices and (len(names_of(device)) > 1 or device.endswith("*")):
        raise ConfigError(
            f"bench measures one GPU, got runtime.device = {device!r}; name one, such as cuda:0, "
            "or measure several by --device"
        )
    count = torch.cuda.device_count()
    for named in plan.devices or (device,):
        numbers = [int(number) for number in re.findall(r"\d+", named)] or [0]
        if named.startswith("cuda") and max(numbers) >= count:
            raise UnavailableError(
                f"the device {named!r} is not there: torch sees {count} CUDA devices here"
            )


def engine_for(config: EvaluationProduct, plan: BenchPlan) -> RandomEngine:
    """Make an engine of the configured shape, with a draft if the plan has one.

    Raises:
        ConfigError: the shape is not a published one.
    """
    shape = published_shape(config.build.checkpoint)
    layers = 0 if plan.draft_acceptance is None else DRAFT_LAYERS
    return random_engine(shape, config.build.precision, layers)


def scaling(
    engine: RandomEngine, config: EvaluationProduct, plan: BenchPlan, progress: Say
) -> Iterator[Measurement]:
    """Measure a server on each of the plan's devices, one after another; raises as `check`."""
    from eval.bench.server import measure_scaling  # noqa: PLC0415 - needs the server's packages

    each = [counted(dataclasses.replace(config.runtime, device=name)) for name in plan.devices]
    with on_disk(engine, first_of(each[0]).device, progress) as folder:
        yield from measure_scaling(config, folder, each, plan.seconds, progress)


def measurements(
    engine: RandomEngine, config: EvaluationProduct, plan: BenchPlan, progress: Say
) -> Iterator[Measurement]:
    """Measure everything in the plan, one after the other.

    Raises:
        UnavailableError: an engine folder is needed and the disk has no room for it.
        EarshotError: something failed that is no refusal.
    """
    device = config.runtime.device
    progress("ceilings of this machine")
    ceilings = measure_ceilings(config.runtime, engine.manifest.dims)
    yield from ceilings.measurements()
    needs_folder = "start" in plan.workloads or plan.through_server
    with on_disk(engine, device, progress) if needs_folder else contextlib.nullcontext() as folder:
        if folder is not None and "start" in plan.workloads:
            try:
                yield measure_start(folder, config.runtime)
            except UnavailableError as error:
                yield refused("start", OURS, "s", error)
        reached = None  # in process with the slots that the server has
        for row in run_workloads(engine, config, plan, ceilings, progress):
            if (row.workload, row.system) == ("throughput", system_name(config.runtime)):
                reached = row.value
            yield row
        if plan.ablate:
            yield from ablate(engine, config, plan, ceilings, progress)
        if folder is not None and plan.through_server:
            from eval.bench.server import through_server  # noqa: PLC0415 - needs more packages

            release_memory(device)
            try:
                yield from through_server(config, folder, reached, plan, progress)
            except UnavailableError as error:
                yield refused("throughput", f"{OURS}, through Triton", "RTFx", error)
    for name in plan.peers:
        progress(f"peer {name}")
        release_memory(device)
        yield from measure_peer(name, engine.shape, device, plan.seconds, progress)


@contextlib.contextmanager
def on_disk(engine: RandomEngine, device: str, progress: Say) -> Iterator[Path]:
    """Give the engine as a temporary folder, made on a device.

    Raises:
        UnavailableError: the disk has no room for it.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-bench-") as name:
        progress(f"writing the engine to {name}")
        write_engine(engine, Path(name), device)
        release_memory(device)
        yield Path(name)


# ---------------------------------------------------------------- ablation


FULL = f"{OURS}, full configuration"


def variants(
    config: EvaluationProduct, slots: int
) -> Iterator[tuple[str, RuntimeConfig, Precision]]:
    """Yield the name, runtime and weight precision of the full configuration and its variants."""
    full, precision = with_slots(config, slots), config.build.precision
    changes: list[dict[str, Any]] = [
        {"cuda_graph": not full.cuda_graph},
        # The torch kernels synchronize with the host, which a CUDA graph cannot contain.
        {"kernels": "torch", "cuda_graph": False},
        {"cross_kv": "full" if full.cross_kv == "int8" else "int8"},
        {"encoder_precision": "full" if full.encoder_precision == "fp8" else "fp8"},
    ]
    yield FULL, full, precision
    for change in changes:
        name = ", ".join(f"{key} {str(value).lower()}" for key, value in change.items())
        yield name, dataclasses.replace(full, **change), precision
    other_precision: Precision = "fp16" if precision == "int8" else "int8"
    yield f"weights {other_precision}", full, other_precision


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
