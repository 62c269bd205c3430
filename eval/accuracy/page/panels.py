"""Figures with a row a system: intervals of rates, bands of latencies."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from eval.accuracy.page.svg import (
    INK,
    NARROW,
    PAPER,
    SOFT,
    WIDE,
    colour_of,
    new_figure,
    styled,
    to_svg,
)
from eval.accuracy.score import Latency, Rate

_OUTLIER = 3.0  # times the median of the intervals' ends: beyond it the axis ends
_LATENCIES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_BANDS = ((1, 99, 0.16), (5, 95, 0.2), (25, 75, 0.55))  # percentiles from, to; opacity


class Panel:
    """Axes with a row a system: its name, something drawn, and a figure in words at the right."""

    title: str
    names: list[str]
    column: str = ""  # heads the figures in words
    words_width: int  # of a figure in words, CSS pixels

    def draw_row(self, axes: Axes, name: str, row: float, step: float) -> None:
        """Draw a system at height `row`; two runs are `step` apart."""
        raise NotImplementedError

    def words(self, name: str) -> str:
        """Return the system's figure; of two runs both."""
        raise NotImplementedError

    def finish(self, axes: Axes) -> None:
        """Set the axis of values."""
        raise NotImplementedError


class RatePanel(Panel):
    """Error rates in percent with their intervals; one far beyond the others leaves the axis."""

    def __init__(self, title: str, rows: dict[str, list[Rate]]) -> None:
        self.title, self.rows, self.names = title, rows, list(rows)
        self.words_width = 54 * max(len(rates) for rates in rows.values())
        ends = [rate.high or 0.0 for rates in rows.values() for rate in rates]
        usual = [end for end in ends if end <= _OUTLIER * statistics.median(ends)]
        self._end = max(usual, default=0.0) * 1.04 or 1.0

    def draw_row(self, axes: Axes, name: str, row: float, step: float) -> None:
        """Do as `Panel.draw_row` says."""
        colour, rates = colour_of(name), self.rows[name]
        for number, rate in enumerate(rates):
            y = row + step * (number - (len(rates) - 1) / 2)
            low, high, middle = rate.low or 0.0, rate.high or 0.0, rate.percent or 0.0
            axes.plot([low, min(high, self._end)], [y, y], color=colour, linewidth=2.5, alpha=0.45)
            if high > self._end:  # the interval goes on
                axes.plot([0.985 * self._end], [y], marker=">", color=colour, markersize=6)
            if middle <= self._end:
                fill = PAPER if number < len(rates) - 1 else colour
                axes.plot(
                    [middle],
                    [y],
                    marker="o",
                    markersize=8,
                    markerfacecolor=fill,
                    markeredgecolor=colour,
                    markeredgewidth=2,
                )

    def words(self, name: str) -> str:
        """Do as `Panel.words` says."""
        return " → ".join(f"{rate.percent:.2f}" for rate in self.rows[name])

    def finish(self, axes: Axes) -> None:
        """Do as `Panel.finish` says."""
        axes.set_xlim(0, self._end)
        axes.xaxis.set_major_locator(MaxNLocator(5))


class LatencyPanel(Panel):
    """Latencies as nested bands of percentiles, on a logarithmic axis."""

    def __init__(self, title: str, rows: dict[str, list[Latency]]) -> None:
        self.title, self.rows, self.names = title, rows, list(rows)
        self.words_width = 124
        self.column = (
            "p50 / p95" if all(len(latencies) == 1 for latencies in rows.values()) else "p50"
        )

    def draw_row(self, axes: Axes, name: str, row: float, step: float) -> None:
        """Do as `Panel.draw_row` says."""
        colour, latencies = colour_of(name), self.rows[name]
        height = 0.46 if len(latencies) == 1 else 0.26
        for number, latency in enumerate(latencies):
            y = row + step * (number - (len(latencies) - 1) / 2)
            last = number == len(latencies) - 1
            for low, high, opacity in _BANDS:
                left, right = latency.percentiles_s[low], latency.percentiles_s[high]
                axes.barh(
                    [y],
                    [right - left],
                    height,
                    [left],
                    color=colour if last else SOFT,
                    alpha=opacity,
                    linewidth=0,
                )
            axes.plot(
                [latency.p50_s] * 2,
                [y - height / 2, y + height / 2],
                color=PAPER,
                linewidth=3.5,
                solid_capstyle="butt",
            )

    def words(self, name: str) -> str:
        """Do as `Panel.words` says."""
        latencies = self.rows[name]
        if len(latencies) == 1:
            return f"{_time(latencies[0].p50_s)} / {_time(latencies[0].p95_s)}"
        return " → ".join(_time(latency.p50_s) for latency in latencies)

    def finish(self, axes: Axes) -> None:
        """Do as `Panel.finish` says."""
        all_s = [
            s
            for latencies in self.rows.values()
            for latency in latencies
            for s in latency.percentiles_s[1:100]
        ]
        low, high = 0.85 * min(all_s), 1.15 * max(all_s)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [value for value in _LATENCIES if low <= value <= high]
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: max(1, -(-len(ticks) // 4))]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(seconds: float) -> str:
    """Write a round latency in words."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.0f} s"


def _time(seconds: float) -> str:
    """Write a latency in words."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def rows_figure(panels: Sequence[Panel], name: str, label: str, *, narrow: bool) -> str:
    """Draw panels side by side, with the names once; on a phone one above the other."""
    row, around = (46, 62) if narrow else (34, 66)
    heights = [row * len(panel.names) + around for panel in panels]
    with styled():
        if narrow:
            figure = new_figure(NARROW, sum(heights))
            columns = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        else:
            figure = new_figure(WIDE, max(heights))
            columns = figure.subplots(1, len(panels), squeeze=False)[0]
        for number, (axes, panel) in enumerate(zip(columns, panels, strict=True)):
            _rows(axes, panel, names_beside=number == 0 and not narrow, narrow=narrow)
        words = [panel.words_width for panel in panels]
        _place(figure, list(columns), heights, words, narrow=narrow)
        return to_svg(figure, name, label)


def _place(
    figure: Figure,
    columns: Sequence[Axes],
    heights: Sequence[int],
    words: Sequence[int],
    *,
    narrow: bool,
) -> None:
    """Place the axes; in pixels, for names and figures in words have known widths."""
    width, height = figure.get_size_inches() * figure.dpi
    gap, top = 30, 34
    if narrow:
        under = 0.0
        for axes, own in reversed(list(zip(columns, heights, strict=True))):
            box = (6, under + 28, width - 12, own - 28 - top)
            axes.set_position((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
            under += own
        return
    left = 208.0  # for the names
    each = (width - left - sum(words) - (len(columns) - 1) * gap) / len(columns)
    for axes, beside in zip(columns, words, strict=True):
        axes.set_position((left / width, 30 / height, each / width, (height - 30 - top) / height))
        left += each + beside + gap


def _rows(axes: Axes, panel: Panel, *, names_beside: bool, narrow: bool) -> None:
    count = len(panel.names)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_title(panel.title)
    axes.yaxis.set_major_locator(FixedLocator(list(range(count))))
    axes.set_yticklabels(panel.names if names_beside else [""] * count)
    axes.tick_params(axis="y", labelcolor=INK, pad=12)
    step = 0.26 if narrow else 0.34
    for number, name in enumerate(panel.names):
        panel.draw_row(axes, name, number + (0.16 if narrow else 0.0), step)
    panel.finish(axes)
    at = (0, "right", SOFT) if narrow else (12, "left", SOFT)
    for number, name in enumerate(panel.names):
        if narrow:
            _beside(axes, 0.0, number - 0.3, name, 0, "left", INK)
        _beside(axes, 1.0, number - (0.3 if narrow else 0.0), panel.words(name), *at)
    _beside(axes, 1.0, -0.5, panel.column, *at, above=12)


def _beside(
    axes: Axes, x: float, y: float, text: str, pixels: int, align: str, colour: str, above: int = 0
) -> None:
    """Write a text at x in parts of the axes, y in rows, moved right and up by pixels."""
    axes.annotate(
        text,
        (x, y),
        (pixels, above),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        va="center",
        ha=align,
        color=colour,
        fontsize=12,
        annotation_clip=False,
    )
