"""`python -m eval plan`: GPUs for a load, and what an hour of audio costs.

Figures of one GPU come from a bench.json that `python -m eval bench` wrote, or from a committed
table of the same form, which names its conditions.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.config import Config
from eval.record import Result, Run
from serve.contract.codec import from_json
from serve.contract.errors import ConfigError
from serve.contract.files import read_text

COMMITTED = Path(__file__).parent / "measured"
REQUEST_S = 10.0  # audio of a request of the bench's open loop
_SATURATED = "open loop, saturated"
# Of [runtime]: what changes how fast a request is served, and is told by the bench's file. Rows are
# as many as the beam needs.
_SETTINGS = ("encoder_batch", "kernels", "cuda_graph", "cross_kv", "encoder_precision")


@dataclasses.dataclass(frozen=True)
class _Row:
    workload: str
    system: str
    value: float | None
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Figures:
    rows: tuple[_Row, ...]


@dataclasses.dataclass(frozen=True)
class _File:
    config: str
    settings: dict[str, Any]
    figures: _Figures | None = None
    rows: tuple[_Row, ...] = ()  # of files that the bench wrote before it had a record
    conditions: str = ""
    machine: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Level:
    """Latencies of requests at one load."""

    per_s: float  # requests offered, by a Poisson process
    p50_s: float
    p99_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """One GPU."""

    source: str  # where the figures are from
    conditions: str
    saturated_per_s: float  # requests of `REQUEST_S` of audio
    levels: tuple[Level, ...]  # ascending; what the server adds to the runtime is in them
    server_s: float | None  # that; None: the file does not tell, and the levels lack it
    start_s: float | None  # from an engine folder to ready; None: the file does not tell

    def latency_s(self, per_s: Sequence[float] | np.ndarray[Any, Any], rank: str) -> Any:
        """Return p50 or p99 (`rank`) at loads, between those measured by a straight line.

        Below the least load that was measured it is that one's, above the greatest that one's.
        """
        loads = [level.per_s for level in self.levels]
        return np.interp(per_s, loads, [getattr(level, f"{rank}_s") for level in self.levels])

    def most_per_s(self, p99_s: float) -> float:
        """Find the greatest load whose p99 is no more than this.

        Raises:
            ConfigError: no measured load has so short a p99.
        """
        if p99_s < self.levels[0].p99_s:
            least = self.levels[0]
            raise ConfigError(
                f"--p99 {p99_s:g} cannot be promised: at {least.per_s:.0f} requests a second and "
                f"GPU, the least load that {self.source} has, it is {least.p99_s:.3g} s; expected "
                "that or more"
            )
        loads = np.linspace(self.levels[0].per_s, self.levels[-1].per_s, 2000)
        return float(loads[self.latency_s(loads, "p99") <= p99_s][-1])


def find_measured(config: Config, file: Path | None) -> Measured:
    """Find what is known of a config.

    Args:
        config: of a product; all requests are searched as it says.
        file: of the bench; None: the committed table of the config's name.

    Raises:
        FileError, ConfigError: there is no such file, it is of something else, or it lacks what is
            needed; the message says how to measure it.
    """
    beam_size = config.transcriber.beam_size
    path = file or COMMITTED / f"{config.name}.json"
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    measure = (
        f"measure it: python -m eval bench --config … --beam-size {beam_size} --workloads "
        "start,latency,open-loop --through-server, and give its bench.json as --measured FILE"
    )
    if file is None and not path.exists():
        known = ", ".join(sorted(table.stem for table in COMMITTED.glob("*.json")))
        raise ConfigError(
            f"nothing has been measured of {config.name}; there are figures of {known}. {measure}"
        )
    text = read_text(path, "expected the bench.json that `python -m eval bench` wrote")
    content = from_json(_File, text, str(path), advice=measure, extra="ignore")
    _require_same(content, config, path, measure)
    return _measured(content, path, measure)


def _require_same(content: _File, config: Config, path: Path, measure: str) -> None:
    """Refuse figures of another product, or of other settings."""
    runtime = content.settings.get("runtime", {})
    expected: dict[str, Any] = {
        "config": config.name,
        "build.precision": config.build.precision,
        "beam_size": config.transcriber.beam_size,
        "runtime.slots": config.runtime.slots,
        **{f"runtime.{key}": getattr(config.runtime, key) for key in _SETTINGS},
    }
    measured: dict[str, Any] = {
        "config": content.config,
        "build.precision": content.settings.get("precision"),
        "beam_size": content.settings.get("beam_size"),
        "runtime.slots": next(iter(content.settings.get("slots", ())), None),
        **{f"runtime.{key}": runtime.get(key) for key in _SETTINGS},
    }
    for key, value in expected.items():
        if key == "runtime.encoder_precision" and (value, measured[key]) == ("auto", "full"):
            continue  # with FP8 a server does more than was measured
        if measured[key] != value:
            raise ConfigError(
                f"{path} was measured with {key} = {measured[key]!r}, and this is {value!r}: what "
                f"that does under load is not known. {measure}"
            )


def _measured(content: _File, path: Path, measure: str) -> Measured:
    rows = content.figures.rows if content.figures else content.rows
    ours = [row for row in rows if row.system.startswith("earshot") and row.value]
    through = {row.workload: row.value for row in ours if row.system.endswith("through Triton")}
    direct = {row.workload: row for row in ours if not row.system.endswith("through Triton")}
    levels = [
        row.figures
        for name, row in direct.items()
        if name.startswith("open loop") and name != _SATURATED
    ]
    if _SATURATED not in direct or len(levels) < 2:
        raise ConfigError(f"{path} has no figures of the workload open-loop; {measure}")
    server_s = None
    if "latency" in direct and "latency" in through:
        server_s = ((through["latency"] or 0) - (direct["latency"].value or 0)) / 1e3
    start = direct.get("start")
    extra_s = server_s or 0.0
    return Measured(
        str(path),
        content.conditions or "; ".join(f"{key} {text}" for key, text in content.machine.items()),
        direct[_SATURATED].value or 0.0,
        tuple(
            sorted(
                (
                    Level(
                        figures["offered_per_s"],
                        figures["p50_ms"] / 1e3 + extra_s,
                        figures["p99_ms"] / 1e3 + extra_s,
                    )
                    for figures in levels
                ),
                key=lambda level: level.per_s,
            )
        ),
        server_s,
        through.get("start") or (start.value if start else None),
    )


# ---------------------------------------------------------------- run


def plan(
    run: Run, *, measured: Path | None, load: float, p99: float, price: float | None
) -> Result:
    """Show how many GPUs an even load needs.

    Args:
        run: of a product that was benched on such a GPU.
        measured: a file of the bench; None is the committed one.
        load: requests of 10 s of audio a second.
        p99: seconds within which 99 of 100 are answered.
        price: of a GPU for an hour.

    Raises:
        ConfigError: a figure is needed that nobody has measured.
    """
    for line in steady(find_measured(run.config, measured), load, p99, price):
        run.show(line)
    return Result()


def steady(measured: Measured, load: float, p99_s: float, price: float | None) -> list[str]:
    """Say what an even load needs, in lines."""
    each = measured.most_per_s(p99_s)
    gpus = math.ceil(load / each)
    audio_hours = load * REQUEST_S  # an hour
    at_s = float(measured.latency_s([load / gpus], "p99")[0])
    lines = [
        f"measured  {measured.source}: {measured.conditions}",
        f"a GPU     {each:.0f} requests of {REQUEST_S:g} s a second with a p99 of {p99_s:g} s "
        f"({each / measured.saturated_per_s:.0%} of {measured.saturated_per_s:.0f} at most)",
        f"GPUs      {gpus} for {load:g} requests a second, {load / gpus:.0f} each, p99 "
        f"{at_s:.3f} s; one more if one may fail",
        f"audio     {audio_hours:.0f} hours an hour, {audio_hours / gpus:.0f} for a GPU hour",
    ]
    if measured.server_s is None:
        lines.append("          of the runtime alone: the file lacks what the server adds")
    if price is None:
        lines.append("cost      give --price, of a GPU for an hour")
    else:
        lines.append(f"cost      {price * gpus / audio_hours:.5f} for an hour of audio")
    return lines
