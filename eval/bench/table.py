"""The rows of `python -m eval bench`: measured values beside the ideal ones."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eval.record import Table

OURS = "earshot"
_LESS_IS_BETTER = ("ms", "s")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    workload: str
    system: str  # ours are "earshot", or "earshot, " and a setting
    value: float | None  # None: refused; `detail` says why
    unit: str
    ideal: float | None  # in the same unit, from this machine's ceilings
    detail: str = ""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # further ones by name

    @property
    def is_ours(self) -> bool:
        """Return whether this is a row that others are compared with."""
        return self.system == OURS or self.system.startswith(f"{OURS}, ")

    @property
    def text(self) -> str:
        """Return the detail, and the further figures by name."""
        figures = (f"{name.replace('_', ' ')} {_number(n)}" for name, n in self.figures.items())
        return "; ".join(filter(None, (self.detail, ", ".join(figures))))

    def __str__(self) -> str:
        """Write the measurement by itself, as a line of progress."""
        number = _number(self.value)
        return f"{self.workload}; {self.system}: {number} {self.unit}; {self.text}"


def refused(workload: str, system: str, unit: str, why: Exception) -> Measurement:
    """Return the row of something that this machine cannot run."""
    return Measurement(workload, system, None, unit, None, f"refused: {why}")


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return how many times as fast as this system our best one was at the same workload.

    None if there is nothing to compare: the row is ours, or we did not run the workload.
    """
    same = (row.workload, row.unit)
    ours = [
        other.value
        for other in rows
        if other.is_ours and other.value and (other.workload, other.unit) == same
    ]
    if row.is_ours or not row.value or not ours:
        return None
    return row.value / min(ours) if row.unit in _LESS_IS_BETTER else max(ours) / row.value


def percentiles_ms(latency_s: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in ms, linear between ranks."""
    ranks = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
    return {name: 1e3 * float(np.percentile(latency_s, rank)) for name, rank in ranks.items()}


def table_of(rows: Sequence[Measurement]) -> Table:
    """Return the table of the report."""
    header = ["workload", "system", "measured", "ideal", "of ideal", "earshot is", "detail"]
    cells = [
        [
            row.workload,
            row.system,
            f"{_number(row.value)} {row.unit}",
            "" if row.ideal is None else _number(row.ideal),
            _share(row),
            "" if (times := ratio(row, rows)) is None else f"{times:.2f} x",
            row.text,
        ]
        for row in rows
    ]
    return Table(header, cells, prose=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.{0 if abs(value) >= 1000 else 2}f}"


def _share(row: Measurement) -> str:
    """Return the share of the ideal that was reached."""
    if not row.value or row.ideal is None:
        return ""
    share = row.ideal / row.value if row.unit in _LESS_IS_BETTER else row.value / row.ideal
    return f"{100 * share:.0f} %"
