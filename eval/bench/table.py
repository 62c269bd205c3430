"""The rows of `python -m eval bench`: measured values beside the ideal ones."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from eval.record import Table

OURS = "earshot"
WARM_REQUESTS = 10
_LESS_IS_BETTER = ("ms", "s")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    workload: str
    system: str  # ours are "earshot", or "earshot, " and a setting
    value: float | None  # None: refused; `detail` says why
    unit: str
    ideal: float | None = None  # in the same unit, from this machine's ceilings
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

    def speed_against(self, reference: float | None) -> float | None:
        """Return how many times as fast this row is as a value; None if there is none of both."""
        if not self.value or not reference:
            return None
        less_is_better = self.unit in _LESS_IS_BETTER
        return reference / self.value if less_is_better else self.value / reference


def refused(workload: str, system: str, unit: str, reason: Exception) -> Measurement:
    """Return the row of something that this machine cannot run."""
    return Measurement(workload, system, None, unit, None, f"refused: {reason}")


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return how many times as fast as this peer our best row was at the same workload.

    None if there is nothing to compare: the row is ours, or we did not run the workload.
    """
    same = (row.workload, row.unit)
    ours = [one for one in rows if one.is_ours and (one.workload, one.unit) == same]
    speeds = [one.speed_against(row.value) for one in ours]
    return None if row.is_ours else max(filter(None, speeds), default=None)


def percentiles_ms(latency_s: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in ms, linear between ranks."""
    ranks = {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
    return {name: 1e3 * float(np.percentile(latency_s, rank)) for name, rank in ranks.items()}


def measure_latency(
    system: str, send: Callable[[], object], requests: int, ideal_ms: float | None, detail: str
) -> Measurement:
    """Measure one request at a time, after some that are not counted; the value is the median.

    Args:
        system: the system's name.
        send: sends a request and returns after its answer.
        requests: the number of counted requests.
        ideal_ms: the shortest time of a request on this machine; None: unknown.
        detail: describes a request.
    """
    latency_s = list[float]()
    for _ in range(WARM_REQUESTS + requests):
        began_s = time.perf_counter()
        send()
        latency_s.append(time.perf_counter() - began_s)
    figures = {**percentiles_ms(latency_s[WARM_REQUESTS:]), "requests": requests}
    return Measurement("latency", system, figures["p50_ms"], "ms", ideal_ms, detail, figures)


def table_of(rows: Sequence[Measurement]) -> Table:
    """Return the table of the report."""
    header = ["workload", "system", "measured", "ideal", "of ideal", "earshot is", "detail"]
    cells = []
    for row in rows:
        share, times = row.speed_against(row.ideal), ratio(row, rows)
        cells.append(
            [
                *(row.workload, row.system, f"{_number(row.value)} {row.unit}"),
                "" if row.ideal is None else _number(row.ideal),
                "" if share is None else f"{100 * share:.0f} %",
                "" if times is None else f"{times:.2f} x",
                row.text,
            ]
        )
    return Table(header, cells, prose=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.{0 if abs(value) >= 1000 else 2}f}"
