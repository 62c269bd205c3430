"""The table that `python -m eval bench` prints: what was measured beside what could be."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    workload: str
    system: str
    value: float
    unit: str
    ideal: float | None  # in the same unit, from this machine's ceilings
    detail: str = ""


def render(rows: list[Row]) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'workload':24} {'system':20} {'measured':>10} {'unit':10} {'ideal':>8} {'of ideal':>8}"
    for row in rows:
        line = f"{row.workload:24} {row.system:20} {row.value:10.2f} {row.unit:10}"
        if row.ideal is not None:
            faster_is_less = row.unit == "ms"
            share = row.ideal / row.value if faster_is_less else row.value / row.ideal
            line += f" {row.ideal:8.1f} {100 * share:6.0f} %"
        else:
            line += " " * 18
        yield f"{line}  {row.detail}".rstrip()
