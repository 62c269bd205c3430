"""Report -> report.html; two reports -> compare.html.

A page is one file: style, figures and audio stand in it, it loads nothing and runs no script, and
its own policy tells browsers so. Texts come from clips and systems: templates escape them all.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from eval.accuracy.compare import clips_that_changed, differing_conditions, figure_rows
from eval.accuracy.data import ClipSet, TimedCall
from eval.accuracy.gates import TITLES
from eval.accuracy.normalize import Normalize
from eval.accuracy.page.clips import chooser, worst_clips
from eval.accuracy.page.plots import accuracy_plot, latency_plot, memory_plot
from eval.accuracy.report import (
    Report,
    languages_text,
    latency_text,
    parts_rows,
    percent,
    ratios,
    rivals,
    unread,
)
from eval.accuracy.rules import RULES
from eval.accuracy.run import RunFacts
from eval.accuracy.score import Misheard, Rate, Speed, SystemScore
from eval.files import write_text

PAGE = "report.html"
_SHOWN_WORDS = 12  # of each kind of mistake
_CONTEXT_WORDS = 8  # beside a mistake in a long text
_TEMPLATES = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True)
class Card:
    """A figure at the top of the page."""

    title: str
    value: str
    details: tuple[str, ...]


def write_page(
    path: Path, report: Report, calls: Mapping[str, Sequence[TimedCall]], normalize: Normalize
) -> None:
    """Write the page of a run.

    Args:
        path: of the file.
        report: what is shown.
        calls: of each system, by name, for the clips that were misheard worst.
        normalize: what texts were compared under.

    Raises:
        FileError: it cannot be written.
    """
    ours = chooser(report)
    page = render(
        "report.html",
        report=report,
        cards=_cards(report),
        accuracy={name: accuracy_plot([report], name) for name in report.run.clips},
        latency=latency_plot([report]),
        memory=memory_plot([report]),
        ratios=ratios(report.systems),
        chooser=ours.facts.name if ours else None,
        worst=worst_clips(report, calls, normalize),
        rules=RULES,
        parts=_parts(report),
        unread=unread(report),
        languages=languages_text(report.run),
    )
    write_text(path, page)


def write_comparison(path: Path, a: Report, b: Report) -> None:
    """Write the page of two runs.

    Raises:
        ConfigError: they share no system.
        FileError: it cannot be written.
    """
    rows = figure_rows(a, b)
    sets = [name for name in a.run.clips if name in b.run.clips]
    page = render(
        "compare.html",
        a=a,
        b=b,
        rows=rows,
        differing=differing_conditions(a, b),
        accuracy={name: accuracy_plot([a, b], name) for name in sets},
        latency=latency_plot([a, b]),
        memory=memory_plot([a, b]),
        changed=clips_that_changed(a, b),
    )
    write_text(path, page)


def render(template: str, *folders: Path, **content: Any) -> str:
    """Fill a template of this folder, or of others whose templates extend these."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([_TEMPLATES, *folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "code": _code,
        "latency": latency_text,
        "rate": percent,
        "svg": Markup,  # only what `to_svg` made
        "shortened": _shortened,
        "words": _word_columns,
    }
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    environment.globals |= {"style": Markup(style), "titles": TITLES}
    return environment.get_template(template).render(**content)


def _code(text: str) -> Markup:
    """Escape a text whose `names` in backticks become code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _word_columns(misheard: Misheard) -> list[dict[str, Any]]:
    """List what was misheard, by kind; each bar's length is a share of the longest of all."""
    kinds = {
        "Heard as another word": misheard.substitutions,
        "Not heard": misheard.deletions,
        "Heard though nobody said it": misheard.insertions,
    }
    most = max((edit.count for edits in kinds.values() for edit in edits), default=1)
    return [
        {
            "title": title,
            "edits": edits[:_SHOWN_WORDS],
            "more": len(edits) > _SHOWN_WORDS,
            "most": most,
        }
        for title, edits in kinds.items()
    ]


def _shortened(text: str) -> str:
    """Return the ends of a long stretch without a mistake."""
    words = text.split(" ")
    if len(words) <= 2 * _CONTEXT_WORDS + 2:
        return text
    return " ".join([*words[:_CONTEXT_WORDS], "[…]", *words[-_CONTEXT_WORDS:]])


def _cards(report: Report) -> list[Card]:
    """Show the configured system's figures, each beside faster-whisper's best with its search."""
    ours = chooser(report)
    if ours is None:
        return []
    theirs = rivals(ours, report.systems)
    cards = [
        _rate_card(f"CER, {TITLES[name]}", of_set.overall.cer, _rates(theirs, name))
        for name, of_set in ours.sets.items()
        if of_set.overall.cer.percent is not None
    ]
    if ours.speed is not None:
        cards += _speed_cards(ours, ours.speed, theirs, report.run)
    return cards


def _parts(report: Report) -> dict[ClipSet, dict[str, tuple[list[str], list[list[str]]]]]:
    """Return, of each set, by what it is divided: the systems, and a row for each part."""
    parts: dict[ClipSet, dict[str, tuple[list[str], list[list[str]]]]] = {}
    for name in report.run.clips:
        sets = {s.facts.name: s.sets[name] for s in report.systems if name in s.sets}
        kinds = {
            "language": {system: of_set.by_language for system, of_set in sets.items()},
            "group": {system: of_set.by_group for system, of_set in sets.items()},
        }
        parts[name] = {
            kind: (list(sets), rows)
            for kind, systems in kinds.items()
            if systems and (rows := parts_rows(systems))
        }
    return parts


def _rates(scores: Sequence[SystemScore], clip_set: ClipSet) -> list[float]:
    """Return their rates on these clips, of those that heard them."""
    rates = [score.sets[clip_set].overall.cer.percent for score in scores if clip_set in score.sets]
    return [rate for rate in rates if rate is not None]


def _rate_card(title: str, rate: Rate, theirs: Sequence[float]) -> Card:
    interval = f"[{rate.low:.2f}, {rate.high:.2f}]"
    best = _beside(f"{min(theirs):.2f} %" if theirs else None)
    return Card(title, f"{rate.percent:.2f} %", (interval, best))


def _speed_cards(
    ours: SystemScore, speed: Speed, theirs: Sequence[SystemScore], run: RunFacts
) -> list[Card]:
    timed = [(score.speed, score.facts.peak_memory_bytes) for score in theirs if score.speed]
    best = _beside(f"{max(other.rtfx_loaded for other, _ in timed):.1f}" if timed else None)
    cards = [Card(f"RTFx, {run.concurrency} at a time", f"{speed.rtfx_loaded:.1f}", (best,))]
    if speed.one_clip_s is not None:
        quick = [other.one_clip_s for other, _ in timed if other.one_clip_s is not None]
        best = _beside(f"{1e3 * min(quick):.0f} ms" if quick else None)
        cards.append(
            Card(f"{run.one_clip_title}, alone", f"{1e3 * speed.one_clip_s:.0f} ms", (best,))
        )
    least = _beside(f"{min(memory for _, memory in timed) / 2**20:.0f} MiB" if timed else None)
    own = f"{ours.facts.peak_memory_bytes / 2**20:.0f} MiB"
    return [*cards, Card("Peak memory", own, (least,))]


def _beside(best: str | None) -> str:
    if best is None:
        return "no faster-whisper to compare"
    return "faster-whisper " + best.replace(" ", "\N{NO-BREAK SPACE}")
