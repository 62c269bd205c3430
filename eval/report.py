"""Write the report of a result: report.md, and report.html, one page that needs nothing else.

Style, charts and audio stand in the page; it loads nothing and runs no script, and its own policy
tells browsers so. Texts come from clips and systems: the template escapes them all.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from eval.record import (
    CONDITIONS,
    Figure,
    Part,
    ReportClip,
    ReportSection,
    Result,
    Run,
    Table,
    Text,
    verdict,
    write_text,
)

PAGE = "report.html"
MARKDOWN = "report.md"
_TEMPLATES = Path(__file__).parent / "templates"
_CONTEXT_WORDS = 8  # beside a mistake in a long text
_MARKS = {True: "passed", False: "**FAILED**", None: "**not decided**"}
_VERDICTS = {"passed": "Passed", "failed": "FAILED", "not decided": "Not decided"}


def write(folder: Path, run: Run, result: Result) -> None:
    """Write report.md and report.html.

    Raises:
        FileError: a file cannot be written.
    """
    write_text(folder / MARKDOWN, to_markdown(run, result))
    write_text(folder / PAGE, to_page(run, result))


def to_markdown(run: Run, result: Result, *, whole: bool = True) -> str:
    """Return the report in Markdown; if `whole` is false, only the sections that are printed."""
    blocks = [f"# {_title(run, result)}", result.about]
    if result.checks:
        blocks += [f"**{_VERDICTS[verdict(result.checks)]}**"]
        blocks += ["\n".join(f"- {_MARKS[c.passed]}: {c.name}. {c.detail}" for c in result.checks)]
    blocks += [block for part in result.notes for block in _part(part)]
    for section in _sections(run, result):
        if whole or section.printed:
            parts = [block for part in section.parts for block in _part(part)]
            blocks += [f"## {section.title}", *parts] if parts else []
    return "\n\n".join(filter(None, blocks)) + "\n"


def to_page(run: Run, result: Result) -> str:
    """Render a run and its result as an HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "shortened": _shortened, "kind": _kind, "slug": _slug}
    return environment.get_template("report.html").render(
        title=_title(run, result),
        command=run.command,
        result=result,
        verdict=verdict(result.checks),
        sections=_sections(run, result),
        style=Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8")),
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table. Columns align in plain text too; all but the first align right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *padded[1:]])} |"

    dashes = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), f"|{'|'.join(dashes)}|", *map(line, rows)])


def _title(run: Run, result: Result) -> str:
    return result.title or f"{run.command}: {run.config.name}"


def _sections(run: Run, result: Result) -> list[ReportSection]:
    if any(section.title == CONDITIONS for section in result.sections):
        return list(result.sections)
    return [*result.sections, run.conditions()]


def _part(part: Part) -> Iterator[str]:
    """Yield the blocks of a part in Markdown."""
    match part:
        case Text():
            yield f"### {part.title}" if part.title else ""
            yield part.text
            yield "\n".join(f"- {item}" for item in part.items)
        case Table():
            yield f"### {part.title}" if part.title else ""
            yield part.note
            cells = [[_cell(cell) for cell in row] for row in part.rows]
            if part.header:
                yield table(part.header, cells)
            else:
                yield "\n".join(f"- {name}: {value}" for name, value in cells)
        case Figure() | ReportClip():
            return


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------- filters of the template


def _kind(part: Part) -> str:
    return type(part).__name__


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _code(text: str) -> Markup:
    """Escape a text, and turn names in backticks into code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _shortened(text: str) -> str:
    """Return the ends of a long part without a mistake."""
    words = text.split(" ")
    if len(words) <= 2 * _CONTEXT_WORDS + 2:
        return text
    return " ".join([*words[:_CONTEXT_WORDS], "[…]", *words[-_CONTEXT_WORDS:]])
