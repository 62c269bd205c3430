"""matplotlib figures as SVG that stands in a page: its text, its colours, its unique ids.

A figure is drawn in CSS pixels, with the colours below; in the page they are the variables of its
style sheet, so that a figure follows light and dark.
"""

import contextlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, SOFT, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
OURS, THEIRS, OTHER = "#050505", "#060606", "#070707"
_VARIABLES = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    PAPER: "var(--paper)",
    OURS: "var(--ours)",
    THEIRS: "var(--theirs)",
    OTHER: "var(--other)",
}
WIDE, NARROW = 880, 350  # CSS pixels: of a page's column, of a phone's
_DPI = 72  # one point of matplotlib's is one CSS pixel then
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "axes.labelcolor": SOFT,
    "axes.labelsize": 12,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 1,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def colour_of(system: str) -> str:
    """Return the colour of a system's family."""
    if system.startswith("earshot-"):
        return OURS
    return THEIRS if system.startswith("faster-whisper-") else OTHER


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Give figures the page's style, inside the block."""
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of that size in CSS pixels; without pyplot, so nothing is kept of it."""
    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)


def to_svg(figure: Figure, name: str, label: str) -> str:
    """Save the figure as an `svg` element.

    Args:
        figure: drawn in these colours.
        name: starts its ids, so that they are unique in a page.
        label: says what it shows to those who do not see it.
    """
    with matplotlib.rc_context({"svg.hashsalt": name}):
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ET.fromstring(file.getvalue())
    metadata = root.find(f"{{{_SVG}}}metadata")
    if metadata is not None:
        root.remove(metadata)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", label)
    _make_ids_unique(root, name)
    # An HTML parser knows svg by its name; a prefix would make it an unknown element.
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    text = ET.tostring(root, encoding="unicode")
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)


def _make_ids_unique(root: ET.Element, name: str) -> None:
    """Keep only the ids that something in the figure refers to, and name them after the figure."""
    text = ET.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    for element in root.iter():
        mark = element.attrib.pop("id", None)
        if mark in used:
            element.set("id", f"{name}-{mark}")
        if _LINK in element.attrib:  # since SVG 2 without a prefix
            element.set("href", f"#{name}-" + element.attrib.pop(_LINK)[1:])
        for key, value in element.attrib.items():
            element.set(key, value.replace("url(#", f"url(#{name}-"))
