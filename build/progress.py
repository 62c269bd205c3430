"""Show the progress of a build's long steps on stderr: a bar on a terminal, otherwise lines."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_LINE_EVERY_S = 10.0

T = TypeVar("T")


@contextlib.contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show how many units of a step are done.

    The bar disappears at the end. If stderr is not a terminal, there is a line at the start, one
    at the end, and one every 10 s or less often.

    Args:
        title: the step's name, such as "Verifying".
        total: the number of units.
        unit: the name of the units, in the plural.

    Yields:
        A function to call after each unit.
    """
    if sys.stderr.isatty():
        with tqdm(desc=title, total=total, unit=f" {unit}", leave=False) as bar:
            yield lambda: bar.update() and None
        return
    n_done, begun_s = 0, time.monotonic()
    written_s = begun_s

    def advance() -> None:
        nonlocal n_done, written_s
        n_done, now_s = n_done + 1, time.monotonic()
        if n_done == total or now_s - written_s >= _LINE_EVERY_S:
            written_s = now_s
            _write_line(f"{title}: {n_done} of {total} {unit} after {now_s - begun_s:.0f} s")

    _write_line(f"{title}: {total} {unit} …")
    yield advance


def tracked(items: Sequence[T], title: str, unit: str) -> Iterator[T]:
    """Yield items and show how many of them are done; see `progress`."""
    with progress(title, len(items), unit) as done:
        for item in items:
            yield item
            done()


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
