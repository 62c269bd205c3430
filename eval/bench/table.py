"""The rows of `python -m eval bench`: measured values beside the ideal ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eval.record import Table

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
        """Return whether this is what others are compared with."""
        return self.system == OURS or self.system.startswith(f"{OURS}, ")

    def __str__(self) -> str:
        """Write the measurement by itself, as a line of progress."""
        number = _number(self.value)
        return f"{self.workload}; {self.system}: {number} {self.unit}; {self.detail}"


def refused(workload: str, system: str, unit: str, why: Exception) -> Measurement:
    """Return the line of something that this machine cannot run."""
    return Measurement(workload, system, None, unit, None, f"refused: {why}")


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return how many times as fast as this system our best one was at the same workload.

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


def percentiles_ms(latency_s: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in ms, linear between ranks."""
    ranks = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
    return {name: 1e3 * float(np.percentile(latency_s, rank)) for name, rank in ranks.items()}


def table_of(rows: Sequence[Measurement]) -> Table:
    """Return the rows of the report."""
    header = ["workload", "system", "measured", "unit", "ideal", "of ideal", "earshot is", "detail"]
    cells = [
        [
            row.workload,
            row.system,
            _number(row.value),
            row.unit,
            "" if row.ideal is None else _number(row.ideal),
            _share(row),
            "" if (times := ratio(row, rows)) is None else f"{times:.2f} x",
            row.detail,
        ]
        for row in rows
    ]
    return Table(header, cells, prose=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.{0 if abs(value) >= 1000 else 2}f}"


def _share(row: Measurement) -> str:
    """Return the share of the ideal that was reached."""
    if not row.value or row.ideal is None:
        return ""
    share = row.ideal / row.value if row.unit in LESS_IS_BETTER else row.value / row.ideal
    return f"{100 * share:.0f} %"


def device_facts(device: str, gpu: str) -> dict[str, str]:
    """Return the device that is measured and its driver; `gpu` is the machine's."""
    if torch.device(device).type != "cuda":
        return {}
    driver = gpu.partition(";")[0].rpartition(", ")[2]
    return {"device": torch.cuda.get_device_name(device), "driver": driver}


def software() -> dict[str, str]:
    """Return the versions of what torch brings."""
    cudnn: Any = torch.backends.cudnn  # its annotations are incomplete
    return {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "cuDNN": str(cudnn.version() or "none"),
    }
