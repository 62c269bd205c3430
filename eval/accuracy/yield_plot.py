"""What selecting transcripts brings, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eval.files import replaced

_COLOURS = {"agreement": "#1f5fa8", "avg_logprob": "#b3541e", "confidence": "#3d7a3d"}


def draw(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], title: str) -> None:
    """Draw the CER of what is selected over how much that is.

    Args:
        path: of the PNG.
        curves: of each way of selecting, the pairs of yield and CER, both in percent.
        title: stands above it.

    Raises:
        FileError: it cannot be written.
    """
    figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for way, points in curves.items():
        shares, rates = [share for share, _ in points], [rate for _, rate in points]
        mark = "." if way == "agreement" else None  # at its first, many come together
        axes.plot(shares, rates, color=_COLOURS[way], linewidth=1.2, marker=mark, label=f"by {way}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("selected, % of the clips")
    axes.set_ylabel("CER of the selected, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    with replaced(path) as partial:
        figure.savefig(partial, format="png")
