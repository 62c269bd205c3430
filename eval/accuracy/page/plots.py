"""The figures of a page: accuracy with intervals, latencies, throughput against memory.

Each takes one run, or two that are compared: then the first is drawn hollow and above the second.
Each is drawn twice, for a wide page and for a phone; the style sheet shows the one that fits.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from eval.accuracy.data import ClipSet
from eval.accuracy.page.panels import LatencyPanel, Panel, RatePanel, rows_figure
from eval.accuracy.page.scatter import Point, scatter
from eval.accuracy.report import Report
from eval.accuracy.score import Rate, SystemScore


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure in both widths, as `svg` elements."""

    wide: str
    narrow: str


def accuracy_plot(runs: Sequence[Report], clip_set: ClipSet) -> Drawing | None:
    """Draw CER and WER with their intervals; None where no system has a rate."""
    accuracies = {
        name: [_score(run, name).sets[clip_set].overall for run in runs]
        for name in _systems(runs, lambda score: clip_set in score.sets)
    }
    rates = {
        title: {name: list(map(attrgetter(place), of_runs)) for name, of_runs in accuracies.items()}
        for title, place in (("CER, %", "cer"), ("WER, %", "wer"))
    }
    return rates_plot(rates, f"accuracy-{clip_set}")


def rates_plot(rates: Mapping[str, Mapping[str, list[Rate]]], name: str) -> Drawing | None:
    """Draw error rates with their intervals, by title and system; None where no system has one."""
    panels: list[Panel] = []
    for title, rows in rates.items():
        known = {
            name: rates_of_runs
            for name, rates_of_runs in rows.items()
            if all(r.percent is not None for r in rates_of_runs)
        }
        if known:
            panels.append(RatePanel(title, known))
    label = "Character and word error rates with their 95 % intervals, by system"
    return _drawn(panels, name, label) if panels else None


def latency_plot(runs: Sequence[Report]) -> Drawing | None:
    """Draw latencies alone and under load; None where nothing was timed."""
    many = runs[-1].run.concurrency
    panels: list[Panel] = []
    phases = (("One call at a time", "speed.alone"), (f"{many} calls at a time", "speed.loaded"))
    for title, place in phases:
        rows = {
            name: [attrgetter(place)(_score(run, name)) for run in runs]
            for name in _systems(runs, lambda score: score.speed is not None)
        }
        if rows:
            panels.append(LatencyPanel(title, rows))
    label = "Latency of calls by system: median, and the middle 50, 90 and 98 %"
    return _drawn(panels, "latency", label) if panels else None


def _score(run: Report, name: str) -> SystemScore:
    return next(score for score in run.systems if score.facts.name == name)


def _systems(runs: Sequence[Report], fits: Callable[[SystemScore], bool]) -> list[str]:
    """Return those of the first run, in its order, that fit in every run."""
    fitting = [{s.facts.name for s in run.systems if fits(s)} for run in runs]
    names = [score.facts.name for score in runs[0].systems]
    return [name for name in names if all(name in fit for fit in fitting)]


def memory_plot(runs: Sequence[Report]) -> Drawing | None:
    """Draw throughput under load against peak memory; None where nothing was timed."""
    names = _systems(runs, lambda score: score.speed is not None)
    if not names:
        return None
    points = {name: [_memory_and_speed(_score(run, name)) for run in runs] for name in names}
    label = "Throughput under load against peak memory, by system"
    many = runs[-1].run.concurrency
    return Drawing(
        scatter(points, many, "memory-wide", label, narrow=False),
        scatter(points, many, "memory-narrow", label, narrow=True),
    )


def _memory_and_speed(score: SystemScore) -> Point:
    assert score.speed is not None  # of the timed
    return score.facts.peak_memory_bytes / 2**20, score.speed.rtfx_loaded


def _drawn(panels: Sequence[Panel], name: str, label: str) -> Drawing:
    return Drawing(
        rows_figure(panels, f"{name}-wide", label, narrow=False),
        rows_figure(panels, f"{name}-narrow", label, narrow=True),
    )
