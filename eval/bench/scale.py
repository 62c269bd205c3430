"""One server on one device and on several: throughput of each, and the host's share of it.

What is timed is what a client sees: WAV files of noise go in by KServe over gRPC through the
gateway, text comes out. A closed loop keeps the same number of requests in flight for each engine.
The engine has random weights and forced lengths (see `eval.random_whisper`), so that nothing has to
be fetched and every window is decoded once, to the number of tokens that speech of its length has.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from eval.bench.clients import Answer, RequestSpec, clients_of
from eval.bench.plan import Load, Plan, configured
from eval.bench.run import on_disk
from eval.bench.table import device_facts, percentiles_ms, software
from eval.bench.triton import COUNTED, check_counters, served
from eval.bench.workloads import release_memory
from eval.config import Config, changed
from eval.load import processes_for
from eval.random_whisper.engine import random_engine
from eval.random_whisper.shapes import published_shape
from eval.record import Check, Result, Run, Say, Section, Text
from eval.server import RunningServer, by_role, cpu_s, running
from serve.contract.config import RuntimeConfig
from serve.contract.devices import counted, first_of, names_of
from serve.contract.errors import ConfigError

LEAST = 0.975  # of the first figure's throughput, for each engine
LENGTHS = 16  # different ones
TOKENS_PER_S = 128 / 30  # as in the bench's throughput
_PROCESSES = 4  # of clients, for each engine
_GATEWAY = "gateway"
# Kinds of processes, by what each does.
_KINDS = {_GATEWAY: _GATEWAY, "tritonserver": "tritonserver", "whisper": "engine"}


def specs_of(load: Load) -> list[RequestSpec]:
    """Return requests whose lengths lie evenly between the shortest and the longest."""
    step = (load.longest_s - load.shortest_s) / (LENGTHS - 1)
    lengths = [round(4 * (load.shortest_s + i * step)) / 4 for i in range(LENGTHS)]
    return [RequestSpec(length, round(length * TOKENS_PER_S)) for length in lengths]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Figures of a server under the load."""

    device: str
    engines: int
    rtfx: float  # seconds of audio, before padding, for each second
    requests_per_s: float
    seconds: float
    p50_ms: float
    p99_ms: float
    cores: dict[str, float]  # that were busy, by kind of process; those of its kind together
    cpu_s_per_audio_hour: dict[str, float]
    busiest_thread: dict[str, float]  # of a kind's processes, its share of a core

    @property
    def server_cores(self) -> float:
        """Sum the cores that the server kept busy, its clients apart."""
        return sum(cores for kind, cores in self.cores.items() if kind != "clients")

    def __str__(self) -> str:
        """Write a line of the report."""
        cores = ", ".join(f"{kind} {value:.2f}" for kind, value in self.cores.items())
        threads = ", ".join(f"{kind} {value:.2f}" for kind, value in self.busiest_thread.items())
        return (
            f"{self.device}: {self.rtfx:.0f} RTFx on {self.engines} engines, "
            f"{self.requests_per_s:.1f} requests/s, p50 {self.p50_ms:.0f} ms, "
            f"p99 {self.p99_ms:.0f} ms; cores busy: {cores}; busiest thread: {threads}"
        )


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The growth of throughput with the engines, and where the host would end it."""

    figures: tuple[Figure, ...]
    # Throughput of the last figure by that of the first, and by that and the ratio of engines.
    ratio: float
    efficiency: float
    cores: int
    # Engines whose load would keep the gateway's busiest thread, one of an engine's process, and
    # all cores just busy, by the last figure; more would wait for the host.
    gateway_thread_binds_above: float
    cores_bind_above: float

    @property
    def check(self) -> Check:
        """Check that each engine adds as much as it has to."""
        name = f"each engine adds at least {LEAST:.1%} of the first one's throughput"
        return Check(name, self.efficiency >= LEAST, f"{self.efficiency:.1%}")

    def __str__(self) -> str:
        """Write lines of the report."""
        last = self.figures[-1]
        return (
            f"{self.ratio:.3f} x the throughput with {last.engines} engines, "
            f"{100 * self.efficiency:.1f} % of what as many single ones had\n"
            f"the gateway's busiest thread has a core's work at "
            f"{self.gateway_thread_binds_above:.1f} engines, the server's processes that of "
            f"{self.cores} cores at {self.cores_bind_above:.1f}"
        )


def scale(run: Run, *, devices: Sequence[str] | None, **of_load: Any) -> Result:
    """Measure servers on some devices, one after another.

    Args:
        run: its config says how to run and serve an engine, and which shape it has.
        devices: as of `Load`; None is its own.
        of_load: the other fields of `Load`.

    Raises:
        ConfigError: the load or the shape is none that can be measured.
        EarshotError: a server did not start, a request failed, or the answers are not those of the
            windows that were sent.
    """
    load = Load(tuple(devices or Load.devices), **of_load)
    check_load(load)
    config = changed(run.config, "runtime", slots=load.slots or run.config.runtime.slots)
    plan = Plan(slots=(config.runtime.slots,), beam_size=load.beam_size)
    config = configured(config, plan)
    each = [counted(dataclasses.replace(config.runtime, device=device)) for device in load.devices]
    first = dataclasses.replace(config, runtime=first_of(each[0]))
    engine = random_engine(published_shape(config.build.checkpoint), config.build.precision)
    with on_disk(engine, first, run.say) as folder:
        release_memory(first.runtime.device)
        scaling = measure_scaling(config, folder, each, load, run.say)
    run.config = config
    run.machine |= device_facts(first.runtime.device, run.machine["GPU"])
    run.versions |= software()
    run.say(str(scaling))
    section = Section("Figures", [Text("", items=[*map(str, scaling.figures), str(scaling)])])
    return Result({"scaling": scaling}, (scaling.check,), (section,))


def measure_scaling(
    config: Config,
    folder: Path,
    each: Sequence[RuntimeConfig],
    load: Load,
    progress: Say,
) -> Scaling:
    """Start a server with each of these runtimes in turn and put the load on it.

    Args:
        config: how to serve.
        folder: an engine with end-of-text suppressed, as `write_engine` writes it.
        each: how to run it, `counted`; the first is what the last is compared with.
        load: what is sent.
        progress: gets a line at a time.

    Raises:
        EarshotError: see `run`.
    """
    figures = []
    for runtime in each:
        server_config = dataclasses.replace(config, runtime=runtime)
        figures.append(_measure(server_config, folder, load, progress))
        progress(str(figures[-1]))
    return scaling_of(figures, os.cpu_count() or 1)


def scaling_of(figures: Sequence[Figure], cores: int) -> Scaling:
    """Compute what the figures say of more engines, on a host of so many cores."""
    first, last = figures[0], figures[-1]
    ratio = last.rtfx / first.rtfx
    return Scaling(
        tuple(figures),
        ratio,
        ratio * first.engines / last.engines,
        cores,
        last.engines / last.busiest_thread[_GATEWAY],
        last.engines * cores / last.server_cores,
    )


def check_load(load: Load) -> None:
    """Refuse what is not one window.

    Raises:
        ConfigError: the lengths are not between 1 and 30 s, or not in order.
    """
    if not 1 <= load.shortest_s <= load.longest_s <= 30:
        raise ConfigError(
            f"clips of {load.shortest_s:g} to {load.longest_s:g} s; expected lengths between 1 and "
            "30 s, the shorter first: each is one window"
        )


def _measure(config: Config, folder: Path, load: Load, progress: Say) -> Figure:
    engines = len(names_of(config.runtime.device))
    in_flight = engines * load.clients
    roomy = changed(
        served(config, in_flight),
        "server",
        max_inflight=max(config.server.max_inflight, in_flight),
        max_inflight_mb=max(config.server.max_inflight_mb, 2 * in_flight),
    )
    with running(roomy, engine=str(folder)) as server:
        processes = processes_for(in_flight, _PROCESSES * engines)
        progress(
            f"{config.runtime.device}: {in_flight} requests in flight from {processes} processes"
        )
        before = server.settled(*COUNTED)
        with clients_of(server.grpc, specs_of(load), in_flight, processes) as clients:
            while len(clients.answered) < 2 * in_flight:
                clients.answers()
            kept, meter, began = list[Answer](), _Meter(server, clients.pids), time.monotonic()
            while (wall_s := time.monotonic() - began) < load.seconds:
                kept += clients.answers()
            cores, threads = meter.cores(wall_s)
            clients.finish()
        check_counters(server, before, clients.answered)
    audio_s = sum(answer.spec.seconds for answer in kept)
    latency = percentiles_ms([answer.latency_s for answer in kept])
    return Figure(
        config.runtime.device,
        engines,
        audio_s / wall_s,
        len(kept) / wall_s,
        wall_s,
        latency["p50_ms"],
        latency["p99_ms"],
        cores,
        {kind: 3600 * busy * wall_s / audio_s for kind, busy in cores.items()},
        threads,
    )


class _Meter:
    """Processor time from when it is made on: of the server's processes, and of its clients."""

    def __init__(self, server: RunningServer, clients: Sequence[int]) -> None:
        self._processes = list(_processes(server, clients))
        self._began = self._spent()

    def cores(self, wall_s: float) -> tuple[dict[str, float], dict[str, float]]:
        """Measure the cores that were busy meanwhile, and the share of the busiest thread."""
        cores: dict[str, float] = {}
        busiest: dict[str, float] = {}
        for key, (spent, threads) in self._spent().items():
            kind, began = key[0], self._began[key]
            cores[kind] = cores.get(kind, 0.0) + (spent - began[0]) / wall_s
            most = max(s - began[1].get(thread, 0.0) for thread, s in threads.items()) / wall_s
            busiest[kind] = max(busiest.get(kind, 0.0), most)
        return cores, busiest

    def _spent(self) -> dict[tuple[str, int], tuple[float, dict[int, float]]]:
        """Return seconds so far by kind and process: of all of it, and by thread."""
        spent = {}
        for kind, process in self._processes:
            threads = {
                thread.id: thread.user_time + thread.system_time for thread in process.threads()
            }
            spent[kind, process.pid] = (cpu_s(process), threads)
        return spent


def _processes(
    server: RunningServer, clients: Sequence[int]
) -> Iterator[tuple[str, psutil.Process]]:
    """Yield processes of server and clients with their roles, but those that read one file."""
    for pid in clients:
        yield "clients", psutil.Process(pid)
    for role, process in by_role(server.process.pid):
        if role in _KINDS:
            yield _KINDS[role], process
