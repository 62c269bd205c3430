"""Shards over the engines of a Ray cluster, or of one that is started here for the run.

Ray Data brings shards to actors and starts actors again where others died; what was in hand of one
that died is lost to it. What is done is told by the files that are there, so the loop here is: what
is missing goes through a data set of its own, until nothing is missing or nothing gets done.
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

_IN_HAND = 2  # shards that an engine has at a time
_BLOCKS = 5_000  # of a data set; with more shards than that a block has several
_TOGETHER = 2  # passes; what is left then is done file by file, to find one that ends its process
_USELESS = 3  # passes in a row that change nothing, after which a run ends
_CPUS = 4  # of an engine on a processor, if nobody says otherwise and the nodes have so many
_REACH_S = 10.0  # longest that a cluster's head may take to answer
_ADVICE = "start a cluster with `ray start --head`, or leave --address out"
_STORE_BYTES = 256 * 1024**2  # for names of files and reports, in a run of this machine's own


@dataclasses.dataclass(frozen=True)
class EngineCapacity:
    """The engines that a cluster has room for, and what each of them takes."""

    count: int
    config: Config
    num_cpus: int
    num_gpus: int
    room: bool = True  # whether other work on the cluster leaves it to one of them now


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect Ray until the end: to the cluster at an address, else to one of this machine's own.

    Raises:
        UnavailableError: there is no cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what it has to say, we say
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as later versions do
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        # It listens on every address of the machine, and asks for this; else it keeps one in $HOME.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        _reach(address)
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UnavailableError(
            f"Ray does not start: {' '.join(str(error).split())}; {_ADVICE}"
        ) from error
    with terminated_as_interrupted():  # again, for Ray has a handler of its own
        try:
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the end of the run tells it
            # Where a process ends, Ray prints a paragraph; the progress counts what is tried again.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                yield
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself tries for minutes."""
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
        config: whose `runtime.device` says whether each has a GPU.
        cpus: cores of each; None takes `runtime.threads`, else 4 or what the smallest node has,
            and on GPUs 1.

    Raises:
        ConfigError: no node has so many cores, or none has a GPU.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if config.runtime.device.startswith("cuda"):
        each = cpus or 1
        count = sum(min(int(node.get("GPU", 0)), int(node.get("CPU", 0)) // each) for node in nodes)
        runtime = dataclasses.replace(config.runtime, device="cuda")  # Ray shows it its own
    else:
        each = cpus or config.runtime.threads or min([_CPUS, *cores])
        count = sum(core // each for core in cores)
        runtime = dataclasses.replace(config.runtime, device="cpu", threads=each)
    if count == 0:
        wanted = "a GPU and " if runtime.device == "cuda" else ""
        raise ConfigError(
            f"no node of the Ray cluster has {wanted}{each} cores; the most that one has is "
            f"{max([0, *cores])}; expected fewer --cpus, or another runtime.device"
        )
    whole, gpus = dataclasses.replace(config, runtime=runtime), int(runtime.device == "cuda")
    free = ray.available_resources()
    room = free.get("CPU", 0) >= each and free.get("GPU", 0) >= gpus
    return EngineCapacity(count, whole, each, gpus, room)


def transcribe(
    shards: list[Shard], engines: EngineCapacity, request: Request, output: BulkOutput
) -> Iterator[ShardReport]:
    """Do all shards; yield a report of each, in the order of their ends, and of what was undone.

    Raises:
        EarshotError: no engine can be opened, an option cannot be honoured, or shards are left that
            nobody can do.
    """
    useless, reason = 0, "its process ended, as for want of memory or with its node"
    passes = 0
    before: list[tuple[int, dict[str, int]]] = []
    while shards:
        alone = passes >= _TOGETHER
        for report in _pass(shards, alone, engines, request, output):
            if report.refused:
                raise EarshotError(report.refused)
            reason = report.undone or reason
            if not report.undone:
                yield report
        done = output.done()
        shards = [shard for shard in shards if shard.number not in done]
        yield from (ShardReport(shard.number, undone=reason) for shard in shards)
        # Only what is done file by file has tries to look for.
        now = [(shard.number, output.tries(shard.number) if alone else {}) for shard in shards]
        useless = useless + 1 if now == before else 0
        if shards and useless == _USELESS:
            raise EarshotError(
                f"{len(shards)} shards are left that could not be done, such as "
                f"{shards[0].number:06d}, which begins with {shards[0].files[0]}: {reason}; the "
                "others are done, and the same command tries what is left once more"
            )
        passes, before = passes + 1, now


def _pass(
    shards: list[Shard], alone: bool, engines: EngineCapacity, request: Request, output: BulkOutput
) -> Iterator[ShardReport]:
    """Do each shard once, if its actor lives; see the module's docstring.

    Alone, an engine has one file at a time, so that it is known which one ends its process.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # of actors that died
    in_hand = 1 if alone else _IN_HAND
    rows = [
        {
            "number": shard.number,
            "files": list(shard.files),
            "places": list(shard.places),
            "alone": alone,
        }
        for shard in shards
    ]
    data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _BLOCKS))
    count = min(engines.count, len(rows))
    with warnings.catch_warnings():
        # Of the two numbers at the end, which have no other name as yet. Without them Ray tries a
        # shard that kills its process for ever.
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
    # Fetched ahead, a report would be seen when the next shard is done.
    tables = reports.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    for table in tables:
        yield from (ShardReport(**row) for row in table.to_pylist())
