"""A day as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.plan.replay import Day

_COLOURS = ("#1f5fa8", "#b3541e", "#3d7a3d")


def draw(path: Path, days: Sequence[Day], p99_s: float, title: str) -> None:
    """Draw one day under several policies: what came, how many GPUs there were, how long it took.

    Args:
        path: of the PNG.
        days: the same day under each policy.
        p99_s: what was wanted.
        title: stands above it.
    """
    figure = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    load, gpus, late = figure.subplots(3, 1, sharex=True)
    hours = [minute / 60 for minute in range(len(days[0].arrivals_per_s))]
    load.plot(hours, days[0].arrivals_per_s, color="#555555", linewidth=0.8)
    load.set_ylabel("requests a second")
    load.set_title(title, loc="left", fontsize=10)
    for day, colour in zip(days, _COLOURS, strict=False):
        label = f"{day.policy.name}: {day.gpu_hours:.0f} GPU hours"
        gpus.plot(hours, day.gpus, color=colour, linewidth=1.2, label=label)
        late.plot(hours, day.minute_p99_s, color=colour, linewidth=0.8)
    gpus.set_ylabel("GPUs ready")
    gpus.set_ylim(bottom=0)
    gpus.yaxis.set_major_locator(MaxNLocator(integer=True))
    gpus.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
    late.axhline(p99_s, color="#999999", linewidth=0.8, linestyle="--")
    late.set_yscale("log")
    late.set_ylabel("p99 of each minute, s")
    late.set_xlabel("hour of the day")
    late.set_xlim(0, 24)
    late.set_xticks(range(0, 25, 3))
    for axes in (load, gpus, late):
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
