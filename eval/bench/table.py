"""The rows of `python -m eval bench`: measured values beside the ideal ones."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from eval.record import Check, Table

OURS = "earshot"
WARM_REQUESTS = 10
MIN_EFFICIENCY = 0.975  # each engine's share of the first one's throughput


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
    def cells(self) -> tuple[str, str, str, str]:
        """Return workload, system, value with its unit, and the detail with further figures."""
        figures = (f"{name.replace('_', ' ')} {_number(n)}" for name, n in self.figures.items())
        detail = "; ".join(filter(None, (self.detail, ", ".join(figures))))
        return self.workload, self.system, f"{_number(self.value)} {self.unit}", detail

    def __str__(self) -> str:
        """Write the measurement by itself, as a line of progress."""
        return "{}; {}: {}; {}".format(*self.cells)

    def speed_against(self, reference: float | None) -> float | None:
        """Return how many times as fast this row is as a value; None if either has no value."""
        if not self.value or not reference:
            return None
        return reference / self.value if self.unit in ("ms", "s") else self.value / reference


def refused(workload: str, system: str, unit: str, reason: Exception) -> Measurement:
    """Return the row of something that this machine cannot run."""
    return Measurement(workload, system, None, unit, None, f"refused: {reason}")


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return how many times as fast as this peer our best row was at the same workload.

    None if there is nothing to compare: the row is ours, or we did not run the workload.
    """
    if row.is_ours:
        return None
    ours = [own for own in rows if own.is_ours and own.workload == row.workload]
    return max(filter(None, (own.speed_against(row.value) for own in ours)), default=None)


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


def scaling_check(rows: Sequence[Measurement]) -> Check:
    """Check that each engine of the last server adds enough to the throughput of the first one."""
    first, last = rows[0], rows[-1]
    engines = last.figures["engines"] / first.figures["engines"]
    speedup = (last.value or 0.0) / (first.value or 1.0)
    name = f"each engine adds at least {MIN_EFFICIENCY:.1%} of the first one's throughput"
    detail = f"{speedup:.3f} x the throughput with {engines:g} x the engines"
    return Check(name, speedup / engines >= MIN_EFFICIENCY, f"{detail}, {speedup / engines:.1%}")


def table_of(rows: Sequence[Measurement]) -> Table:
    """Return the table of the report."""
    header = ["workload", "system", "measured", "ideal", "of ideal", "earshot is", "detail"]
    lines = []
    for row in rows:
        *first, detail = row.cells
        share, speedup = row.speed_against(row.ideal), ratio(row, rows)
        ideal = "" if row.ideal is None else _number(row.ideal)
        percent = "" if share is None else f"{100 * share:.0f} %"
        lines.append([*first, ideal, percent, f"{speedup:.2f} x" if speedup else "", detail])
    return Table(header, lines, prose=True)


def _number(value: float | None) -> str:
    """Write three significant digits, or every digit of a larger number before its point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
