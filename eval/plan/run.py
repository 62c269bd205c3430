"""`python -m eval plan`: GPUs for a load, and the cost of an hour of audio.

Figures of one GPU come from a bench.json that `python -m eval bench` wrote, or from a committed
table of the same form, whose `machine` names its conditions.
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

COMMITTED = Path("eval/plan/measured")  # relative to the project's root
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
    machine: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One GPU."""

    source: str  # the file of the figures
    conditions: str
    saturated_per_s: float  # requests of `REQUEST_S` of audio
    # Requests a second, offered by a Poisson process, and their p99 (s) with the time that the
    # server adds to the runtime; ascending.
    levels: tuple[tuple[float, float], ...]

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
        config: the configuration; every request uses its beam size.
        file: the bench's record; None: the committed file of the config's name.

    Raises:
        FileError, ConfigError: there is no such file, it was measured with another configuration,
            or it lacks figures; the message says how to measure them.
    """
    path = file or COMMITTED / f"{config.name}.json"
    measure = (
        "measure it: python -m eval bench --config … --beam-size "
        f"{config.transcriber.beam_size} --workloads start,latency,open-loop --through-server, and "
        "give its bench.json as --measured FILE"
    )
    text = read_text(path, measure)
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
    rows = {
        (row.workload, row.system.endswith("through Triton")): row
        for row in content.figures.rows
        if row.is_ours and row.value
    }
    levels = [row.figures for row in rows.values() if "offered_per_s" in row.figures]
    needed = [("latency", False), ("latency", True), (_SATURATED, False)]
    if len(levels) < 2 or not rows.keys() >= {*needed}:
        raise ConfigError(f"{path} lacks figures of latency or of the open loop; {measure}")
    direct_ms, served_ms, saturated_per_s = (rows[key].value or 0.0 for key in needed)
    server_ms = served_ms - direct_ms
    return Measured(
        str(path),
        "; ".join(f"{key} {text}" for key, text in content.machine.items()),
        saturated_per_s,
        tuple(sorted((f["offered_per_s"], (f["p99_ms"] + server_ms) / 1e3) for f in levels)),
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
    cost = "unknown; give --price, of a GPU for an hour"
    if price:
        cost = f"{price * gpus / audio_hours:.5f} per hour of audio"
    return [
        ("measured", f"{measured.source}: {measured.conditions}"),
        (
            "one GPU",
            f"{max_per_s:.0f} requests of {REQUEST_S:g} s a second with a p99 of {p99_s:g} s "
            f"({max_per_s / saturated:.0%} of its maximum, {saturated:.0f})",
        ),
        (
            "GPUs",
            f"{gpus} for {load:g} requests a second, {load / gpus:.0f} each, p99 {expected_s:.3f} "
            "s; one more if one may fail",
        ),
        ("audio", f"{audio_hours:.0f} hours an hour, {audio_hours / gpus:.0f} per GPU hour"),
        ("cost", cost),
    ]
