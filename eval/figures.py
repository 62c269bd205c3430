"""Charts of a report as positions in percent of the axes; the page's style sheet draws them.

A chart has no fixed width, so that one drawing fits a wide page and a phone.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Literal

from eval.accuracy.score import Latency, Rate

Family = Literal["ours", "theirs", "other"]
Tick = tuple[float, str]
"""Position in percent of the axis, and label."""
Span = tuple[float, float, float]
"""One bar of a row: its left end and its width in percent of the axis, and its opacity."""

_OUTLIER = 3.0  # times the median of the intervals' ends: the axis ends there
_LATENCIES_S = tuple(x * 10.0**e for e in range(-3, 3) for x in (1, 2, 5))
_BANDS = ((1, 99, 0.16), (5, 95, 0.2), (25, 75, 0.55))  # percentiles from, to; opacity
_TICKS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One system of a row chart; a mark is a round point, or the gap of a median."""

    name: str
    family: Family
    spans: tuple[Span, ...]
    mark: float | None  # None: beyond the axis
    mark_kind: Literal["point", "gap"]
    text: str


@dataclasses.dataclass(frozen=True)
class RowChart:
    """Rows of systems with a common axis, and a value in words at the right."""

    title: str
    label: str  # for screen readers
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    column: str = ""  # heads the values


def family_of(system: str) -> Family:
    """Return the family of a system by its name, such as "earshot-int8" or "A: earshot-int8"."""
    if "earshot-" in system:
        return "ours"
    return "theirs" if "faster-whisper-" in system else "other"


def rate_chart(title: str, rates: Mapping[str, Rate]) -> RowChart | None:
    """Chart error rates by system with their intervals; None if no system has a rate.

    An interval far beyond the others leaves the axis.
    """
    known = {name: rate for name, rate in rates.items() if rate.percent is not None}
    if not known:
        return None
    ends = [rate.high or 0.0 for rate in known.values()]
    usual = [end for end in ends if end <= _OUTLIER * statistics.median(ends)]
    end = max(usual, default=0.0) * 1.04 or 1.0
    rows = []
    for name, rate in known.items():
        low, high, middle = (100 * (v or 0.0) / end for v in (rate.low, rate.high, rate.percent))
        low, high = min(low, 100.0), min(high, 100.0)
        mark = middle if middle <= 100 else None
        spans = ((low, high - low, 0.45),)
        rows.append(Row(name, family_of(name), spans, mark, "point", f"{rate.percent:.2f}"))
    label = f"{title} with its 95 % interval, by system"
    return RowChart(title, label, tuple(rows), _linear(end))


def latency_chart(title: str, latencies: Mapping[str, Latency]) -> RowChart:
    """Chart latencies of systems, at least one, as nested bands on a logarithmic axis."""
    every_s = [s for latency in latencies.values() for s in latency.percentiles_s[1:100]]
    low, high = math.log(0.85 * min(every_s)), math.log(1.15 * max(every_s))

    def position(seconds: float) -> float:
        return 100 * (math.log(seconds) - low) / (high - low)

    rows = []
    for name, latency in latencies.items():
        spans = list[Span]()
        for low_rank, high_rank, opacity in _BANDS:
            left, right = (position(latency.percentiles_s[rank]) for rank in (low_rank, high_rank))
            spans.append((left, right - left, opacity))
        text = f"{_time(latency.p50_s)} / {_time(latency.p95_s)}"
        median = position(latency.p50_s)
        rows.append(Row(name, family_of(name), tuple(spans), median, "gap", text))
    ticks = [s for s in _LATENCIES_S if low <= math.log(s) <= high]
    labelled = ticks[:: max(1, -(-len(ticks) // 4))]
    labels = tuple((position(s), f"{1e3 * s:.0f} ms" if s < 1 else f"{s:.0f} s") for s in labelled)
    label = "Latency of calls by system: median, and the middle 50, 90 and 98 %"
    return RowChart(title, label, tuple(rows), labels, "p50 / p95")


def _linear(end: float) -> tuple[Tick, ...]:
    """Return round ticks from 0 to `end`."""
    raw = end / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    return tuple((100 * i * step / end, f"{i * step:g}") for i in range(int(end / step) + 1))


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
