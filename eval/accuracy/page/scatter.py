"""A figure of points whose names stand beside it, each joined to its point."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.accuracy.page.svg import (
    LINE,
    NARROW,
    PAPER,
    WIDE,
    colour_of,
    new_figure,
    styled,
    to_svg,
)

Point = tuple[float, float]


_LINE = 24  # height of a name in the column, or in the list below


def scatter(
    points: dict[str, list[Point]], many: int, name: str, label: str, *, narrow: bool
) -> str:
    """Draw memory in MiB and RTFx of systems, of one run or of two, as an `svg` element.

    Args:
        points: by system.
        many: how many calls at a time the throughput is of.
        name: starts the figure's ids.
        label: says what it shows.
        narrow: for a phone, where the names stand in a list below, by number.
    """
    list_height = _LINE * len(points) + 12 if narrow else 0
    width, plot = (NARROW, 250) if narrow else (WIDE, 340)
    plot = max(plot, _LINE * len(points) + 80)
    left, right, bottom, top = 44, 34 if narrow else 270, 44, 34
    height = plot + list_height
    inner = plot - bottom - top
    ordered = sorted(points, key=lambda system: points[system][-1][1])
    with styled():
        figure = new_figure(width, height)
        axes = figure.add_axes(
            (
                left / width,
                (list_height + bottom) / height,
                (width - left - right) / width,
                inner / height,
            )
        )
        _scales(axes, points, narrow=narrow)
        axes.set_title(f"RTFx, {many} calls at a time")
        wanted = [points[system][-1][1] / axes.get_ylim()[1] for system in ordered]
        heights = _apart(wanted, (_LINE - 5) / inner)
        for number, (system, at) in enumerate(zip(ordered, heights, strict=True)):
            rank = len(ordered) - number
            _point(axes, system, points[system], str(rank) if narrow else system, at)
            if narrow:
                y = (list_height - _LINE * rank) / height
                figure.text(6 / width, y, f"{rank}  {system}", va="bottom", fontsize=12)
        return to_svg(figure, name, label)


def _scales(axes: Axes, points: dict[str, list[Point]], *, narrow: bool) -> None:
    """Scale both axes from 0, so that distances are what they look like."""
    everything = [point for of_system in points.values() for point in of_system]
    axes.grid(True, axis="both")
    axes.set_xlabel("peak memory, MiB")
    axes.set_xlim(0, 1.08 * max(memory for memory, _ in everything))
    axes.set_ylim(0, 1.12 * max(speed for _, speed in everything))
    axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _point(axes: Axes, system: str, points: Sequence[Point], words: str, at: float) -> None:
    colour, (memory, speed) = colour_of(system), points[-1]
    axes.annotate(
        words,
        (memory, speed),
        (1.02, at),
        textcoords="axes fraction",
        va="center",
        ha="left",
        fontsize=12,
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": LINE, "linewidth": 1.2, "shrinkB": 6},
    )
    if len(points) == 2:
        axes.annotate(
            "",
            (memory, speed),
            points[0],
            arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.6, "shrinkB": 5},
        )
        axes.plot(
            *([value] for value in points[0]),
            marker="o",
            markersize=8,
            markerfacecolor=PAPER,
            markeredgecolor=colour,
            markeredgewidth=2,
        )
    axes.plot(
        [memory],
        [speed],
        marker="o",
        markersize=10,
        color=colour,
        markeredgecolor=PAPER,
        markeredgewidth=1.5,
    )


def _apart(wanted: Sequence[float], least: float) -> list[float]:
    """Move ascending heights up, then down from 1, until they are `least` apart."""
    heights: list[float] = []
    for value in wanted:
        heights.append(max(value, heights[-1] + least) if heights else value)
    above = 1.0 + least
    for number in reversed(range(len(heights))):
        above = heights[number] = min(heights[number], above - least)
    return heights
