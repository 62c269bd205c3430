"""Transcribe shards with the engines of a Ray cluster, or of a local one started for the run.

Ray Data sends shards to actors and restarts actors that die, but loses the shards that they were
working on. A shard is done if its file exists. Therefore each pass runs the missing shards as a new
data set, until none is missing or passes make no progress.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import ray
import ray.data
from ray.util.annotations import RayDeprecationWarning

from serve.bulk.sharding import BulkOutput, Shard
from serve.bulk.worker import ShardReport, ShardWorker
from serve.contract.config import Config
from serve.contract.errors import ConfigError, EarshotError, UnavailableError
from serve.contract.exits import terminated_as_interrupted
from serve.contract.messages import Request

_IN_HAND = 2  # concurrent shards of an engine
_BLOCKS = 5_000  # maximum of a data set; with more shards, a block has several
_USELESS = 3  # consecutive passes without progress, after which a run ends
_CPUS = 4  # default cores of an engine on the CPU, if every node has as many
_REACH_S = 10.0  # timeout of connecting to a cluster's head
_ADVICE = "start a cluster with `ray start --head`, or leave --address out"
_STORE_BYTES = 256 * 1024**2  # object store of a local run; it has only file names and reports


@dataclasses.dataclass(frozen=True)
class EngineCapacity:
    """The number of engines that a cluster has room for, and the resources of each."""

    count: int
    config: Config
    num_cpus: int
    num_gpus: int


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect Ray for a `with` block: to the cluster at `address`, or to a new local one.

    Raises:
        UnavailableError: the cluster is not reachable.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the command reports failures
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the later default
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        # Ray listens on all interfaces and requires a token; by default it writes one to $HOME.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        _reach(address)
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UnavailableError(
            f"cannot start Ray: {' '.join(str(error).split())}; {_ADVICE}"
        ) from error
    with terminated_as_interrupted():  # again, because Ray has installed its own handler
        try:
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the run reports failures
            # Ray prints a paragraph for each process that ends; the progress counts retries.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                yield
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """Reject an address without a listener; Ray itself retries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--address {address}; expected HOST:PORT; {_ADVICE}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray cluster at {address}: {error}; {_ADVICE}") from error


def engines_of(config: Config, cpus: int | None) -> EngineCapacity:
    """Count the engines that the connected cluster has room for.

    Args:
        config: the configuration; each engine has a GPU if `runtime.device` is one.
        cpus: cores of each engine; None: `runtime.threads`, else 4 or the cores of the smallest
            node; 1 on a GPU.

    Raises:
        ConfigError: no node has enough cores, or no node has a GPU.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    gpus = int(config.runtime.device.startswith("cuda"))
    if gpus:
        num_cpus = cpus or 1
        count = sum(
            min(int(node.get("GPU", 0)), int(node.get("CPU", 0)) // num_cpus) for node in nodes
        )
        runtime = dataclasses.replace(config.runtime, device="cuda")  # Ray sets the visible GPU
    else:
        num_cpus = cpus or config.runtime.threads or min([_CPUS, *cores])
        count = sum(core // num_cpus for core in cores)
        runtime = dataclasses.replace(config.runtime, device="cpu", threads=num_cpus)
    if count == 0:
        gpu = "a GPU and " if gpus else ""
        raise ConfigError(
            f"no node of the Ray cluster has {gpu}{num_cpus} cores; the largest node has "
            f"{max([0, *cores])}; expected fewer --cpus, or another runtime.device"
        )
    return EngineCapacity(count, dataclasses.replace(config, runtime=runtime), num_cpus, gpus)


def transcribe(
    shards: list[Shard], engines: EngineCapacity, request: Request, output: BulkOutput
) -> Iterator[ShardReport]:
    """Transcribe all shards; yield a report for each as it ends, and for each lost shard.

    Raises:
        EarshotError: no engine can be opened, an option is not supported, or some shards fail
            repeatedly.
    """
    reason = "its process ended, for example from lack of memory or with its node"
    useless = 0
    while shards:
        # After a pass without progress, no shard shares its process with one that may end it.
        in_hand = 1 if useless else _IN_HAND
        for report in _pass(shards, in_hand, engines, request, output):
            if report.refused:
                raise EarshotError(report.refused)
            reason = report.undone or reason
            if not report.undone:
                yield report
        done, count = output.done(), len(shards)
        shards = [shard for shard in shards if shard.number not in done]
        yield from (ShardReport(shard.number, undone=reason) for shard in shards)
        useless = useless + 1 if len(shards) == count else 0
        if useless == _USELESS:
            raise EarshotError(
                f"{count} shards failed repeatedly, such as {shards[0].number:06d}, which "
                f"begins with {shards[0].files[0]}: {reason}; the others are done, and the same "
                "command tries the failed shards again; a run of their files with --shard-files 1 "
                "and another --output finds a file that ends its process"
            )


def _pass(
    shards: list[Shard], in_hand: int, engines: EngineCapacity, request: Request, output: BulkOutput
) -> Iterator[ShardReport]:
    """Transcribe each shard once, unless its actor dies; see the module's docstring."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # continue when actors die
    rows = [
        {"number": shard.number, "files": list(shard.files), "places": list(shard.places)}
        for shard in shards
    ]
    data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _BLOCKS))
    count = min(engines.count, len(rows))
    with warnings.catch_warnings():
        # Ray deprecates max_restarts and max_task_retries without a replacement. Without them, it
        # retries a shard that kills its process for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        reports = data.map(
            ShardWorker,
            fn_constructor_args=(engines.config, request, output),
            compute=ray.data.ActorPoolStrategy(
                min_size=1,
                max_size=count,
                initial_size=count,
                max_tasks_in_flight_per_actor=in_hand,
                max_concurrent_calls_per_actor=in_hand,
                enable_true_multi_threading=True,
            ),
            num_cpus=engines.num_cpus,
            num_gpus=engines.num_gpus,
            max_restarts=-1,
            max_task_retries=0,
        )
    # With prefetching, a report would arrive only when the next shard is done.
    tables = reports.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    for table in tables:
        yield from (ShardReport(**row) for row in table.to_pylist())
