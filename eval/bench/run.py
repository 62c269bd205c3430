"""`python -m eval bench`: ceilings, workloads, options, peers; each figure once it is known."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.bench.ablate import run_ablation
from eval.bench.floor import measure_ceilings
from eval.bench.peers import PEERS, check_peers, measure_peer
from eval.bench.plan import DRAFT_LAYERS, Plan, check_workloads, configured
from eval.bench.table import (
    OURS,
    Measurement,
    device_facts,
    ratio,
    refused,
    software,
    table_of,
)
from eval.bench.workloads import measure_start, release_memory, run_workloads, system_name
from eval.config import Config, changed
from eval.random_whisper import RandomEngine, published_shape, random_engine, write_engine
from eval.record import Result, Run, Say, Section, Text, missing_packages
from serve.contract.devices import counted, first_of, names_of
from serve.contract.errors import ConfigError, UnavailableError

SERVER_PACKAGES = ("pytriton", "soundfile", "tritonclient")  # beyond what the runtime needs


def bench(run: Run, *, peers: tuple[str, ...] | None, **of_plan: Any) -> Result:
    """Measure all workloads that the flags name; an interrupt keeps the measured rows.

    Args:
        run: of a product for a GPU.
        peers: their names; None is all that are installed.
        of_plan: the fields of `Plan`.

    Raises:
        EarshotError: as of `check` and `measurements`; the record cannot be written.
    """
    config = run.config
    if devices := of_plan.pop("devices", None):
        return _scaled(run, Plan(**of_plan, devices=tuple(devices)))
    plan = Plan(**of_plan, peers=installed_peers(run.say) if peers is None else peers)
    run.flags["peers"] = plan.peers
    check(config, plan)
    engine = made_up(config, plan)
    run.machine |= device_facts(config.runtime.device, run.machine["GPU"])
    run.versions |= software()
    rows: list[Measurement] = []
    result = _keep(run, rows, complete=False)
    for measurement in measurements(engine, config, plan, run.say):
        rows.append(measurement)
        result = _keep(run, rows, complete=False)
        run.say(str(measurement))
    return _keep(run, rows, complete=True) if rows else result


def _scaled(run: Run, plan: Plan) -> Result:
    """Measure a server on each of some devices, one after another."""
    from eval.bench.server import measure_scaling  # noqa: PLC0415 - needs the server's packages

    config = changed(run.config, "runtime", slots=plan.slots[0])
    config = configured(config, plan)
    each = [counted(dataclasses.replace(config.runtime, device=name)) for name in plan.devices]
    first = dataclasses.replace(config, runtime=first_of(each[0]))
    engine = made_up(config, plan)
    with on_disk(engine, first, run.say) as folder:
        release_memory(first.runtime.device)
        scaling = measure_scaling(config, folder, each, plan, run.say)
    run.config = config
    run.machine |= device_facts(first.runtime.device, run.machine["GPU"])
    run.versions |= software()
    section = Section("Figures", [Text("", items=[*map(str, scaling.figures), str(scaling)])])
    return Result({"scaling": scaling}, (scaling.check,), (section,))


def _keep(run: Run, measured: Sequence[Measurement], *, complete: bool) -> Result:
    """Keep the rows so far, each with how many times as fast Earshot is."""
    rows = [{**vars(row), "earshot_over_this": ratio(row, measured)} for row in measured]
    sections = (Section("Figures", [table_of(measured)]),) if measured else ()
    result = Result({"complete": complete, "rows": rows}, sections=sections)
    run.keep(result)
    return result


def installed_peers(progress: Say) -> tuple[str, ...]:
    """Return the peers that this machine has, and a line on each that it lacks."""
    installed = []
    for name in PEERS:
        try:
            check_peers([name])
            installed.append(name)
        except UnavailableError as error:
            progress(f"left out: {error}")
    return tuple(installed)


def check(config: Config, plan: Plan) -> None:
    """Refuse what cannot be run before anything is.

    Raises:
        ConfigError: a name is unknown, or the config is not for a GPU.
        UnavailableError: there is no GPU, or a peer or the server is not installed.
    """
    check_workloads(plan.workloads)
    unknown = set(plan.peers) - set(PEERS)
    if unknown:
        raise ConfigError(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    device = config.runtime.device
    if not device.startswith("cuda"):
        raise ConfigError(f'bench needs runtime.device = "cuda", got {device!r}')
    if len(names_of(device)) > 1 or device.endswith("*"):
        raise ConfigError(
            f"bench measures one GPU, got runtime.device = {device!r}; name one, such as cuda:0, "
            "or measure several by --device"
        )
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {device!r}, but torch sees {torch.cuda.device_count()} CUDA "
            "devices here; bench needs one"
        )
    check_peers(plan.peers)
    missing = missing_packages(SERVER_PACKAGES)
    if plan.through_server and missing:
        raise UnavailableError(
            f"--through-server needs the packages {', '.join(missing)}, which are not installed"
        )


def made_up(config: Config, plan: Plan) -> RandomEngine:
    """Make an engine of the configured shape, with a draft if the plan wants one.

    Raises:
        ConfigError: the shape is not a published one.
    """
    shape = published_shape(config.build.checkpoint)
    layers = 0 if plan.draft_acceptance is None else DRAFT_LAYERS
    return random_engine(shape, config.build.precision, layers)


def measurements(
    engine: RandomEngine, config: Config, plan: Plan, progress: Say
) -> Iterator[Measurement]:
    """Measure everything that was asked for, one after the other.

    Raises:
        UnavailableError: an engine folder is needed and the disk does not hold it.
        EarshotError: something failed that is no refusal.
    """
    config = configured(config, plan)
    needs_folder = "start" in plan.workloads or plan.through_server
    with on_disk(engine, config, progress) if needs_folder else contextlib.nullcontext() as folder:
        rows = []
        for measured in _in_process(engine, folder, config, plan, progress):
            rows.append(measured)
            yield measured
        if plan.through_server and folder is not None:
            yield from _through_server(folder, config, plan, rows, progress)
    for name in plan.peers:
        progress(f"peer {name}")
        release_memory(config.runtime.device)
        device = config.runtime.device
        yield from measure_peer(name, engine.shape, device, plan.seconds, progress)


def _in_process(
    engine: RandomEngine, folder: Path | None, config: Config, plan: Plan, progress: Say
) -> Iterator[Measurement]:
    """Measure ceilings, then the runtime without a server."""
    progress("ceilings of this machine")
    ceilings = measure_ceilings(config.runtime, engine.manifest.dims)
    yield from ceilings.measurements()
    if "start" in plan.workloads and folder is not None:
        try:
            yield measure_start(folder, config.runtime, ceilings, progress)
        except UnavailableError as error:
            yield refused("start", OURS, "s", error)
    yield from run_workloads(engine, config, plan, ceilings, progress)
    if plan.ablate:
        yield from run_ablation(engine, config, plan, ceilings, progress)


def _through_server(
    folder: Path, config: Config, plan: Plan, rows: list[Measurement], progress: Say
) -> Iterator[Measurement]:
    """Measure a real server, compared with the same number of slots in process."""
    from eval.bench.server import through_server  # noqa: PLC0415 - needs the server's packages

    release_memory(config.runtime.device)
    name = system_name(config.runtime)
    same = [row.value for row in rows if (row.workload, row.system) == ("throughput", name)]
    try:
        yield from through_server(config, folder, same[0] if same else None, plan, progress)
    except UnavailableError as error:
        yield refused("throughput", f"{OURS}, through Triton", "RTFx", error)


@contextlib.contextmanager
def on_disk(engine: RandomEngine, config: Config, progress: Say) -> Iterator[Path]:
    """Give the engine as a folder, gone at the end.

    Raises:
        UnavailableError: the disk does not hold it.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-bench-") as name:
        progress(f"writing the engine to {name}")
        write_engine(engine, Path(name), config.runtime.device)
        yield Path(name)
