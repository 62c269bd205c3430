"""Two reports side by side."""

import operator
from typing import Any

from eval.accuracy.report import Report, table
from eval.accuracy.score import SystemScore
from serve.errors import ConfigError

_SPEEDS = (  # figure, where a Speed has it, factor, digits
    ("10 s clip ms", "ten_second_s", 1e3, 0),
    ("alone p50 ms", "alone.p50_s", 1e3, 0),
    ("loaded p95 ms", "loaded.p95_s", 1e3, 0),
    ("RTFx alone", "rtfx_alone", 1.0, 1),
    ("RTFx loaded", "rtfx_loaded", 1.0, 1),
)
_Figure = tuple[float | None, int]  # None where it was not measured; digits to show


def compare(a: Report, b: Report) -> str:
    """Two reports side by side: a, b, and b - a for each system that both have.

    Raises:
        ConfigError: they share no system.
    """
    systems = [{score.facts.name: score for score in report.systems} for report in (a, b)]
    both = [name for name in systems[0] if name in systems[1]]
    if not both:
        names = [", ".join(by_name) for by_name in systems]
        raise ConfigError(f"the reports share no system: {names[0]} and {names[1]}")
    rows = []
    for name in both:
        one, two = (_figures(by_name[name]) for by_name in systems)
        for label in [label for label in one if label in two]:
            (first, digits), (second, _) = one[label], two[label]
            rows.append([name, label, *_triple(first, second, digits)])
    differing = [f"NOTE: {what} differs: {x} and {y}" for what, x, y in _conditions(a, b) if x != y]
    runs = [f"A: {a.run.config_name}, {a.run.started}", f"B: {b.run.config_name}, {b.run.started}"]
    return "\n".join([*runs, *differing, "", table(["system", "figure", "A", "B", "B - A"], rows)])


def _figures(score: SystemScore) -> dict[str, _Figure]:
    """What `compare` shows of a system, by title."""
    figures: dict[str, _Figure] = {}
    for clip_set, heard in score.sets.items():
        figures[f"CER %, {clip_set}"] = (heard.overall.cer.percent, 2)
        figures[f"WER %, {clip_set}"] = (heard.overall.wer.percent, 2)
    if score.speed is not None:
        for label, place, factor, digits in _SPEEDS:
            value = operator.attrgetter(place)(score.speed)
            figures[label] = (None if value is None else value * factor, digits)
    figures["memory MiB"] = (score.facts.peak_memory_bytes / 2**20, 0)
    return figures


def _triple(one: float | None, two: float | None, digits: int) -> list[str]:
    cells = ["none" if value is None else f"{value:.{digits}f}" for value in (one, two)]
    gap = "" if one is None or two is None else f"{two - one:+.{digits}f}"
    return [*cells, gap]


def _conditions(a: Report, b: Report) -> list[tuple[str, Any, Any]]:
    """What must be equal for figures to be comparable."""
    names = ("manifest", "heldout", "clips", "audio_s", "concurrency", "repeats", "threads")
    pairs = [(name, getattr(a.run, name), getattr(b.run, name)) for name in (*names, "machine")]
    return [("normalizer", a.normalizer, b.normalizer), *pairs]
