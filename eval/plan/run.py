"""`python -m eval plan`: GPUs for a load, and the cost of an hour of audio.

Figures of one GPU come from a bench.json that `python -m eval bench` wrote, or from a committed
table of the same form, which names its conditions.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from eval.bench.table import Measurement
from eval.config import EvaluationProduct
from eval.record import ReportSection, Result, Run, Table
from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_text

COMMITTED = Path(__file__).parent / "measured"
REQUEST_S = 10.0  # audio of a request of the bench's open loop
_SATURATED = "open loop, saturated"
# Settings of [runtime] that change how fast a request is served, and that the bench's file tells.
# The number of rows follows from the beam.
_SETTINGS = ("encoder_batch", "kernels", "cuda_graph", "cross_kv", "encoder_precision")


@dataclasses.dataclass(frozen=True)
class _BenchFigures:
    rows: tuple[Measurement, ...]


@dataclasses.dataclass(frozen=True)
class _BenchFile:
    config: str
    settings: dict[str, Any]
    figures: _BenchFigures
    conditions: str = ""
    machine: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One GPU."""

    source: str  # the file of the figures
    conditions: str
    saturated_per_s: float  # requests of `REQUEST_S` of audio
    # Requests a second, offered by a Poisson process, and their p99 (s) with the time that the
    # server adds to the runtime; ascending.
    levels: tuple[tuple[float, float], ...]
    server_s: float | None  # the added time; None: the file lacks it, and so do the levels

    def p99_s(self, per_s: float | np.ndarray[Any, Any]) -> Any:
        """Return the p99 at loads: between measured ones on a line, beyond them the nearest."""
        loads, latencies_s = zip(*self.levels, strict=True)
        return np.interp(per_s, loads, latencies_s)

    def max_per_s(self, p99_s: float) -> float:
        """Find the greatest load with no greater p99.

        Raises:
            ConfigError: no measured load has so short a p99.
        """
        smallest_per_s, smallest_p99_s = self.levels[0]
        if p99_s < smallest_p99_s:
            raise ConfigError(
                f"--p99 {p99_s:g} cannot be promised: at {smallest_per_s:.0f} requests a second "
                f"and GPU, the smallest load that {self.source} has, it is {smallest_p99_s:.3g} s; "
                "expected that or more"
            )
        loads = np.linspace(smallest_per_s, self.levels[-1][0], 2000)
        return float(loads[self.p99_s(loads) <= p99_s][-1])


def find_measured(config: EvaluationProduct, file: Path | None) -> Measured:
    """Find the figures of a config.

    Args:
        config: the product; its beam size holds for all requests.
        file: the bench's record; None: the committed file of the config's name.

    Raises:
        FileError, ConfigError: there is no such file, it is of another product, or it lacks
            figures; the message says how to measure them.
    """
    path = file or COMMITTED / f"{config.name}.json"
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    measure = (
        "measure it: python -m eval bench --config … --beam-size "
        f"{config.transcriber.beam_size} --workloads start,latency,open-loop --through-server, and "
        "give its bench.json as --measured FILE"
    )
    if file is None and not path.exists():
        known = ", ".join(sorted(table.stem for table in COMMITTED.glob("*.json")))
        raise ConfigError(
            f"nothing has been measured of {config.name}; there are figures of {known}. {measure}"
        )
    text = read_text(path, "expected the bench.json that `python -m eval bench` wrote")
    content = from_json(_BenchFile, text, str(path), advice=measure, extra="ignore")
    _require_same(content, config, path, measure)
    return _measured(content, path, measure)


def _require_same(content: _BenchFile, config: EvaluationProduct, path: Path, measure: str) -> None:
    """Refuse figures of another product, or of other settings."""
    settings, runtime = content.settings, content.settings.get("runtime", {})
    slots = next(iter(settings.get("slots", ())), None)
    pairs = {
        "config": (config.name, content.config),
        "build.precision": (config.build.precision, settings.get("precision")),
        "beam_size": (config.transcriber.beam_size, settings.get("beam_size")),
        "runtime.slots": (config.runtime.slots, slots),
        **{f"runtime.{key}": (getattr(config.runtime, key), runtime.get(key)) for key in _SETTINGS},
    }
    if pairs["runtime.encoder_precision"] == ("auto", "full"):
        del pairs["runtime.encoder_precision"]  # with FP8 a server does more than was measured
    for key, (expected, measured) in pairs.items():
        if measured != expected:
            instead = f"Plan for --beam-size {measured}, or " * (key == "beam_size")
            raise ConfigError(
                f"{path} was measured with {key} = {measured!r}, expected {expected!r}, as the "
                f"config says. {instead}{measure}"
            )


def _measured(content: _BenchFile, path: Path, measure: str) -> Measured:
    ours = [row for row in content.figures.rows if row.is_ours and row.value]
    through = {row.workload: row for row in ours if row.system.endswith("through Triton")}
    direct = {row.workload: row for row in ours if not row.system.endswith("through Triton")}
    server_s = None
    if "latency" in direct and "latency" in through:
        server_s = ((through["latency"].value or 0) - (direct["latency"].value or 0)) / 1e3
    levels = [
        (row.figures["offered_per_s"], row.figures["p99_ms"] / 1e3 + (server_s or 0))
        for row in direct.values()
        if "offered_per_s" in row.figures
    ]
    saturated = direct.get(_SATURATED)
    if saturated is None or len(levels) < 2:
        raise ConfigError(f"{path} has no figures of the workload open-loop; {measure}")
    return Measured(
        str(path),
        content.conditions or "; ".join(f"{key} {text}" for key, text in content.machine.items()),
        saturated.value or 0.0,
        tuple(sorted(levels)),
        server_s,
    )


# ---------------------------------------------------------------- run


def plan(
    run: Run, *, measured: Path | None, load: float, p99: float, price: float | None
) -> Result:
    """Show how many GPUs an even load needs.

    Args:
        run: the run; its product was benched on such a GPU.
        measured: a file of the bench; None is the committed one.
        load: requests of 10 s of audio a second.
        p99: seconds within which 99 of 100 are answered.
        price: the price of a GPU hour; None: unknown.

    Raises:
        ConfigError: a needed figure has not been measured.
    """
    rows = steady(find_measured(run.config, measured), load, p99, price)
    return Result(sections=(ReportSection("GPUs and cost", [Table((), rows)]),))


def steady(
    measured: Measured, load: float, p99_s: float, price: float | None
) -> list[tuple[str, str]]:
    """Return names and values: the GPUs and the cost of an even load."""
    max_per_s, saturated = measured.max_per_s(p99_s), measured.saturated_per_s
    gpus = math.ceil(load / max_per_s)
    audio_hours = load * REQUEST_S  # in an hour
    expected_s = float(measured.p99_s(load / gpus))
    limits = f"({max_per_s / saturated:.0%} of its maximum, {saturated:.0f})"
    if measured.server_s is None:
        limits += "; of the runtime alone, because the file lacks what a server adds"
    cost = "unknown; give --price, of a GPU for an hour"
    if price:
        cost = f"{price * gpus / audio_hours:.5f} per hour of audio"
    return [
        ("measured", f"{measured.source}: {measured.conditions}"),
        (
            "one GPU",
            f"{max_per_s:.0f} requests of {REQUEST_S:g} s a second with a p99 of {p99_s:g} s "
            f"{limits}",
        ),
        (
            "GPUs",
            f"{gpus} for {load:g} requests a second, {load / gpus:.0f} each, p99 {expected_s:.3f} "
            "s; one more if one may fail",
        ),
        ("audio", f"{audio_hours:.0f} hours an hour, {audio_hours / gpus:.0f} per GPU hour"),
        ("cost", cost),
    ]
