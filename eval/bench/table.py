"""What `python -m eval bench` prints: a table of what was measured beside what could be, and JSON.

Nothing here measures.
"""

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from eval.config import Config
from eval.machine import machine_facts

OURS = "earshot"
LESS_IS_BETTER = ("ms", "s")
MORE_IS_BETTER = ("RTFx", "samples/s", "requests/s")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One line of the table."""

    workload: str
    system: str  # ours are "earshot", or "earshot, " and a setting
    value: float | None  # None: refused; `detail` says why
    unit: str
    ideal: float | None  # in the same unit, from this machine's ceilings
    detail: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # more of them, by name

    @property
    def is_ours(self) -> bool:
        """Whether this is what others are compared with."""
        return self.system == OURS or self.system.startswith(f"{OURS}, ")

    def __str__(self) -> str:
        """The measurement by itself, as a line of progress."""
        number = _number(self.value, 0)
        return f"{self.workload}; {self.system}: {number} {self.unit}; {self.detail}"


def refused(workload: str, system: str, unit: str, why: Exception) -> Measurement:
    """The line of something that this machine cannot run."""
    return Measurement(workload, system, None, unit, None, f"refused: {why}")


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """How many times as fast as this system our best one was at the same workload.

    None where there is nothing to compare: the row is ours, or we did not run the workload.
    """
    ours = [
        other.value
        for other in rows
        if other.is_ours
        and other.value
        and (other.workload, other.unit) == (row.workload, row.unit)
    ]
    if row.is_ours or not row.value or not ours:
        return None
    if row.unit in LESS_IS_BETTER:
        return row.value / min(ours)
    return max(ours) / row.value if row.unit in MORE_IS_BETTER else None


def render(rows: Sequence[Measurement]) -> Iterator[str]:
    """The lines of the table."""
    yield (
        f"{'workload':26} {'system':30} {'measured':>10} {'unit':10} {'ideal':>9} {'of ideal':>8} "
        f"{'earshot is':>10}"
    )
    for row in rows:
        line = f"{row.workload:26} {row.system:30} {_number(row.value, 10)} {row.unit:10} "
        line += f"{_number(row.ideal, 9)} {_share(row)} {_times(ratio(row, rows))}"
        yield f"{line}  {row.detail}".rstrip()


def _number(value: float | None, width: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    if 0 < abs(value) < 0.1:
        return f"{value:{width}.2g}"
    return f"{value:{width}.{0 if abs(value) >= 1000 else 2}f}"


def _share(row: Measurement) -> str:
    """How much of the ideal was reached."""
    if not row.value or row.ideal is None:
        return " " * 8
    share = row.ideal / row.value if row.unit in LESS_IS_BETTER else row.value / row.ideal
    return f"{100 * share:6.0f} %"


def _times(times: float | None) -> str:
    return " " * 10 if times is None else f"{times:8.2f} x"


def heading(config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """What stands above the figures, as plain values: config, machine, versions, settings.

    Args:
        config: what is measured.
        settings: of this run of the benchmark.
    """
    runtime = dataclasses.asdict(config.runtime)
    return {
        "config": config.name,
        "machine": machine(config.runtime.device),
        "versions": versions(),
        "settings": {"precision": config.build.precision, **settings, "runtime": runtime},
    }


def to_json(heading: dict[str, Any], rows: Sequence[Measurement], complete: bool) -> dict[str, Any]:
    """Everything as plain values.

    Args:
        heading: as `heading` gives it.
        rows: so far.
        complete: whether nothing is missing; False after an interruption or an error.
    """
    values = [{**dataclasses.asdict(row), "earshot_over_this": ratio(row, rows)} for row in rows]
    return {**heading, "complete": complete, "rows": values}


def machine(device: str) -> dict[str, str]:
    """The hardware, the driver included."""
    facts = machine_facts()
    if torch.device(device).type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["driver"] = facts["GPU"].partition(";")[0].rpartition(", ")[2]
    return facts


def versions() -> dict[str, str]:
    """Of the software that the figures depend on most."""
    cudnn: Any = torch.backends.cudnn  # its annotations are incomplete
    return {
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "transformers": _version_of("transformers"),
        "ctranslate2": _version_of("ctranslate2"),
        "vllm": _version_of("vllm"),
        "CUDA": torch.version.cuda or "none",
        "cuDNN": str(cudnn.version() or "none"),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
