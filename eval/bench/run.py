"""One run of the benchmark: ceilings, workloads, options, peers; a row as soon as it is known."""

import contextlib
import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.accuracy.data import write_text
from eval.bench import ablate as bench_ablate
from eval.bench import floor as bench_floor
from eval.bench import table as bench_table
from eval.bench import workloads as bench
from eval.bench.engine import RandomEngine, write_engine
from eval.bench.peers import run as bench_peers
from eval.bench.table import Row
from eval.bench.workloads import Plan, Say
from serve.config import Config
from serve.errors import ConfigError, UnavailableError

SERVER_PACKAGES = ("pytriton", "soundfile", "tritonclient")  # beyond what the runtime needs


@dataclasses.dataclass(frozen=True)
class Extras:
    """What to run beside the workloads."""

    ablate: bool = False
    through_triton: bool = False
    peers: tuple[str, ...] = ()


def installed_peers(say: Say) -> tuple[str, ...]:
    """The peers that this machine has, and a line on each that it lacks."""
    found = []
    for name in bench_peers.PEERS:
        try:
            bench_peers.check([name])
            found.append(name)
        except UnavailableError as error:
            say(f"left out: {error}")
    return tuple(found)


def check(config: Config, plan: Plan, extras: Extras) -> None:
    """Refuse what cannot be run before anything is.

    Raises:
        ConfigError: a name is unknown, or the config is not for a GPU.
        UnavailableError: there is no GPU, or a peer or the server is not installed.
    """
    for what, names, known in (
        ("workloads", plan.workloads, bench.WORKLOADS),
        ("peers", extras.peers, tuple(bench_peers.PEERS)),
    ):
        unknown = set(names) - set(known)
        if unknown:
            raise ConfigError(
                f"unknown {what}: {', '.join(sorted(unknown))}; known: {', '.join(known)}"
            )
    device = config.runtime.device
    if not device.startswith("cuda"):
        raise ConfigError(f'bench needs runtime.device = "cuda", got {device!r}')
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"runtime.device = {device!r}, but torch sees {torch.cuda.device_count()} CUDA "
            "devices here; bench needs one"
        )
    bench_peers.check(extras.peers)
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if extras.through_triton and missing:
        raise UnavailableError(
            f"--through-triton needs the packages {', '.join(missing)}, which are not installed"
        )


def rows(
    engine: RandomEngine, config: Config, plan: Plan, extras: Extras, say: Say
) -> Iterator[Row]:
    """Everything that was asked for, one after the other.

    Raises:
        UnavailableError: an engine folder is needed and the disk does not hold it.
        EarshotError: something failed that is no refusal.
    """
    needs_folder = "start" in plan.workloads or extras.through_triton
    with on_disk(engine, config, say) if needs_folder else contextlib.nullcontext() as folder:
        found = []
        for row in _in_process(engine, folder, config, plan, extras, say):
            found.append(row)
            yield row
        if extras.through_triton and folder is not None:
            yield from _through_triton(folder, config, plan, found, say)
    for name in extras.peers:
        say(f"peer {name}")
        bench.release_memory(config.runtime.device)
        yield from bench_peers.PEERS[name](
            engine.manifest.dims, config.runtime.device, plan.seconds, say
        )


def _in_process(
    engine: RandomEngine, folder: Path | None, config: Config, plan: Plan, extras: Extras, say: Say
) -> Iterator[Row]:
    """Ceilings, then the runtime without a server."""
    say("ceilings of this machine")
    ceilings = bench_floor.measure(torch.device(config.runtime.device), engine.manifest.dims)
    yield from ceilings.rows()
    if "start" in plan.workloads and folder is not None:
        try:
            yield bench.start(folder, config.runtime, ceilings, say)
        except UnavailableError as error:
            yield bench_table.refused("start", bench_table.OURS, "s", error)
    yield from bench.run(engine, config, plan, ceilings, say)
    if extras.ablate:
        yield from bench_ablate.run(engine, config, plan, ceilings, say)


def _through_triton(
    folder: Path, config: Config, plan: Plan, found: list[Row], say: Say
) -> Iterator[Row]:
    """A real server, compared with the same number of slots in process."""
    from eval.bench.triton import through_triton  # noqa: PLC0415 - needs the server's packages

    bench.release_memory(config.runtime.device)
    name = bench.system(config.runtime)
    same = [row.value for row in found if (row.workload, row.system) == ("throughput", name)]
    try:
        yield from through_triton(config, folder, same[0] if same else None, plan.seconds, say)
    except UnavailableError as error:
        yield bench_table.refused(
            "throughput", f"{bench_table.OURS}, through Triton", "RTFx", error
        )


@contextlib.contextmanager
def on_disk(engine: RandomEngine, config: Config, say: Say) -> Iterator[Path]:
    """The engine as a folder, gone at the end.

    Raises:
        UnavailableError: the disk does not hold it.
    """
    with tempfile.TemporaryDirectory(prefix="earshot-bench-") as name:
        say(f"writing the engine to {name}")
        try:
            write_engine(engine, Path(name), config.runtime.device)
        except OSError as error:
            raise UnavailableError(
                f"cannot write an engine to {name}: {error.strerror}; free some space there or "
                "set TMPDIR"
            ) from error
        yield Path(name)


class Record:
    """The rows so far, and a file that always holds them.

    Args:
        config, plan, extras: of the run.
        path: where the JSON goes; None: nowhere.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, config: Config, plan: Plan, extras: Extras, path: Path | None) -> None:
        settings = {**dataclasses.asdict(plan), **dataclasses.asdict(extras)}
        self._heading = bench_table.heading(config, settings)
        self._path = path
        self.rows: list[Row] = []
        self.complete = False
        self._write()

    def add(self, row: Row) -> None:
        """Keep one more."""
        self.rows.append(row)
        self._write()

    def finish(self) -> None:
        """Nothing more will come."""
        self.complete = True
        self._write()

    def lines(self) -> Sequence[str]:
        """The table, and one line of JSON below it."""
        return [*bench_table.render(self.rows), json.dumps(self._fields())]

    def _fields(self) -> dict[str, Any]:
        return bench_table.to_json(self._heading, self.rows, self.complete)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_text(self._path, json.dumps(self._fields(), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error
